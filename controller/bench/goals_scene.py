"""`GoalScene`: one simulation of the goals, with what the general measures do not hold.

Owns the measures that only the goals need: skipped decodes, overtaking, waits against their bounds,
gaps against their targets, useful tokens while a load lasts. Must not judge them.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from controller.policy.baselines import StaticPlanner
from controller.policy.baselines_dynamic import SlackGreedyPlanner, SmallestFeasiblePlanner
from controller.policy.policies import make_planner
from controller.policy.settings import PolicyConfig
from controller.simulation.measures import measure, miss_counts
from controller.simulation.records import SimulatedRequest
from controller.simulation.run import PlannerParts, Progress, simulate
from controller.simulation.sweep import Scene, SweepRow, SweepTask
from controller.workload.arrivals import Workload
from controller.workload.transforms import assign_classes, assign_classes_by_length, with_rate
from engine.ports import EngineView, Planner
from engine.step import StepPlan

GOALS_FORMAT: Final = 2
"""Of what a run of the goals keeps beside `Measures`; another number is another result."""
EXTRA: Final = "goals"
"""Key of the goals' own measures in `SweepRow.measures`."""

ORACLE: Final = ":oracle"
"""Ends the name of a policy that knows the machine's formula."""

ALL: Final = "all"
"""Name of the group of all requests."""

_RAMP_SHARE: Final = 0.25
_MERGED: Final = "edf-merged-"
_SETTLED: Final = (0.25, 0.75)
# Not 1: then every seed would give every prompt the same class.
_CORRELATION: Final = 0.8


@dataclass(frozen=True, slots=True)
class GoalScene(Scene):
    """What the runs of one case share.

    Of a trace the arrival list is the same for every seed, jitter included: the seed draws classes
    (where they go by length, with a correlation of 0.8 to it) and the machine's noise. More of the
    trace than the source's `max_requests` is taken where the arrivals would otherwise last less
    than `horizon_s` at the rate of a task; they last less than that only if the trace ends.

    `policy` of a task may also be `slack-greedy:FACTOR` or `slack-greedy:FACTOR:MS`,
    `slack-greedy-even:…` (its slack counts from the first token), `smallest-feasible:TOKENS`,
    baselines with numbers of their own, or `edf-merged-N`: `edf-N` in which a new prompt may pass
    a started one. `POLICY:oracle` plans with the machine's own formula instead of what is learnt.
    """

    horizon_s: float = 0.0

    def workload(self, load: float, seed: int) -> Workload:
        """Return the workload of a task."""
        source = self.source
        if source.trace is None:
            return source.workload(load, seed)
        plain = replace(source, mix=(), is_by_length=False)
        workload = plain.workload(load, 0)
        num_wanted = math.ceil(workload.rate * self.horizon_s) + 1
        if self.horizon_s and source.max_requests is not None and num_wanted > source.max_requests:
            longer = replace(plain, max_requests=num_wanted).workload(1.0, 0)
            workload = with_rate(longer, workload.rate)
        mix = dict(source.mix)
        if source.is_by_length and mix:
            return assign_classes_by_length(workload, mix, seed, correlation=_CORRELATION)
        return assign_classes(workload, mix, seed) if mix else workload

    def run(self, task: SweepTask, progress: Progress | None = None) -> SweepRow:
        """Simulate one task; raises what `simulate` raises."""
        watches: list[PlanWatch] = []
        workload = self.workload(task.load, task.seed)
        first, last = workload.arrivals[0].at_s, workload.arrivals[-1].at_s
        begin = first + _RAMP_SHARE * (last - first)
        policy, config = task.policy, replace(self.config, seed=task.seed)
        if policy.endswith(ORACLE):
            policy, config = policy.removesuffix(ORACLE), replace(config, learner="oracle")

        def watched(parts: PlannerParts) -> Planner:
            watches.append(PlanWatch(planner_of(policy, parts), begin, last))
            return watches[0]

        result = simulate(
            workload,
            watched,
            self.hardware,
            config,
            progress,
            policy_name=task.policy,
        )
        measures = measure(result, self.hardware).to_json()
        extra = bounds_of(result.requests, self.config.planner)
        useful = watches[0].useful_tokens_per_s(result.requests)
        measures[EXTRA] = extra | {
            "longest_skip": watches[0].longest_skip,
            "useful_work_per_s": useful,
            "arrivals_s": last - first,
            "settled": settled_misses(result.requests),
        }
        return SweepRow(task, result.offered_rate, measures, result.event_hash, result.wall_s)

    def key(self, task: SweepTask) -> str:
        """Return a name for everything that the task's result depends on."""
        text = f"goals {GOALS_FORMAT} {self.horizon_s} {Scene.key(self, task)}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def planner_of(policy: str, parts: PlannerParts) -> Planner:
    """Return the planner called `policy`; ValueError if there is none."""
    name, _, number = policy.partition(":")
    if number and name in ("slack-greedy", "slack-greedy-even"):
        share, _, alpha_ms = number.partition(":")
        return SlackGreedyPlanner(
            parts.cost_model,
            slack_factor=float(share),
            alpha_s=float(alpha_ms or 8) / 1000.0,
            is_even=name.endswith("even"),
        )
    if name.startswith(_MERGED) and name.removeprefix(_MERGED).isdecimal():
        return StaticPlanner(int(name.removeprefix(_MERGED)), is_edf=True, is_merged=True)
    if number and name == "smallest-feasible":
        return SmallestFeasiblePlanner(parts.cost_model, min_tokens=int(number))
    return make_planner(
        policy, parts.cost_model, parts.output_lengths, parts.config, demand=parts.demand
    )


