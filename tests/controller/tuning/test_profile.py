"""Profiles: a round trip in YAML and JSON, refusals that name the field, words that are honest."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.runtime.tuned_for import TunedFor
from controller.tuning.influence import Effect, Influence
from controller.tuning.job import Comparison, Search
from controller.tuning.objective import Outcome
from controller.tuning.profile import (
    BudgetProfile,
    ProfileError,
    Verdict,
    check_name,
    is_file_name,
    read_profile,
)
from controller.tuning.report import make_profile, statement, trial_records
from controller.tuning.space import DEFAULTS, settings_at
from controller.tuning.trial import Trial
from tests.controller.tuning.tuning_tasks import crowd, task

SHIPPED = {"pace": 0.95, "token_budget": 8192.0, "max_running": 128.0}
POINT = {"pace": 0.875, "token_budget": 512.0, "max_running": 192.0}
EFFECT = {"knob": "pace", "value": 0.9, "gain": 0.1, "kept": 0.1, "guards": []}
OWNER = TunedFor("mine", "demo", "cpu (2 threads)", "float32", "reference")


def outcome(attainment: float, gap_s: float | None = 0.1) -> Outcome:
    return Outcome(attainment, {"chat": attainment}, {"chat": 100}, 50.0, gap_s, 0.5, None)


def search_of(*scores: float) -> Search:
    trials = tuple(
        Trial(i, "complete", POINT if i else SHIPPED, value, (outcome(value),), None, 7)
        for i, value in enumerate(scores)
    )
    best = max(trials, key=lambda trial: (trial.score or 0.0, -trial.number))
    return Search(trials, best, settings_at(best.point) if best.number else DEFAULTS, False)


def compared(before: list[float], after: list[float], gap_s: float = 0.1) -> Comparison:
    return Comparison(
        tuple(outcome(each) for each in before), tuple(outcome(each, gap_s) for each in after)
    )


def profile(name: str = "mine") -> BudgetProfile:
    alone = Trial(2, "complete", SHIPPED | {"pace": 0.9}, 0.55, (outcome(0.55),), None, 8)
    found = search_of(0.5, 0.75)
    return make_profile(
        name,
        task(crowd(5), crowd(6)),
        replace(
            found,
            trials=(*found.trials, alone),
            worth=(Effect("token_budget", 512.0, 0.2, 0.1, ("goodput",)),),
        ),
        compared([0.5, 0.625], [0.75, 0.75]),
        tuned_for=replace(OWNER, profile=name),
        seed=3,
        created_at=1_700_000_000_000,
        study="mine.study",
    )


def test_a_profile_survives_yaml_and_json(tmp_path: Path) -> None:
    made = profile()
    path = tmp_path / "mine.yaml"
    path.write_text(made.to_yaml(), encoding="utf-8")
    found = read_profile(path)
    assert found.settings == made.settings
    assert found.settings.max_num_seqs == 192
    assert found.tuned_for == OWNER
    assert found.judged == made.judged
    assert found.influence == made.influence
    assert [each.knob for each in found.influence.alone] == ["pace"]
    assert found.influence.found == (Effect("token_budget", 512.0, 0.2, 0.1, ("goodput",)),)
    assert found.to_json() == made.to_json()
    assert BudgetProfile.from_json(json.loads(json.dumps(made.to_json()))).to_yaml() == (
        path.read_text(encoding="utf-8")
    )


def test_a_profile_that_was_made_before_knobs_were_told_apart_can_be_read() -> None:
    found = BudgetProfile.from_json(edited(influence=...))
    assert found.influence == Influence()
    assert found.settings == profile().settings


def test_a_profile_says_where_it_is_from_and_what_it_gains() -> None:
    made = profile()
    provenance = made.provenance
    assert (provenance.workload, provenance.hardware) == ("test", "quiet")
    assert (provenance.seeds, provenance.num_trials, provenance.trial) == ((0, 1), 3, 1)
    assert set(provenance.versions) == {"paceline", "optuna"}
    assert provenance.classes[0]["name"] == "chat"
    assert made.judged.verdict is Verdict.BETTER
    assert made.judged.before["attainment"].mean == 0.5625
    assert made.judged.after["attainment of chat"].min == 0.75
    assert "tpot_p99_s" not in made.judged.after
    assert (made.judged.difference.min, made.judged.difference.max) == (0.125, 0.25)


def test_a_server_gets_the_settings_in_its_own_words() -> None:
    values = profile().server_values()
    assert values["max_num_seqs"] == 192
    assert values["planner"]["pace"] == 0.875
    assert values["planner"]["token_budget"] == 512
    # Shipped seats are nobody's choice: they stay free to stay within the tokens of a step.
    shipped = replace(profile(), settings=DEFAULTS).server_values()
    assert set(shipped) == {"profile", "planner"}


@pytest.mark.parametrize(
    ("found", "result", "words"),
    [
        (search_of(0.5, 0.9), compared([0.5, 0.5], [0.6, 0.7]), "keep 65.0% of the promises"),
        (search_of(0.5, 0.9), compared([0.5, 0.5], [0.6, 0.7]), r"\+10.0 to \+20.0 over 2 scenes"),
        (search_of(0.5, 0.9), compared([0.5, 0.5], [0.4, 0.7]), "Not better for sure"),
        (search_of(0.5, 0.9), compared([0.5], [0.9]), "over 1 scene. Not better for sure: one sc"),
        (search_of(0.5, 0.9), compared([0.5, 0.5], [0.3, 0.4]), "does not carry over"),
        (search_of(0.5, 0.9), compared([0.5], [0.9], 0.5), "too much is lost in longest gap"),
        (search_of(0.5, 0.9), compared([0.5, 0.5], [1.0, 1.0]), "keep 100% of the promises"),
        (search_of(0.9, 0.5), compared([0.9], [0.9]), "in 2 trials: the profile holds the def"),
    ],
)
def test_the_statement_says_what_the_profile_is_worth(
    found: Search, result: Comparison, words: str
) -> None:
    assert re.search(words, statement(found, result))


def edited(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(profile().to_json()))
    for path, value in changes.items():
        *parents, key = path.split("__")
        table = document
        for parent in parents:
            table = table[parent]
        if value is ...:
            del table[key]
        else:
            table[key] = value
    return document


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"format": 2}, "format must be 1, got 2"),
        ({"nom": "x"}, "nom: no such field"),
        ({"judged": ...}, "judged is missing"),
        ({"name": "a b"}, "name must be letters"),
        ({"name": "none"}, "means no profile"),
        ({"name": 3}, "name must be text"),
        ({"settings": [1]}, "settings must be a table"),
        ({"settings__pace": 7.0}, r"settings.pace must be in \(0, 1\], got 7.0"),
        ({"settings__pace": "fast"}, "settings.pace must be in"),
        ({"settings__speed": 7}, "settings.speed: no such setting"),
        ({"settings__max_num_seqs": -1}, "settings.max_num_seqs"),
        ({"settings__drain_steps": float("inf")}, "settings.drain_steps must be finite"),
        ({"settings__gap_limit_s": None}, "settings.gap_limit_s"),
        ({"belongs_to__owner": "me"}, "belongs_to.owner: no such field"),
        ({"belongs_to__model": 5}, "belongs_to.model must be text"),
        ({"provenance__seeds": [-1]}, "provenance.seeds must be a list of seeds"),
        ({"provenance__num_trials": 1.5}, "provenance.num_trials must be an integer"),
        ({"provenance__classes": "chat"}, "provenance.classes must be a list"),
        ({"provenance__workload": ...}, "provenance.workload is missing"),
        ({"judged__verdict": "great"}, "judged.verdict must be one of better, unclear, worse"),
        ({"judged__before__attainment__mean": "x"}, "judged.before.attainment.mean must be a"),
        ({"judged__difference__median": 1}, "judged.difference.median: no such field"),
        ({"judged__harms__goodput": float("nan")}, "judged.harms.goodput must be a finite"),
        ({"influence": []}, "influence must be a table"),
        ({"influence__found": ...}, "influence.found is missing"),
        ({"influence__all": []}, "influence.all: no such field"),
        ({"influence__alone": {"pace": 1}}, "influence.alone must be a list of tables"),
        ({"influence__alone": [{"knob": "pace"}]}, "influence.alone.value is missing"),
        ({"influence__alone": [EFFECT | {"gain": "x"}]}, "influence.alone.gain must be a finite"),
        (
            {"influence__alone": [EFFECT | {"guards": "gap"}]},
            "alone.guards must be a list of names",
        ),
        ({"influence__alone": [EFFECT | {"guards": [1]}]}, "alone.guards must be a list of names"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ProfileError, match=names):
        BudgetProfile.from_json(edited(**changes))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("format: 1\nformat: 1\n", "format is given twice"),
        ("format: [1\n", "not YAML"),
        ("- 1\n", "must be a table"),
        ("", "must be a table"),
        ("1: 2\n", "every key must be text"),
        ("a: !!python/object/apply:os.getcwd []\n", "not YAML"),
        ("\x00", "not YAML"),
        ("a: " + "[" * 1500, "not YAML"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_its_name(
    tmp_path: Path, text: str, names: str
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=rf"broken\.yaml: .*{names}"):
        read_profile(path)


def test_a_missing_file_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"nowhere\.yaml: No such file"):
        read_profile(tmp_path / "nowhere.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ProfileError, match="not YAML"):
        read_profile(tmp_path / "bytes.yaml")


def test_files_and_names_are_told_apart() -> None:
    assert is_file_name("mine.yaml")
    assert is_file_name("./mine")
    assert not is_file_name("mine-2")
    check_name("chat_v1.2")
    for name in ("", "a/b", "x.yml", "-x", "none", "é", "n" * 129):
        with pytest.raises(ProfileError):
            check_name(name)


def test_a_server_takes_only_what_belongs_to_it() -> None:
    assert OWNER.refusal("demo") is None
    assert OWNER.refusal("demo", "cpu (2 threads)", "float32", "reference") is None
    assert "model 'demo', this server's is 'other'" in (OWNER.refusal("other") or "")
    assert "device 'cpu (2 threads)'" in (OWNER.refusal("demo", "cuda (X)") or "")
    assert "dtype" in (OWNER.refusal("demo", None, "bfloat16") or "")
    assert "attention backend" in (OWNER.refusal("demo", None, None, "flash_attn") or "")
    # A name can be given to any weights.
    assert OWNER.refusal("demo", source="demo") is None
    assert "model source 'demo', this server's is '/x'" in (
        OWNER.refusal("demo", source="/x") or ""
    )
    assert replace(OWNER, source="/x").refusal("demo", source="/x") is None
    unbound = TunedFor("free").refusal("demo")
    assert unbound is not None
    assert "--model and --device" in unbound
    assert TunedFor("open", "demo", "cpu").refusal("demo", "cpu", "float32", "x") is None


def test_the_row_holds_the_whole_document_and_trials_their_settings() -> None:
    made = profile()
    record = made.to_record(is_active=True)
    assert (record.name, record.model, record.verdict) == ("mine", "demo", "better")
    assert record.is_active
    assert BudgetProfile.from_json(record.document).settings == made.settings
    assert yaml.safe_load(made.to_yaml()) == record.document
    found = search_of(0.5, 0.75)
    failed = Trial(2, "failed", {"pace": 0.9}, None, (), "no work", 8)
    rows = trial_records("s", (*found.trials, failed))
    assert [row.trial_no for row in rows] == [0, 1, 2]
    assert rows[0].settings == DEFAULTS.to_json()
    assert rows[1].settings["max_num_seqs"] == 192
    assert (rows[2].settings, rows[2].reason) == ({"pace": 0.9}, "no work")
    assert rows[1].measures["scenes"][0]["attainment"] == 0.75
