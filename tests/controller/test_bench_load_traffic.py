"""Classes and arrivals of a mixed load, the command line, and the servers that it starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from controller.bench.load_classes import (
    DEFAULT_CLASSES,
    LoadClass,
    parse_class,
    parse_classes,
)
from controller.bench.load_contestants import DEFAULT_POLICIES, StartedServers, policy_config
from controller.bench.load_traffic import LoadTraffic, parse_arrivals, requests_of
from controller.bench.scenario import PromptSource
from controller.bench.servers import SERVER_CONFIGS
from controller.cli.bench import app
from controller.config import parse_slo_class
from controller.policy.slo import OnInfeasible, SloClass
from controller.workload.arrivals import Arrival, Workload
from controller.workload.lengths import LognormalLengths
from controller.workload.traces import write_trace
from engine.clock import VirtualClock

TEXT = "chat:share=60,prompt=48/128,output=24/64,ttft=12,tpot=3,weight=2,on_infeasible=degrade"


def test_a_class_is_read_from_words_and_written_as_such() -> None:
    found = parse_class(TEXT)
    assert found == LoadClass(
        "chat", 60, LognormalLengths(48, 128, 24, 64), 12, 3, 2, OnInfeasible.DEGRADE
    )
    assert parse_class(found.text) == found
    assert parse_class("x:prompt=9,output=2") == LoadClass("x", 1, LognormalLengths(9, 9, 2, 2))
    assert all(parse_class(each.text) == each for each in DEFAULT_CLASSES)
    assert parse_classes([]) == DEFAULT_CLASSES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chat:prompt=9", "output of class 'chat' is missing"),
        ("chat:prompt=9,output=2,pace=1", "'pace=1' of class 'chat'"),
        ("chat:prompt=9,prompt=9,output=2", "prompt of class 'chat' is given twice"),
        ("chat:prompt=9,output=two", "output must be a number, got 'two'"),
        ("chat:prompt=9/3,output=2", "prompt_p99 must not be below"),
        ("chat:prompt=9,output=2,ttft=0", "ttft_steps of class 'chat' must be a positive"),
        ("chat:prompt=9,output=2,share=nan", "share of class 'chat' must be a positive"),
        ("chat:prompt=9,output=2,on_infeasible=drop", "on_infeasible of class 'chat'"),
        (":prompt=9,output=2", "name of a class"),
    ],
)
def test_wrong_words_are_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_class(text)


def test_a_class_is_there_once() -> None:
    with pytest.raises(ValueError, match="'chat' is given twice"):
        parse_classes([TEXT, TEXT])


def test_the_same_words_make_the_same_arrivals() -> None:
    traffic = LoadTraffic()
    assert traffic.workload(2.0, 60.0, 5) == traffic.workload(2.0, 60.0, 5)
    assert traffic.workload(2.0, 60.0, 5) != traffic.workload(2.0, 60.0, 6)


@pytest.mark.parametrize("traffic", [LoadTraffic(), LoadTraffic(kind="gamma", shape=4.0)])
def test_rate_and_shares_are_those_that_were_asked_for(traffic: LoadTraffic) -> None:
    made = traffic.workload(2.0, 3000.0, 0)
    assert made.num_requests == pytest.approx(6000, rel=0.1)
    counts = made.class_counts
    assert counts["chat"] / made.num_requests == pytest.approx(0.6, abs=0.05)
    assert counts["long"] / made.num_requests == pytest.approx(0.2, abs=0.05)
    long = [a.num_prompt_tokens for a in made.arrivals if a.slo_class == "long"]
    chat = [a.num_prompt_tokens for a in made.arrivals if a.slo_class == "chat"]
    assert sorted(long)[len(long) // 2] == pytest.approx(640, rel=0.1)
    assert sorted(chat)[len(chat) // 2] == pytest.approx(48, rel=0.1)


def test_classes_do_not_arrive_at_the_same_instants() -> None:
    made = LoadTraffic().workload(2.0, 100.0, 0)
    assert len({a.at_s for a in made.arrivals}) == made.num_requests


def test_a_square_wave_alternates_between_the_first_class_and_the_others() -> None:
    made = LoadTraffic(kind="square", shape=10.0).workload(4.0, 40.0, 0)
    for start_s, names in ((0, {"chat"}), (10, {"batch", "long"}), (20, {"chat"})):
        found = {a.slo_class for a in made.arrivals if start_s <= a.at_s < start_s + 10}
        assert found == names
    with pytest.raises(ValueError, match="square needs two classes"):
        LoadTraffic(DEFAULT_CLASSES[:1], "square", 10.0)


def trace_file(folder: Path, *classes: str | None) -> Path:
    path = folder / "trace.csv"
    arrivals = tuple(
        Arrival(2.0 * i, 40 + 10 * i, 20, name, (1,)) for i, name in enumerate(classes)
    )
    write_trace(Workload("t", arrivals), path)
    return path


def test_a_trace_keeps_its_pattern_and_gets_classes_by_length(tmp_path: Path) -> None:
    path = trace_file(tmp_path, *[None] * 10)
    made = LoadTraffic(trace=path, length_scale=0.5, max_model_len=40).workload(4.0, 2.5, 0)
    assert made.num_requests == 10
    assert made.rate == pytest.approx(4.0)
    assert [a.slo_class for a in made.arrivals] == ["chat"] * 6 + ["batch"] * 2 + ["long"] * 2
    assert all(a.num_prompt_tokens + a.num_output_tokens <= 40 for a in made.arrivals)
    assert {a.prefix_ids for a in made.arrivals} == {()}


def test_a_trace_with_classes_must_know_ours(tmp_path: Path) -> None:
    path = trace_file(tmp_path, "chat", "long", "chat")
    made = LoadTraffic(trace=path).workload(1.0, 3.0, 0)
    assert [a.slo_class for a in made.arrivals] == ["chat", "long", "chat"]
    with pytest.raises(ValueError, match="holds 3 requests, 9 are needed"):
        LoadTraffic(trace=path).workload(3.0, 3.0, 0)
    path = trace_file(tmp_path, "chat", "code", "chat")
    with pytest.raises(ValueError, match="names class 'code'; known: chat, batch, long"):
        LoadTraffic(trace=path).workload(1.0, 3.0, 0)


def test_arrivals_are_words() -> None:
    assert parse_arrivals("poisson") == ("poisson", 1.0)
    assert parse_arrivals("gamma:4") == ("gamma", 4.0)
    assert parse_arrivals("square:40") == ("square", 40.0)
    for wrong in ("gamma", "poisson:2", "uniform", "square:x", "gamma:-1", "gamma:nan", ""):
        with pytest.raises(ValueError, match=r"arrivals must be|positive number"):
            parse_arrivals(wrong)


def test_requests_carry_class_targets_and_lengths() -> None:
    made = LoadTraffic().workload(2.0, 30.0, 0)
    classes: dict[str, SloClass] = {each.name: each.slo_class(0.1) for each in DEFAULT_CLASSES}
    requests = requests_of(made, classes, PromptSource(0))
    for arrival, request in zip(made.arrivals, requests, strict=True):
        assert arrival.slo_class is not None
        assert len(request.prompt_token_ids) == arrival.num_prompt_tokens
        assert request.max_tokens == arrival.num_output_tokens
        assert request.headers()["x-llm-d-inference-objective"] == arrival.slo_class
        assert ("x-slo-tpot-ms" in request.headers()) == (arrival.slo_class != "batch")
    assert len({request.prompt_token_ids[0] for request in requests}) == len(requests)


def test_policies_are_servers() -> None:
    for key in ("slo", "whole", "static-128", "static-256"):
        assert policy_config(key) == SERVER_CONFIGS[key]
    assert policy_config("static-64").serve_flags[-1] == "64"
    assert policy_config("edf-shed-384").serve_flags == ("--policy", "edf-shed-384")
    assert policy_config("slack-greedy").label == "slack-greedy"
    for wrong in ("static", "static-0", "static-x", "edf-N", "edf-0", ""):
        with pytest.raises(ValueError, match=r"policy must be static-N or one of slo, fcfs-N"):
            policy_config(wrong)


def test_servers_know_the_classes_and_keep_a_database_per_turn(tmp_path: Path) -> None:
    servers = StartedServers("demo", DEFAULT_CLASSES, tmp_path, VirtualClock(), ("--dtype", "auto"))
    assert [each.key for each in servers.contestants(DEFAULT_POLICIES)] == list(DEFAULT_POLICIES)
    database = servers.database(1, "slo")
    words = servers.command("static-64", 8123, database)
    assert words[-2:] == ["--dtype", "auto"]
    assert f"sqlite:///{database}" in words
    given = [words[i + 1] for i, word in enumerate(words) if word == "--slo-class"]
    known = [parse_slo_class(text) for text in given]
    assert [each.name for each in known] == ["chat", "batch", "long"]
    assert all(each.slo.is_best_effort for each in known)
    assert servers.database(0, "slo") != database != servers.database(1, "static-64")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rates", "1", "--load", "1"], "not both"),
        (["--rates", "1,zero"], "must be positive numbers, got '1,zero'"),
        (["--load", "0"], "must be positive numbers, got '0'"),
        (
            ["--policy", "best"],
            "policy must be static-N or one of slo, fcfs-N, edf-N, edf-shed-N, whole",
        ),
        (["--class", "chat:prompt=9"], "output of class 'chat' is missing"),
        (["--arrivals", "gamma"], "arrivals must be poisson, gamma:CV² or square:SECONDS"),
        (["--trace", "/nonexistent/trace.csv"], "/nonexistent/trace.csv"),
        (["--out", "/nonexistent/folder/load.json"], "is not a directory"),
        (
            ["--simulate", "--serve-option", "--db=sqlite:///run.db"],
            "leave --db out, and keep them with --keep FOLDER",
        ),
        (["--simulate", "--serve-option=--db", "--serve-option=x"], "leave --db out"),
        (["--keep", "/dev"], "/dev is there already: name a folder that is new or empty"),
        (["--keep", "/dev/null"], "/dev/null is there already"),
        (["--rates", "1", "--keep", "/dev/null/runs"], "/dev/null/runs: Not a directory"),
    ],
)
def test_wrong_usage_exits_with_2(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["load", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())


def test_a_server_that_does_not_start_is_an_invalid_measurement(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["load", "--serve", str(tmp_path / "no-model"), "--rates", "1", "--serve-option=--bogus"],
    )
    assert result.exit_code == 1
    assert (
        "INVALID: nothing could be measured: the server ended before it was ready" in result.output
    )
    assert "--bogus" in result.output