class PlanWatch:
    """Wraps a planner; counts the plans in a row that leave out a stream that is decoding, and the
    tokens that are computed for each request in the seconds [`begin`, `end`).

    A stream that a plan preempts is not running any more, and not counted as left out.
    """

    def __init__(self, planner: Planner, begin: float, end: float) -> None:
        self._planner = planner
        self._begin, self._end = begin, end
        self._skips: dict[str, int] = {}
        self._tokens: Counter[str] = Counter()
        self.longest_skip = 0

    def plan(self, view: EngineView) -> StepPlan:
        """Return the planner's plan."""
        plan = self._planner.plan(view)
        decoding = {each.request_id for each in view.running if each.is_decoding}
        skipped = decoding.difference(work.request_id for work in plan.work)
        skipped.difference_update(each.request_id for each in plan.preemptions)
        if skipped or self._skips:
            self._skips = {each: self._skips.get(each, 0) + 1 for each in skipped}
            self.longest_skip = max(self.longest_skip, *self._skips.values(), 0)
        if self._begin <= view.now < self._end:
            for work in plan.work:
                self._tokens[work.request_id] += work.num_tokens
        return plan

    def useful_tokens_per_s(self, requests: Sequence[SimulatedRequest]) -> float:
        """Return the tokens per second that were computed in that time for requests that met every
        target in the end.

        Work, not answers: what may wait a minute is deferred by an overload, and ends later than
        the arrivals do. What is computed again after a preemption counts again.
        """
        if self._end <= self._begin:
            return 0.0
        kept = (str(each.index) for each in requests if each.is_kept)
        return sum(self._tokens[each] for each in kept) / (self._end - self._begin)


def settled_misses(requests: Sequence[SimulatedRequest]) -> dict[str, Any]:
    """Return the share that missed a target, `missed`, and by class, `classes`, of the requests
    that arrived between a quarter and three quarters of the arrivals' time; `groups` holds how many
    they are and the misses by cause, of all and by class, as `GroupMeasures` does.

    Before that no backlog has built up, after it an overload ends before a long target does. Of
    all requests where none arrived then.
    """
    first = min(each.arrived_at for each in requests)
    span_s = max(each.arrived_at for each in requests) - first
    begin, end = (first + share * span_s for share in _SETTLED)
    chosen = [each for each in requests if begin <= each.arrived_at <= end] or requests
    by_class: dict[str, list[SimulatedRequest]] = {}
    for each in chosen:
        by_class.setdefault(each.slo_class, []).append(each)
    groups = {name: _misses(group) for name, group in sorted(by_class.items())}
    return {
        "missed": float(np.mean([not each.is_kept for each in chosen])),
        "classes": {
            name: float(np.mean([not each.is_kept for each in group]))
            for name, group in sorted(by_class.items())
        },
        "groups": {ALL: _misses(chosen)} | groups,
    }


def _misses(requests: Sequence[SimulatedRequest]) -> dict[str, Any]:
    return {"num_offered": len(requests), "misses": miss_counts(requests)}


def bounds_of(requests: Sequence[SimulatedRequest], config: PolicyConfig) -> dict[str, Any]:
    """Return how near the requests of a run came to the bounds that are promised to everybody.

    `wait_share`: the longest wait over its bound, max(`max_age_factor`·T, `min_max_age_s`).
    `most_overtaken`: of any request, how many later arrivals of its class started before it did, or
    before it gave up. `gap_share_p99`, `gap_share_max`: over served requests, the longest gap over
    the TPOT target (None without one).
    """
    waits = [
        each.wait_s / max(config.max_age_factor * each.ttft_target_s, config.min_max_age_s)
        for each in requests
        if each.ttft_target_s is not None
    ]
    gaps = [
        each.longest_gap_s / each.tpot_target_s
        for each in requests
        if each.tpot_target_s is not None and each.is_served and each.num_output_tokens > 1
    ]
    return {
        "wait_share": max(waits, default=0.0),
        "most_overtaken": most_overtaken(requests),
        "gap_share_p99": float(np.percentile(gaps, 99)) if gaps else None,
        "gap_share_max": max(gaps, default=None),
    }


def most_overtaken(requests: Sequence[SimulatedRequest]) -> int:
    """Return the most later arrivals of its class that started before a request did, or gave up."""
    by_class: dict[str, list[SimulatedRequest]] = {}
    for each in sorted(requests, key=lambda each: (each.arrived_at, each.index)):
        by_class.setdefault(each.slo_class, []).append(each)
    most = 0
    for group in by_class.values():
        waited_until = np.array([each.arrived_at + each.wait_s for each in group])
        # Whoever was refused never started: it overtook nobody.
        is_started = np.array([each.finish_reason != "rejected" for each in group])
        started_at = np.where(is_started, waited_until, np.inf)
        for index, until in enumerate(waited_until.tolist()):
            most = max(most, int((started_at[index + 1 :] < until).sum()))
    return most
