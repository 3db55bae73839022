"""What binds, in a study of the goals: which runs are looked at, and what is told of them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from controller.bench.goals import Study
from controller.bench.goals_binding import Binding, bound
from controller.bench.goals_cases import MIX
from controller.bench.goals_ladder import RATIO
from controller.bench.goals_overload import Overload
from controller.bench.goals_report import render_markdown
from controller.bench.goals_report_tables import binding_table
from controller.bench.goals_runs import Missing, Runs
from controller.bench.goals_scene import GoalScene
from tests.controller.goals_double import KNEES, inputs, made_up, study_of, write_tiny_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_trace(tmp_path_factory.mktemp("traces") / "conv.csv")


@pytest.fixture
def without_simulating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GoalScene, "run", made_up)


@pytest.fixture
def studied(trace: Path, tmp_path: Path, without_simulating: None) -> tuple[Study, Runs, Path]:
    path = tmp_path / "studied.jsonl"
    return *study_of(inputs(trace), path), path


def test_what_binds_is_told_where_promises_begin_to_be_missed_and_in_an_overload(
    studied: tuple[Study, Runs, Path],
) -> None:
    study = studied[0]

    steady, changing, overload = study.bindings
    assert [each.is_overload for each in study.bindings] == [False, False, True]
    for found, known in ((steady, study.steady[0]), (changing, study.changing[0])):
        best = known.best("edf-shed")
        assert best is not None
        assert known.knee is not None
        assert [each.policy for each in found.points] == ["slo", "slo:oracle", best.curve.policy]
        ours = found.points[0]
        assert known.knee < ours.rate <= known.knee * RATIO
        assert 0.85 < ours.attainment < 0.9
        assert found.kept(ours) == pytest.approx(ours.attainment)
        assert found.oracle_gain == pytest.approx(0.02)
        shares = found.misses(ours, "chat")
        assert shares is not None
        assert shares["refused"] == pytest.approx(2.0 * shares["tokens_too_slow"])
        assert bound(ours) == [
            ("decode_slack", 0.65, 0.45), ("ttft_demand", 0.2, 0.4), ("idle", 0.1, 0.1)
        ]  # fmt: skip
    judged = study.overload[0][1]
    assert isinstance(judged, Overload)
    assert overload.points[0].rate == pytest.approx(1.5 * judged.weighted.knee)
    assert overload.points[0].rows == judged.weighted.at("slo", 1.5).rows
    assert overload.case.scene.source.mix == MIX
    page = render_markdown(study, ["paceline bench goals"])
    assert page.count("An oracle keeps +2.0 points more (+2.0 to +2.0).") == 2
    assert "decode slack 65 % (45 %), TTFT demand 20 % (40 %), idle 10 % (10 %) |" in page
    (row,) = [line for line in page.splitlines() if "`slo:oracle`" in line and "changing" in line]
    assert "; code " in row
    document = json.loads(json.dumps(study.to_json(), allow_nan=False))
    assert document["bindings"][0]["points"][1]["policy"] == "slo:oracle"
    assert set(document["bindings"][0]["points"][1]["misses"]) == {"all", "chat", "code", "batch"}


def test_rows_that_do_not_know_what_bound_them_stay_and_are_run_once_more(
    studied: tuple[Study, Runs, Path], trace: Path, tmp_path: Path
) -> None:
    study, _, path = studied
    old = []
    for line in path.read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        if document["task"]["policy"] == "slo:oracle":
            continue
        for name in ("binding_steps", "binding_time"):
            del document["measures"][name]
        for group in (document["measures"]["overall"], *document["measures"]["classes"]):
            group.pop("misses", None)
        old.append(json.dumps(document))
    again_path = tmp_path / "runs.jsonl"
    again_path.write_text("\n".join(old) + "\n", encoding="utf-8")

    before, _ = study_of(inputs(trace), again_path, is_readonly=True)
    again, runs = study_of(inputs(trace), again_path)
    once_more, more_runs = study_of(inputs(trace), again_path)

    assert not before.is_complete
    assert all(isinstance(each.loads, Missing) for each in before.bindings)
    assert "not measured: slo at" in render_markdown(before, [])
    assert before.checks == again.checks == study.checks
    # Two rates and an overload, three policies, two seeds.
    assert runs.num_simulated == 18
    assert again_path.read_text(encoding="utf-8").splitlines()[: len(old)] == old
    found = [each.to_json() for each in again.bindings]
    assert found == [each.to_json() for each in study.bindings]
    assert more_runs.num_simulated == 0
    assert once_more.is_complete


def test_rows_of_an_overload_that_know_no_causes_are_run_once_more(
    studied: tuple[Study, Runs, Path], trace: Path, tmp_path: Path
) -> None:
    study, _, path = studied
    overloaded = {("slo:oracle", row.task.load) for row in study.bindings[2].points[1].rows}
    old = []
    for line in path.read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        # The row that was run once more knew what bound it, but not yet this.
        is_again = (document["task"]["policy"], document["task"]["load"]) in overloaded
        del document["measures"]["goals"]["settled"]["groups"]
        old.append(json.dumps(document))
        if is_again:
            old.append(json.dumps(document | {"key": f"{document['key']}+binding_steps"}))
    again_path = tmp_path / "runs.jsonl"
    again_path.write_text("\n".join(old) + "\n", encoding="utf-8")

    before, _ = study_of(inputs(trace), again_path, is_readonly=True)
    again, runs = study_of(inputs(trace), again_path)
    _, more_runs = study_of(inputs(trace), again_path)

    assert [isinstance(each.loads, Missing) for each in before.bindings] == [False, False, True]
    # One overload, three policies, two seeds.
    assert runs.num_simulated == 6
    assert more_runs.num_simulated == 0
    assert [each.to_json() for each in again.bindings] == [e.to_json() for e in study.bindings]


def test_what_nobody_counted_is_not_told_as_nothing(
    studied: tuple[Study, Runs, Path],
) -> None:
    def without(found: Binding, *, oracle_only: bool = False) -> Binding:
        """Forget the causes, and who the batch was."""
        assert not isinstance(found.loads, Missing)
        points = []
        for point in found.loads.points:
            if oracle_only and point.policy != "slo:oracle":
                points.append(point)
                continue
            rows = []
            for row in point.rows:
                measures = copy.deepcopy(row.measures)
                del measures["overall"]["misses"]
                measures["classes"] = [e for e in measures["classes"] if e["name"] != "batch"]
                del measures["goals"]["settled"]["groups"]
                rows.append(replace(row, measures=measures))
            points.append(replace(point, rows=tuple(rows)))
        return replace(found, loads=replace(found.loads, points=tuple(points)))

    steady, _, overload = (without(found) for found in studied[0].bindings)
    ours = steady.points[0]
    assert (steady.misses(ours), steady.kept(ours), steady.oracle_gain) == (None, None, None)
    assert steady.misses(ours, "batch") is None
    assert steady.misses(ours, "chat") is not None
    assert overload.misses(overload.points[0], "chat") is None
    assert without(studied[0].bindings[0], oracle_only=True).oracle_gain is None

    row = binding_table([steady]).splitlines()[2]
    assert row.split(" | ")[3:5] == ["–", "–"]
    assert row.split(" | ")[5].endswith("; batch –")
    document = json.loads(json.dumps(overload.to_json(), allow_nan=False))["points"][0]
    assert document["kept"] is None
    assert document["misses"] == dict.fromkeys(("all", "chat", "code", "batch"))


def test_what_binds_alone_measures_what_it_needs(
    trace: Path, tmp_path: Path, without_simulating: None
) -> None:
    study, runs = study_of(inputs(trace), tmp_path / "runs.jsonl", ("binds",))

    assert study.is_complete
    assert study.checks == ()
    assert len(study.bindings) == 3
    assert {name.partition("-")[0] for name in runs.policy_rows} == {"slo", "slo:oracle", "edf"}
    page = render_markdown(study, ["paceline bench goals"])
    assert "## What binds" in page
    assert "## G" not in page
    assert "Of 0 numbers" not in page


def test_without_a_goodput_nothing_is_said_of_what_binds(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_simulating: None
) -> None:
    monkeypatch.setitem(KNEES, "slo", 1e-3)

    study, _ = study_of(inputs(trace), tmp_path / "runs.jsonl", ("binds",))

    assert [each.loads for each in study.bindings] == ["not measured: no rate holds 90 %"] * 3
    assert [each.oracle_gain for each in study.bindings] == [None] * 3
    page = render_markdown(study, ["paceline bench goals"])
    assert "| – | – | – | – | – | not measured: no rate holds 90 % |" in page
    assert "An oracle keeps" not in page
    assert study.to_json()["bindings"][0]["missing"] == "not measured: no rate holds 90 %"
