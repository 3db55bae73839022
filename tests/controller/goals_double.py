"""A study of the goals without a simulation: a tiny trace, and made-up answers to every run."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from controller.bench.goals import GOALS, Study, run_study
from controller.bench.goals_cases import Inputs
from controller.bench.goals_runs import Runs
from controller.bench.goals_scene import EXTRA, GoalScene
from controller.simulation.hardware import A100_8B
from controller.simulation.sweep import ResultsFile, SweepRow, SweepTask
from controller.workload.generators import poisson
from controller.workload.lengths import LognormalLengths
from controller.workload.traces import write_trace


def write_tiny_trace(path: Path) -> Path:
    """Write a trace whose prompts take 45 ms to 0.5 s on the simulated machine, answers of one
    token to a few.
    """
    write_trace(poisson(4.0, 12.0, LognormalLengths(1500, 5000, 4, 8), 0), path)
    return path


def inputs(trace: Path, **changes: Any) -> Inputs:
    return replace(Inputs(None, trace, None, (A100_8B,), num_requests=8, start_s=1.0), **changes)


def study_of(
    source: Inputs, path: Path, goals: Sequence[str] = GOALS, *, is_readonly: bool = False
) -> tuple[Study, Runs]:
    with Runs(ResultsFile(path), is_readonly=is_readonly) as runs:
        *_, last = run_study(source, runs, (0, 1), goals)
    return last, runs


# Requests per second at which a made-up policy keeps 90 % of the requests.
KNEES = {"slo": 8.0, "edf-shed": 7.5, "edf": 4.8, "fcfs": 4.0, "slack": 4.6, "smallest": 3.5}


@functools.cache
def own_rate(scene: GoalScene) -> float:
    return scene.workload(1.0, 0).rate


def made_up(scene: GoalScene, task: SweepTask, progress: object = None) -> SweepRow:
    """Answer without simulating: attainment falls from 1 at half of a knee to 0.9 there."""
    family = max((name for name in KNEES if task.policy.startswith(name)), key=len)
    budget = task.policy.rpartition("-")[2]
    away = abs(math.log(int(budget) / 384)) if budget.isdigit() else 0.0
    rate = task.load * (1.0 if scene.source.trace is None else own_rate(scene))
    pressure = rate / (KNEES[family] / (1.0 + 0.2 * away)) * (1.0 + 0.01 * task.seed)
    kept = max(0.0, min(1.0, 1.1 - 0.2 * pressure + 0.02 * task.policy.endswith(":oracle")))
    tpot_s = 0.02 if family == "slo" else 0.04
    spread = {"num": 9, "p50": tpot_s, "p90": tpot_s, "p99": tpot_s, "max": tpot_s}
    missed = {"refused": 6.0 * (1.0 - kept), "tokens_too_slow": 3.0 * (1.0 - kept)}
    causes = {"num_offered": 9, "misses": missed}
    group = causes | {"attainment": kept, "tpot_s": spread, "ttft_s": spread}
    measures = {
        "overall": group,
        "classes": [group | {"name": each.name} for each in scene.config.classes],
        "deciles": [group] * 10,
        "binding_steps": {"idle": 0.1, "ttft_demand": 0.2, "explore": 0.05, "decode_slack": 0.65},
        "binding_time": {"idle": 0.1, "ttft_demand": 0.4, "explore": 0.05, "decode_slack": 0.45},
        "planner_us_mean": 100.0,
        "mean_step_s": 0.05 if family == "slo" else 0.1,
        EXTRA: {
            "settled": {
                "missed": 1.0 - kept,
                "classes": {each.name: 1.0 - kept for each in scene.config.classes},
                "groups": {"all": causes} | {each.name: causes for each in scene.config.classes},
            },
            "arrivals_s": 10.0,
            "useful_work_per_s": 1000.0 * kept * rate,
            "wait_share": 0.5,
            "longest_skip": 0,
            "most_overtaken": 65 if pressure > 1.9 else 3,
            "gap_share_p99": 0.9,
            "gap_share_max": 1.05,
        },
    }
    return SweepRow(task, rate, measures, "", 0.0)
