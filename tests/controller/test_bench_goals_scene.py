"""One simulation of the goals: watched without a change, and what is counted in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from controller.bench.goals_cases import Inputs, steady_cases
from controller.bench.goals_scene import (
    EXTRA,
    GoalScene,
    PlanWatch,
    most_overtaken,
    settled_misses,
)
from controller.simulation.hardware import A100_8B
from controller.simulation.records import SimulatedRequest
from controller.simulation.run import simulate
from controller.simulation.sweep import SweepTask
from controller.workload.generators import poisson
from controller.workload.lengths import LognormalLengths
from controller.workload.traces import write_trace
from engine.ports import EngineView
from engine.step import StepPlan, StepWork, WorkKind


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> GoalScene:
    path = tmp_path_factory.mktemp("traces") / "conv.csv"
    write_trace(poisson(4.0, 12.0, LognormalLengths(1500, 5000, 4, 8), 0), path)
    return steady_cases(Inputs(None, path, None, (A100_8B,), 8, 1.0))[0].scene


def test_watching_changes_nothing(scene: GoalScene) -> None:
    task = SweepTask("slo", 2.0, 1)

    row = scene.run(task)

    plain = simulate(
        scene.workload(2.0, 1), "slo", scene.hardware, replace(scene.config, seed=task.seed)
    )
    assert row.event_hash == plain.event_hash
    assert row.measures[EXTRA]["longest_skip"] == 0
    assert row.measures[EXTRA]["wait_share"] == max(
        each.wait_s / max(10.0 * (each.ttft_target_s or 0.0), 30.0) for each in plain.requests
    )


def test_an_oracle_plans_with_the_machines_own_formula(scene: GoalScene) -> None:
    row = scene.run(SweepTask("slo:oracle", 3.0, 1))

    config = replace(scene.config, seed=1, learner="oracle")
    known = simulate(scene.workload(3.0, 1), "slo", scene.hardware, config)
    learnt = scene.run(SweepTask("slo", 3.0, 1))
    assert row.event_hash == known.event_hash != learnt.event_hash
    assert row.task.policy == "slo:oracle"
    # Nothing was learnt, so nothing was predicted wrongly by what was.
    assert row.measures["prediction_mape"] == 0.0 < learnt.measures["prediction_mape"]
    assert sum(row.measures["binding_steps"].values()) == pytest.approx(1.0)
    keys = {scene.key(SweepTask(name, 3.0, 1)) for name in ("slo", "slo:oracle")}
    assert len(keys) == 2


def test_a_number_of_a_baseline_is_part_of_its_name(scene: GoalScene) -> None:

    rows = {
        name: scene.run(SweepTask(name, 3.0, 0)).event_hash
        for name in (
            "slack-greedy",
            "slack-greedy:1.2",
            "slack-greedy:0.8",
            "slack-greedy-even:0.8",
            "slack-greedy:1.2:8",
            "slack-greedy:0.8:0.1",
            "edf-512",
            "edf-merged-512",
            "smallest-feasible",
            "smallest-feasible:64",
            "smallest-feasible:1024",
        )
    }

    assert rows["slack-greedy"] == rows["slack-greedy:1.2"]
    assert rows["smallest-feasible"] == rows["smallest-feasible:64"]
    assert rows["slack-greedy"] == rows["slack-greedy:1.2:8"]
    # Of tiny prompts none has been started when the next one comes.
    assert 5 <= len(set(rows.values())) <= 8
    for name in ("slowest", "edf-merged-", "edf-merged-many"):
        with pytest.raises(ValueError, match="policy"):
            scene.run(SweepTask(name, 1.0, 0))


def test_arrivals_last_as_long_as_is_wanted_or_the_trace_does(scene: GoalScene) -> None:
    own = scene.workload(1.0, 0).rate
    lasting = replace(scene, horizon_s=8.0)

    plain = scene.workload(2.0, 0)
    longer = lasting.workload(2.0, 0)
    # The trace holds about 44 requests after its first second.
    whole = lasting.workload(20.0, 0)

    assert plain.num_requests == 24
    assert longer.num_requests > 24
    assert longer.rate == pytest.approx(2.0 * own)
    assert longer.duration_s >= 8.0 or longer.num_requests == whole.num_requests
    assert whole.rate == pytest.approx(20.0 * own)
    assert whole.duration_s < 8.0
    assert replace(scene, horizon_s=0.1).workload(2.0, 0).num_requests == 24
    assert lasting.key(SweepTask("slo", 2.0, 0)) != scene.key(SweepTask("slo", 2.0, 0))


def test_misses_are_of_the_requests_in_the_middle() -> None:
    requests = [
        # Before, in and after [2.5, 7.5] of arrivals from 0 to 10 s.
        request(0, 0.0, 0.0, attained=False),
        request(1, 2.5, 0.0, attained=True),
        request(2, 5.0, 0.0, attained=False),
        request(3, 6.0, 0.0, attained=True, slo_class="batch"),
        request(4, 7.6, 0.0, attained=False),
        request(5, 10.0, 0.0, attained=False),
    ]
    assert settled_misses(requests) == {
        "missed": pytest.approx(1.0 / 3.0),
        "classes": {"batch": 0.0, "chat": 0.5},
        "groups": {
            "all": {"num_offered": 3, "misses": {"other": 1}},
            "batch": {"num_offered": 1, "misses": {}},
            "chat": {"num_offered": 2, "misses": {"other": 1}},
        },
    }
    assert settled_misses([requests[0], requests[5]])["missed"] == 1.0


@dataclass
class FakeRequest:
    request_id: str
    is_decoding: bool = True


class Scripted:
    """Plans decodes of the named requests, call by call."""

    def __init__(self, *plans: str) -> None:
        self._plans = list(plans)

    def plan(self, view: EngineView) -> StepPlan:
        """Return the next plan."""
        names = self._plans.pop(0)
        return StepPlan(tuple(StepWork(name, WorkKind.DECODE, 1, 0) for name in names))


def test_skipped_decodes_are_counted_in_a_row() -> None:
    watch = PlanWatch(Scripted("ab", "a", "a", "ab", "b", "ab"), 0.0, 0.0)
    running: Any = [FakeRequest("a"), FakeRequest("b"), FakeRequest("prompt", is_decoding=False)]
    view = EngineView(0.0, 0, (), running, (), 1, 1, 16, 64, 4, 64, 4)

    for _ in range(6):
        watch.plan(view)

    assert watch.longest_skip == 2


def request(index: int, arrived_at: float, wait_s: float, **changes: Any) -> SimulatedRequest:
    plain: dict[str, Any] = dict.fromkeys(SimulatedRequest.__dataclass_fields__, 0)
    plain |= {"index": index, "arrived_at": arrived_at, "wait_s": wait_s, "slo_class": "chat"}
    return SimulatedRequest(**(plain | {"finish_reason": "stop"} | changes))


def test_overtaking_counts_later_ones_of_the_class_that_started_first() -> None:
    requests = [
        request(0, 0.0, 10.0),
        request(1, 1.0, 1.0),
        request(2, 2.0, 3.0),
        # Of another class; refused without a start; at the same instant; later.
        request(3, 3.0, 1.0, slo_class="batch"),
        request(4, 4.0, 1.0, finish_reason="rejected"),
        request(5, 5.0, 5.0),
        request(6, 6.0, 9.0),
    ]
    assert most_overtaken(requests) == 2
    assert most_overtaken(requests[5:]) == 0


def test_useful_tokens_are_computed_for_kept_promises_while_the_load_lasts() -> None:
    watch = PlanWatch(Scripted("01", "01", "01", "012", "012"), 2.0, 8.0)
    view = EngineView(0.0, 0, (), (), (), 1, 1, 16, 64, 4, 64, 4)
    for now in (1.9, 2.0, 5.0, 7.9, 8.0):
        watch.plan(replace(view, now=now))
    requests = [
        request(0, 0.0, 0.0, attained=True),
        request(1, 0.0, 0.0, attained=False),
        # Best effort that was served; one that ended long after the load.
        request(2, 7.0, 0.0, attained=None, ended_at=99.0),
    ]
    assert watch.useful_tokens_per_s(requests) == pytest.approx((3 + 1) / 6.0)
    assert PlanWatch(Scripted(), 1.0, 1.0).useful_tokens_per_s(requests) == 0.0
