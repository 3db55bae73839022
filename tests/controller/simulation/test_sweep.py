"""Sweeps: the same rows from one process or two, resumed, and the search for a budget."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from controller.policy.slo import Slo, SloClass
from controller.simulation.hardware import A100_8B
from controller.simulation.run import SimulationConfig
from controller.simulation.source import WorkloadSource
from controller.simulation.sweep import (
    ResultsError,
    ResultsFile,
    Scene,
    SweepRow,
    SweepTask,
    run_sweep_tasks,
    search_budget,
)

SCENE = Scene(
    WorkloadSource(generator="poisson:rate=8,duration=4,prompt=200,output=8"),
    A100_8B,
    SimulationConfig(classes=(SloClass("default", Slo(1.0, 0.05)),)),
)
TASKS = [
    SweepTask(name, load, seed)
    for name in ("slo", "fcfs-256")
    for load in (0.5, 1.0)
    for seed in (0, 1)
]


def facts(rows: Sequence[SweepRow]) -> list[tuple[SweepTask, float, str]]:
    """Everything but real time."""
    return [(row.task, row.rate, row.event_hash) for row in rows]


def test_two_processes_give_what_one_gives_in_the_order_of_the_tasks() -> None:
    alone = run_sweep_tasks(SCENE, TASKS)
    assert [row.task for row in alone] == TASKS
    assert facts(run_sweep_tasks(SCENE, TASKS, workers=2)) == facts(alone)
    # Where nobody has to wait two policies may do the same.
    assert len({row.event_hash for row in alone}) >= len(TASKS) // 2
    assert all(0.0 <= row.attainment <= 1.0 for row in alone)


def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first = run_sweep_tasks(SCENE, TASKS[:3], results=ResultsFile(path))
    # The next line was being written when the process died.
    with path.open("a", encoding="utf-8") as file:
        file.write('{"key": "half a li')
    done: list[int] = []
    results = ResultsFile(path)
    assert len(results) == 3
    rows = run_sweep_tasks(
        SCENE, TASKS, results=results, progress=lambda n, _total, _what: done.append(n)
    )
    assert done == [3, 4, 5, 6, 7, 8]
    assert rows[:3] == first
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len({json.loads(line)["key"] for line in lines}) == 8
    assert run_sweep_tasks(SCENE, TASKS, results=ResultsFile(path)) == rows


def test_a_result_belongs_to_its_scene_alone() -> None:
    task = TASKS[0]
    others = [
        replace(SCENE, hardware=replace(A100_8B, noise=0.1)),
        replace(SCENE, config=replace(SCENE.config, learner="oracle")),
        replace(SCENE, source=replace(SCENE.source, max_requests=5)),
    ]
    assert len({scene.key(task) for scene in (SCENE, *others)}) == 4
    assert SCENE.key(task) == replace(SCENE).key(replace(task))
    assert SCENE.key(task) != SCENE.key(TASKS[1])


def test_a_result_belongs_to_the_bytes_of_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    keys = []
    for output in (5, 6):
        path.write_text(
            f"at_s,num_prompt_tokens,num_output_tokens\n0,10,{output}\n", encoding="utf-8"
        )
        keys.append(replace(SCENE, source=WorkloadSource(trace=str(path))).key(TASKS[0]))
    assert keys[0] != keys[1]


@pytest.mark.parametrize("line", ["nonsense", "{}", '{"key": "k", "task": 3}'])
def test_a_broken_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    run_sweep_tasks(SCENE, TASKS[:1], results=ResultsFile(path))
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(ResultsError, match=r"results\.jsonl: line 2 is no result"):
        ResultsFile(path)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_that_fails_ends_the_sweep_with_its_error(workers: int) -> None:
    tasks = [SweepTask("no-such-policy", 1.0, seed) for seed in (0, 1)]
    with pytest.raises(ValueError, match="no-such-policy"):
        run_sweep_tasks(SCENE, tasks, workers=workers)


def test_the_search_closes_in_on_the_best_budget() -> None:
    asked: list[list[str]] = []

    def score(policies: Sequence[str]) -> list[tuple[float, ...]]:
        asked.append(list(policies))
        budgets = [int(name.rpartition("-")[2]) for name in policies]
        return [(-abs(math.log(budget / 384)),) for budget in budgets]

    found = search_budget("edf", score, rounds=3)
    assert found.policy == f"edf-{found.best}"
    assert abs(found.best - 384) <= 32
    assert asked[0] == [f"edf-{n}" for n in (64, 128, 256, 512, 1024, 2048)]
    # Nothing is asked twice, and each round asks for two neighbours at most.
    names = [name for names in asked for name in names]
    assert len(names) == len(set(names)) == len(found.scores)
    assert all(len(names) <= 2 for names in asked[1:])


def test_of_equal_budgets_the_smaller_one_wins_and_the_search_ends() -> None:
    found = search_budget("fcfs", lambda names: [(1.0,)] * len(names), coarse=(256, 512), rounds=9)
    assert found.best == 256
    assert search_budget("fcfs", lambda _: [(1.0,)], coarse=(16,)).best == 16
    with pytest.raises(ValueError, match="coarse"):
        search_budget("fcfs", lambda _: [], coarse=())
