"""A stored run as a task: what is held out, whom it belongs to, and that simulate sees the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from controller.cli.main import app
from controller.policy.slo import OnInfeasible
from controller.simulation.stored import RunRows, StoredRunError, read_run
from controller.tuning.objective import run_scene
from controller.tuning.replay import task_of_run
from controller.tuning.space import DEFAULTS
from controller.workload.traces import read_trace
from tests.controller.simulation.stored_runs import (
    SETTINGS,
    arrived,
    database,
    pool,
    reading,
    refused,
    twenty,
    unlearnt,
    write,
)
from tests.controller.tuning.tuning_tasks import QUIET


@pytest.fixture
def url(tmp_path: Path) -> str:
    return database(tmp_path)


def rows_of(url: str, run_id: str = "last") -> RunRows:
    with reading(url) as reader:
        return read_run(reader, run_id)


def test_a_run_becomes_its_arrivals_its_promises_and_its_machine(url: str) -> None:
    write(url, *twenty(), pool(77), unlearnt())
    replayed = task_of_run(rows_of(url), "mine", num_seeds=2, num_held_out_seeds=1)
    task = replayed.task
    assert replayed.run_id == "run-a"
    assert replayed.tuned_for.profile == "mine"
    assert replayed.tuned_for.refusal("demo", "cpu (2 threads)", "float32", "reference") is None
    assert replayed.tuned_for.refusal("demo", "cuda (X)") is not None
    assert replayed.tuned_for.source == SETTINGS["model"]
    first, rest = task.tuning[0].workload.arrivals, task.held_out[0].workload.arrivals
    assert len(first) + len(rest) == 20
    assert [a.at_s for a in first[:3]] == [0.0, 0.5, 1.0]
    assert task.tuning[1].workload == task.tuning[0].workload
    assert {scene.seed for scene in (*task.tuning, *task.held_out)} == {0, 1, 2}
    assert all(a.num_output_tokens in (3, 4) for a in (*first, *rest))
    assert (first[0].num_prompt_tokens, task.max_tokens) == (96, 8)
    by_name = {each.name: each for each in task.classes}
    assert set(by_name) == {"chat", "chat#2", "default"}
    assert (by_name["chat"].weight, by_name["chat#2"].weight) == (3.0, 3.0)
    assert by_name["chat"].on_infeasible is OnInfeasible.DEGRADE
    assert (by_name["chat"].slo.ttft_s, by_name["chat#2"].slo.ttft_s) == (1.0, 0.25)
    assert by_name["default"].slo.is_best_effort
    engine = task.engine
    assert (engine.num_blocks, engine.block_size, engine.max_model_len) == (77, 16, 900)
    assert engine.max_num_batched_tokens == 4096
    # A knob, whatever the run had.
    assert engine.max_num_seqs == 1
    assert "learnt by" in task.hardware.source
    assert run_scene(task, DEFAULTS, task.held_out[0]).num_offered


def test_the_same_rows_make_the_same_task(url: str) -> None:
    write(url, *twenty(), unlearnt())
    whole, again = (task_of_run(rows_of(url, "run-a"), "x").task for _ in "ab")
    fewer = task_of_run(rows_of(url, "run-a"), "x", max_requests=10).task
    assert whole.fingerprint() == again.fingerprint()
    kept = [*fewer.tuning[0].workload.arrivals, *fewer.held_out[0].workload.arrivals]
    assert len(kept) == 10
    # Leaving out the rest changes no length that was drawn for the first.
    everybody = [*whole.tuning[0].workload.arrivals, *whole.held_out[0].workload.arrivals]
    lengths = [[a.num_output_tokens for a in each] for each in (kept, everybody)]
    assert lengths[0] == lengths[1][:10]


def test_simulate_and_tune_make_the_same_of_one_run(url: str, tmp_path: Path) -> None:
    write(url, *twenty(), pool(77), unlearnt())
    task = task_of_run(rows_of(url), "x", held_out_share=0.01).task
    out = tmp_path / "out"
    words = ["simulate", "--replay", "last", "--db", url, "--policy", "whole", "--out", str(out)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    about = json.loads((out / "report.json").read_text(encoding="utf-8"))["about"]
    # The last one is held out, and at the beginning of its own time.
    tuned = [*task.tuning[0].workload.arrivals, *task.held_out[0].workload.arrivals]
    simulated = read_trace(out / "arrivals.csv").arrivals
    assert simulated[:-1] == task.tuning[0].workload.arrivals
    assert [(a.num_prompt_tokens, a.num_output_tokens, a.slo_class) for a in simulated] == [
        (a.num_prompt_tokens, a.num_output_tokens, a.slo_class) for a in tuned
    ]
    assert about["classes"] == [asdict(each) for each in task.classes]
    assert about["hardware"] == task.hardware.to_json()
    assert about["engine"] == asdict(task.engine) | {"max_num_seqs": SETTINGS["max_num_seqs"]}
    assert (about["workload"], about["client_max_tokens"]) == (task.name, task.max_tokens)


def test_what_is_missing_is_said(url: str) -> None:
    write(url, *twenty())
    with pytest.raises(StoredRunError, match="run run-a has stored no cost model: name a machine"):
        task_of_run(rows_of(url), "x")
    assert task_of_run(rows_of(url), "x", hardware=QUIET).task.hardware == QUIET
    write(url, *(refused(i, float(i), run_id="run-b") for i in range(3)), run_id="run-b")
    with pytest.raises(StoredRunError, match="no request of run run-b has ended by itself"):
        task_of_run(rows_of(url, "run-b"), "x", hardware=QUIET)
    write(url, *(arrived(i, 5.0, run_id="run-c") for i in range(3)), run_id="run-c")
    with pytest.raises(ValueError, match="arrives at once"):
        task_of_run(rows_of(url, "run-c"), "x", hardware=QUIET)
