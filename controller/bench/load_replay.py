"""The same arrivals in the simulator, on the machine that the server itself recorded.

Owns the agreement of simulated with real attainment. Must not measure anything: it runs when the
servers are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

from controller.bench.load_history import (
    ReplayError,
    ServerHistory,
    fit_machine,
    machine_over_time,
)
from controller.bench.load_measures import EVERYBODY
from controller.bench.load_rounds import LoadResult, LoadSession
from controller.simulation.hardware import HardwareError, HardwareProfile
from controller.simulation.measures import Percentiles
from controller.simulation.run import SimulationConfig, SimulationError, simulate
from costmodel.features import Regime, StepFeatures
from engine.request import Request
from engine.step import StepReport

GOAL_POINTS: Final = 5.0
"""Percentage points by which simulated and real attainment may differ."""

NUM_DRAWS: Final = 8
"""Simulations of each run on each machine, with other noise each time: where a machine stalls for
seconds now and then, one of them tells little."""

_SEED_APART: Final = 10_000


@dataclass(frozen=True, slots=True)
class Agreement:
    """One class (or all) of one policy at one rate: attainment, pooled over the rounds.

    `real` is what the client saw, `recorded` what the server's own telemetry says (None where it
    holds no such request), `simulated` what the simulator makes of the same arrivals on a machine
    of steady speed (the mean of `NUM_DRAWS` draws of its noise; `simulated_low` and
    `simulated_high` are the least and the greatest), `simulated_over_time` on one as fast as the
    real one was at each time (the mean of as many): shares of offered requests.
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
    simulated_low: float
    simulated_high: float

    @property
    def points(self) -> float:
        """Simulated less real, in percentage points."""
        return 100.0 * (self.simulated - self.real)

    @property
    def num_apart(self) -> int:
        """The difference in requests: small classes are coarse."""
        return round(abs(self.simulated - self.real) * self.num_offered)

    @property
    def is_within_draws(self) -> bool:
        """Whether the real run is one that the machine's noise may have made."""
        return self.simulated_low <= self.real <= self.simulated_high

    @property
    def is_close(self) -> bool:
        """Whether they agree within `GOAL_POINTS`."""
        return abs(self.points) <= GOAL_POINTS


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long steps of one regime took, in seconds: real ones and simulated ones, noise included.

    The simulated ones are those of all draws; they are counted per draw.
    """

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


_Draws = tuple[Mapping[int, bool], ...]
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
    """A real run and its simulations, one per draw of the noise."""

    result: LoadResult
    kept: _Draws
    kept_over_time: _Draws
    recorded: tuple[tuple[str, bool], ...]
    real_steps: tuple[tuple[Regime, float], ...]
    simulated_steps: tuple[tuple[Regime, float], ...]


def _simulated(
    session: LoadSession, result: LoadResult, history: ServerHistory, machine: HardwareProfile
) -> _Pair:
    workload = session.terms.workload(result.round_no, result.rate)
    # Whoever would have been cut off in the real run has not been served here either.
    cut_at = workload.duration_s + session.terms.drain_s
    config = SimulationConfig(
        engine=history.engine,
        classes=tuple(session.calibration.classes(session.terms.traffic.classes).values()),
        seed=session.terms.seed + result.round_no,
        # As the service does: its model learns from every step and is refitted to a window of them.
        learner="refitted",
        planner=history.settings.planner,
        max_tokens=None,
    )
    taken = _StepTimesTaken()

    def kept_on(hardware: HardwareProfile, *listeners: _StepTimesTaken) -> _Draws:
        draws = []
        for draw in range(NUM_DRAWS):
            simulation = simulate(
                workload,
                history.policy,
                hardware,
                replace(config, seed=config.seed + _SEED_APART * draw),
                policy_name=result.key,
                listeners=listeners,
            )
            draws.append(
                {
                    each.index: each.is_kept and each.ended_at <= cut_at
                    for each in simulation.requests
                }
            )
        return tuple(draws)

    span = range(result.started_ms, result.ended_ms + 1)
    steps = [step for step in history.steps if step.at_ms in span]
    return _Pair(
        result,
        kept_on(machine, taken),
        kept_on(machine_over_time(machine, steps, result.started_ms)),
        tuple((name, is_kept) for at, name, is_kept in history.verdicts if at in span),
        tuple((step.features.regime, step.duration_s) for step in steps),
        tuple(taken.steps),
    )


class _StepTimesTaken:
    """Hears what kind of work each simulated step held, and the seconds that it took."""

    def __init__(self) -> None:
        self.steps: list[tuple[Regime, float]] = []

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Take one step's report."""
        if report.is_executed:
            self.steps.append((StepFeatures.of(report.plan.work).regime, report.duration_s))


def _agreements(pairs: list[_Pair]) -> list[Agreement]:
    first = pairs[0].result
    names = sorted({each.slo_class for pair in pairs for each in pair.result.outcomes})
    found = []
    for name in (EVERYBODY, *names):

        def is_of(slo_class: str, name: str = name) -> bool:
            return name in (EVERYBODY, slo_class)

        own = [
            (pair, each) for pair in pairs for each in pair.result.outcomes if is_of(each.slo_class)
        ]
        # Draw i of the pooled rounds is draw i of each: counted together, as the real ones are.
        simulated = [
            fmean(pair.kept[i][each.index] for pair, each in own) for i in range(NUM_DRAWS)
        ]
        timed = [
            fmean(pair.kept_over_time[i][each.index] for pair, each in own)
            for i in range(NUM_DRAWS)
        ]
        recorded = [kept for pair in pairs for name, kept in pair.recorded if is_of(name)]
        found.append(
            Agreement(
                key=first.key,
                label=first.label,
                rate=first.rate,
                slo_class=name,
                num_offered=len(own),
                real=fmean(each.is_kept for _, each in own),
                recorded=fmean(recorded) if recorded else None,
                simulated=fmean(simulated),
                simulated_over_time=fmean(timed),
                simulated_low=min(simulated),
                simulated_high=max(simulated),
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
            _per_draw(s for pair in pairs for r, s in pair.simulated_steps if r is regime),
        )
        for regime in Regime
    ]
    return [each for each in times if each.real_s is not None or each.simulated_s is not None]


def _per_draw(seconds: Iterable[float]) -> Percentiles | None:
    found = Percentiles.of(seconds)
    return None if found is None else replace(found, num=max(1, round(found.num / NUM_DRAWS)))
