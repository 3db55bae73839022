"""The same arrivals in the simulator, on the machine that the server itself recorded.

Owns the agreement of simulated with real attainment. Must not measure anything: it runs when the
servers are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from controller.bench.load_history import (
    ReplayError,
    ServerHistory,
    fit_machine,
    machine_over_time,
)
from controller.bench.load_measures import EVERYBODY, Outcome
from controller.bench.load_rounds import LoadResult, LoadSession
from controller.policy.policies import make_planner
from controller.simulation.hardware import HardwareError, HardwareProfile
from controller.simulation.measures import Percentiles
from controller.simulation.run import (
    PlannerParts,
    SimulationConfig,
    SimulationError,
    simulate,
)
from costmodel.features import Regime, StepFeatures
from engine.ports import EngineView, Planner
from engine.step import StepPlan, WorkKind

GOAL_POINTS: Final = 5.0
"""Percentage points by which simulated and real attainment may differ."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """One class (or all) of one policy at one rate: attainment, pooled over the rounds.

    `real` is what the client saw, `recorded` what the server's own telemetry says (None where it
    holds no such request), `simulated` what the simulator makes of the same arrivals on a machine
    of steady speed, `simulated_over_time` on one as fast as the real one was at each time: shares
    of offered requests.
    """

    key: str
    label: str
    rate: float
    slo_class: str
    num_offered: int
    real: float
    recorded: float | None
    simulated: float
    simulated_over_time: float

    @property
    def points(self) -> float:
        """Simulated less real, in percentage points."""
        return 100.0 * (self.simulated - self.real)

    @property
    def num_apart(self) -> int:
        """The difference in requests: small classes are coarse."""
        return round(abs(self.simulated - self.real) * self.num_offered)

    @property
    def is_close(self) -> bool:
        """Whether they agree within `GOAL_POINTS`."""
        return abs(self.points) <= GOAL_POINTS


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long steps of one regime took, in seconds: real ones and simulated ones."""

    key: str
    rate: float
    regime: Regime
    real_s: Percentiles | None
    simulated_s: Percentiles | None


@dataclass(frozen=True, slots=True)
class Replayed:
    """Every run that could be replayed, the machines that were fitted, and what went wrong."""

    agreements: tuple[Agreement, ...]
    step_times: tuple[StepTimes, ...]
    machines: dict[str, dict[str, Any]]
    problems: tuple[str, ...]

    @property
    def misses(self) -> tuple[Agreement, ...]:
        """Where simulated and real attainment are further apart than the goal."""
        return tuple(each for each in self.agreements if not each.is_close)


HistorySource = Callable[[LoadResult], ServerHistory]
ReplayListener = Callable[[str, int, int], None]


