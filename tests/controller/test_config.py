"""Settings: the order of their sources, and errors that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from controller.cli.main import app
from controller.config import Settings, SettingsError, load_settings, parse_slo_class
from controller.policy.slo import OnInfeasible, Slo, SloClass
from controller.runtime.wiring import _host_kv_bytes


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"PACELINE_{name.upper()}", raising=False)
    monkeypatch.chdir(tmp_path)


def test_flag_over_environment_over_file_over_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('port = 1\nhost = "h1"\nmax_num_seqs = 5\n[planner]\npace = 0.5\n')
    monkeypatch.setenv("PACELINE_PORT", "2")
    monkeypatch.setenv("PACELINE_HOST", "h2")
    monkeypatch.setenv("PACELINE_PLANNER__GAP_LIMIT_S", "4")
    settings = load_settings({"port": "3"}, file)
    assert (settings.port, settings.host, settings.max_num_seqs) == (3, "h2", 5)
    assert (settings.planner.pace, settings.planner.gap_limit_s) == (0.5, 4.0)
    assert settings.dtype == "auto"


def test_the_file_in_the_current_directory_is_found(tmp_path: Path) -> None:
    assert load_settings({}).port == 8000
    (tmp_path / "paceline.toml").write_text("port = 9\n")
    assert load_settings({}).port == 9


def test_classes_from_flags_and_from_a_table(tmp_path: Path) -> None:
    text = "chat:ttft_ms=500,tpot_ms=50,weight=2,on_infeasible=degrade"
    settings = load_settings({"slo_class": [text, "batch:"], "default_slo_class": "chat"})
    chat = SloClass("chat", Slo(0.5, 0.05), 2.0, OnInfeasible.DEGRADE)
    assert settings.slo_classes == {
        "default": SloClass("default"),
        "chat": chat,
        "batch": SloClass("batch"),
    }
    (tmp_path / "paceline.toml").write_text(
        'default_slo_class = "chat"\n[[slo_class]]\nname = "chat"\nttft_ms = 500\ntpot_ms = 50\n'
        'weight = 2\non_infeasible = "degrade"\n'
    )
    assert load_settings({}).slo_classes["chat"] == chat


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"port": "70000"}, "port: .*65535"),
        ({"port": "x"}, "port"),
        ({"policy": "magic"}, "policy: expected one of static, slo, fcfs-N, .*, got 'magic'"),
        ({"policy": "edf-N"}, "policy: expected one of static, .*, got 'edf-N'"),
        ({"policy": "fcfs-2000000"}, "policy: a step has at most 1048576 tokens"),
        (
            {"policy": "edf-512", "max_num_batched_tokens": 256},
            "policy: edf-512 computes up to 512 tokens in a step, but max_num_batched_tokens is",
        ),
        ({"max_num_seqs": "0"}, "max_num_seqs"),
        ({"max_model_len": "1.5"}, "max_model_len"),
        ({"model": ""}, "model"),
        ({"slo_class": ["chat:ttft=1"]}, "unknown key 'ttft' in SLO class 'chat'"),
        ({"slo_class": ["chat:ttft_ms=soon"]}, "ttft_ms of SLO class 'chat' must be a number"),
        (
            {"slo_class": ["chat:ttft_ms=-5"]},
            "^slo_class: ttft_ms of SLO class 'chat' must be a positive number of .*, got -5$",
        ),
        ({"slo_class": ["chat:tpot_ms=nan"]}, "tpot_ms of SLO class 'chat' must be .*, got nan$"),
        ({"slo_class": ["chat:e2e_ms=1e300"]}, "e2e_ms of SLO class 'chat' must be .*, got 1e"),
        ({"slo_class": [":ttft_ms=1"]}, "name of an SLO class must not be empty"),
        ({"slo_class": ["a:on_infeasible=shrug"]}, "on_infeasible of SLO class 'a'"),
        ({"slo_class": ["a:weight=0"]}, "weight of SLO class 'a'"),
        ({"slo_class": ["a:ttft_ms=1,ttft_ms=2"]}, "ttft_ms is given twice"),
        ({"slo_class": ["a:", "a:"]}, "SLO class 'a' is given twice"),
        ({"slo_class": [{"name": "a", "ttft_ms": True}]}, "ttft_ms of SLO class 'a'"),
        ({"default_slo_class": "gold"}, "no class 'gold'; known: default"),
        ({"chat_template": "nowhere.jinja"}, "chat_template: no such file"),
        ({"planner": {"pace": 2.0}}, "planner"),
        ({"no_such": 1}, "no_such: no such setting"),
    ],
)
def test_errors_name_the_field(flags: dict[str, Any], names: str) -> None:
    with pytest.raises(SettingsError, match=names):
        load_settings(flags)


@pytest.mark.parametrize(
    ("content", "names"),
    [("port = = 1", "line 1"), ("prot = 1", "prot: no such setting"), (None, "No such file")],
)
def test_broken_files_are_named(tmp_path: Path, content: str | None, names: str) -> None:
    file = tmp_path / "broken.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match=names):
        load_settings({}, file)


def test_secrets_never_leave_as_text() -> None:
    url = "postgresql+psycopg://me:s3cret@host/name"
    settings = load_settings({"api_key": "s3cret", "db": url})
    assert "s3cret" not in json.dumps(settings.to_json())
    assert "s3cret" not in repr(settings.api_key)


@pytest.mark.parametrize(
    ("policy", "given", "expected"),
    [
        ("slo", None, 8192),
        ("static", None, 512),
        ("whole", None, 1 << 20),
        ("static", "128", 128),
        # A budget is the planner's; the engine's cap only makes room for it.
        ("edf-64", None, 8192),
        ("fcfs-16384", None, 16384),
        ("edf-shed-64", "128", 128),
        ("slack-greedy", None, 8192),
    ],
)
def test_the_step_cap_follows_the_policy(policy: str, given: str | None, expected: int) -> None:
    flags = {"policy": policy} | ({"max_num_batched_tokens": given} if given else {})
    assert load_settings(flags).effective_max_num_batched_tokens == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, 128),
        ({"max_num_batched_tokens": "4096"}, 128),
        ({"max_num_batched_tokens": "96"}, 96),
        ({"policy": "static", "max_num_batched_tokens": "64"}, 64),
        # A budget is the planner's: the step has room for everybody.
        ({"policy": "fcfs-64"}, 128),
        ({"max_num_seqs": "64"}, 64),
        # Asked for, if only with the default's own number: whoever does is told that it cannot be.
        ({"max_num_seqs": "128", "max_num_batched_tokens": "96"}, 128),
    ],
)
def test_seats_that_nobody_asked_for_stay_within_the_tokens_of_a_step(
    flags: dict[str, Any], expected: int
) -> None:
    settings = load_settings(flags)
    assert settings.effective_max_num_seqs == expected
    assert settings.to_json()["max_num_seqs"] == expected


def test_seats_from_environment_file_and_profile_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap = {"max_num_batched_tokens": "96"}
    assert load_settings(cap, None, {"max_num_seqs": 200}).effective_max_num_seqs == 200
    (tmp_path / "paceline.toml").write_text("max_num_seqs = 150\n")
    assert load_settings(cap).effective_max_num_seqs == 150
    monkeypatch.setenv("PACELINE_MAX_NUM_SEQS", "140")
    assert load_settings(cap).effective_max_num_seqs == 140


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"policy": "static"}, "fcfs-512"),
        ({"policy": "static", "max_num_batched_tokens": "128"}, "fcfs-128"),
        ({"policy": "edf-shed-384"}, "edf-shed-384"),
        ({"policy": "whole"}, "whole"),
        ({}, "slo"),
    ],
)
def test_every_policy_has_a_planner(flags: dict[str, Any], name: str) -> None:
    assert load_settings(flags).planner_name == name


def test_a_class_object_passes_through() -> None:
    item = SloClass("chat")
    assert parse_slo_class(item) is item
    with pytest.raises(ValueError, match="NAME:key=value"):
        parse_slo_class(3)


def test_settings_of_kv_memory_have_vllms_names_and_reach_the_loader() -> None:
    settings = load_settings({"swap_space": "1.5", "is_prefix_caching_enabled": False})
    assert (settings.swap_space, settings.is_prefix_caching_enabled) == (1.5, False)
    # In the loader's words 0 is its own choice, and less than a block is none.
    assert [_host_kv_bytes(gib) for gib in (None, 0.0, 1.5)] == [0, 1, 3 << 29]
    defaults = load_settings({})
    assert (defaults.swap_space, defaults.is_prefix_caching_enabled) == (None, True)
    assert not defaults.is_eager_enforced
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {name for parameter in serve.params for name in parameter.opts}
    assert {"--swap-space", "--enable-prefix-caching", "--enforce-eager"} <= options


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "lots"])
def test_a_swap_space_that_is_no_size_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match="swap_space"):
        load_settings({"swap_space": value})


def test_a_profile_is_above_defaults_and_below_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[planner]\npace = 0.5\n")
    monkeypatch.setenv("PACELINE_PLANNER__BANK", "0.25")
    tuned = {
        "profile": "mine",
        "max_num_seqs": 9,
        "port": 1,
        "planner": {"pace": 0.7, "bank": 1.0, "knee_share": 0.8},
    }
    settings = load_settings({"port": "3"}, file, tuned)
    planner = settings.planner
    assert (planner.pace, planner.bank, planner.knee_share) == (0.5, 0.25, 0.8)
    assert (settings.port, settings.max_num_seqs, settings.profile) == (3, 9, "mine")
    # The values of one profile never stay for the next settings.
    assert load_settings({}).max_num_seqs == 128