def replay(
    session: LoadSession,
    history_of: HistorySource,
    on_stage: ReplayListener = lambda label, done, total: None,
) -> Replayed:
    """Simulate every valid run of `session` on its own server's machine and compare.

    `history_of` returns a run's server life. What cannot be read, fitted or simulated becomes a
    problem of that run.
    """
    valid = [result for result in session.results if result.numbers is not None]
    pairs: dict[tuple[str, float], list[_Pair]] = {}
    machines: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    fitted: dict[tuple[int, str], tuple[ServerHistory, HardwareProfile]] = {}
    for done, result in enumerate(valid):
        on_stage(f"simulating {result.label} at {result.rate:.2f}/s", done, len(valid))
        turn = (result.round_no, result.key)
        try:
            if turn not in fitted:
                history = history_of(result)
                fitted[turn] = history, fit_machine(history.steps, result.key)
                machines[f"round {result.round_no + 1}, {result.key}"] = fitted[turn][1].to_json()
            pair = _simulated(session, result, *fitted[turn])
        except (ReplayError, HardwareError, SimulationError) as error:
            problems.append(
                f"{result.label} at {result.rate:.2f}/s, round {result.round_no + 1}: {error}"
            )
            continue
        pairs.setdefault((result.key, result.rate), []).append(pair)
    on_stage("done", len(valid), len(valid))
    return Replayed(
        tuple(each for group in pairs.values() for each in _agreements(group)),
        tuple(each for group in pairs.values() for each in _step_times(group)),
        machines,
        tuple(problems),
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    """A real run and its simulations."""

    result: LoadResult
    kept: Mapping[int, bool]
    kept_over_time: Mapping[int, bool]
    recorded: tuple[tuple[str, bool], ...]
    real_steps: tuple[tuple[Regime, float], ...]
    simulated_steps: tuple[tuple[Regime, float], ...]


def _simulated(
    session: LoadSession, result: LoadResult, history: ServerHistory, machine: HardwareProfile
) -> _Pair:
    workload = session.terms.workload(result.round_no, result.rate)
    config = SimulationConfig(
        engine=history.engine,
        classes=tuple(session.calibration.classes(session.terms.traffic.classes).values()),
        seed=session.terms.seed + result.round_no,
        # As the service does: its model learns from every step and is refitted to a window of them.
        learner="refitted",
        planner=history.settings.planner,
        max_tokens=None,
    )
    # Whoever would have been cut off in the real run has not been served here either.
    cut_at = workload.duration_s + session.terms.drain_s

    def kept_on(hardware: HardwareProfile, watched: _WatchedPlanners) -> dict[int, bool]:
        simulation = simulate(workload, watched.make, hardware, config, policy_name=result.key)
        return {
            each.index: each.is_kept and each.ended_at <= cut_at for each in simulation.requests
        }

    span = range(result.started_ms, result.ended_ms + 1)
    steps = [step for step in history.steps if step.at_ms in span]
    steady = _WatchedPlanners(history.policy, machine)
    timed = machine_over_time(machine, steps, result.started_ms)
    return _Pair(
        result,
        kept_on(machine, steady),
        kept_on(timed, _WatchedPlanners(history.policy, timed)),
        tuple((name, is_kept) for at, name, is_kept in history.verdicts if at in span),
        tuple((step.features.regime, step.duration_s) for step in steps),
        tuple(steady.steps),
    )


class _WatchedPlanners:
    """Makes the planner called `policy` and notes what each planned step takes without noise."""

    def __init__(self, policy: str, machine: HardwareProfile) -> None:
        self._policy = policy
        self._machine = machine
        self.steps: list[tuple[Regime, float]] = []

    def make(self, parts: PlannerParts) -> Planner:
        """Return the planner, watched."""
        self._planner = make_planner(
            self._policy,
            parts.cost_model,
            parts.output_lengths,
            parts.config,
            demand=parts.demand,
        )
        return self

    def plan(self, view: EngineView) -> StepPlan:
        """Return the planner's plan."""
        plan = self._planner.plan(view)
        if plan.work:
            known = {
                each.request_id: each.num_known_tokens
                for group in (view.waiting, view.running, view.preempted)
                for each in group
            }
            num_ends = sum(
                work.kind is WorkKind.PREFILL
                and work.num_computed_tokens + work.num_tokens == known[work.request_id]
                for work in plan.work
            )
            features = StepFeatures.of(plan.work, num_ends)
            self.steps.append((features.regime, self._machine.seconds(features)))
        return plan


def _agreements(pairs: list[_Pair]) -> list[Agreement]:
    first = pairs[0].result
    names = sorted({each.slo_class for pair in pairs for each in pair.result.outcomes})
    found = []
    for name in (EVERYBODY, *names):

        def is_of(slo_class: str, name: str = name) -> bool:
            return name in (EVERYBODY, slo_class)

        real: list[tuple[Outcome, bool, bool]] = [
            (each, pair.kept[each.index], pair.kept_over_time[each.index])
            for pair in pairs
            for each in pair.result.outcomes
            if is_of(each.slo_class)
        ]
        recorded = [kept for pair in pairs for own, kept in pair.recorded if is_of(own)]
        found.append(
            Agreement(
                key=first.key,
                label=first.label,
                rate=first.rate,
                slo_class=name,
                num_offered=len(real),
                real=sum(each.is_kept for each, *_ in real) / len(real),
                recorded=sum(recorded) / len(recorded) if recorded else None,
                simulated=sum(steady for _, steady, _ in real) / len(real),
                simulated_over_time=sum(timed for *_, timed in real) / len(real),
            )
        )
    return found


def _step_times(pairs: list[_Pair]) -> list[StepTimes]:
    first = pairs[0].result
    times = [
        StepTimes(
            first.key,
            first.rate,
            regime,
            Percentiles.of(s for pair in pairs for r, s in pair.real_steps if r is regime),
            Percentiles.of(s for pair in pairs for r, s in pair.simulated_steps if r is regime),
        )
        for regime in Regime
    ]
    return [each for each in times if each.real_s is not None or each.simulated_s is not None]
