"""Rounds of mixed loads: every policy in turn, A B A B, the same arrivals for all of them.

Owns the repetition: the calm phase of each server, then the rates one after another. Must not know
how a server is started: a contestant is handed in as something that opens a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from controller.bench.client import StreamClient
from controller.bench.load_classes import LoadClass
from controller.bench.load_measures import LoadNumbers, Outcome, numbers_of, outcomes_of
from controller.bench.load_run import (
    CALM,
    LoadError,
    Sleep,
    measure_knee,
    measure_normal_step,
    run_load,
)
from controller.bench.load_traffic import LoadTraffic, requests_of
from controller.bench.load_validity import MAX_STEP_RATIO, check_machine, load_violations
from controller.bench.rounds import StageListener
from controller.bench.scenario import DEFAULT_VOCAB_SIZE, PromptSource
from controller.bench.servers import ServerError
from controller.bench.spike import SpikeError
from controller.bench.validity import Violation, ViolationKind
from controller.policy.slo import SloClass
from controller.workload.arrivals import Workload
from engine.clock import Clock

NUM_KNEE_REQUESTS = 48
KNEE_CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class LoadContestant:
    """A policy to measure: a stable key, a label for people, and a way in for each round."""

    key: str
    label: str
    open_client: Callable[[int], AbstractAsyncContextManager[StreamClient]]


@dataclass(frozen=True, slots=True)
class LoadTerms:
    """What is asked of every contestant.

    `rates` are requests per second, each for `duration_s` seconds of arrivals; `drain_s` later the
    streams that still run are cut off. Round n draws its arrivals from `seed` + n. A server whose
    normal step is not within a factor of `max_step_ratio` of the calibrated one gives no number.
    """

    traffic: LoadTraffic
    rates: tuple[float, ...]
    num_rounds: int
    duration_s: float
    drain_s: float
    seed: int
    vocab_size: int = DEFAULT_VOCAB_SIZE
    max_step_ratio: float = MAX_STEP_RATIO

    def workload(self, round_no: int, rate: float) -> Workload:
        """Return the arrivals of a round at a rate: the same for every policy."""
        return self.traffic.workload(rate, self.duration_s, self.seed + round_no)

    def prompts(self, round_no: int) -> PromptSource:
        """Return the prompts of a round, no two of which begin alike."""
        return PromptSource(self.seed + round_no, self.vocab_size)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The normal step in seconds, and the knee in requests per second (None = not asked for)."""

    normal_s: float
    knee_rate: float | None = None

    def classes(self, classes: Sequence[LoadClass]) -> dict[str, SloClass]:
        """Return the classes by name with their targets on this machine."""
        return {each.name: each.slo_class(self.normal_s) for each in classes}


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One policy at one rate in one round (from 0).

    `normal_s` is the normal step of that server, None if it did not get that far; `numbers` is None
    where `violations` is not empty. `started_ms` and `ended_ms` are epoch milliseconds.
    """

    round_no: int
    key: str
    label: str
    rate: float
    normal_s: float | None
    started_ms: int
    ended_ms: int
    outcomes: tuple[Outcome, ...]
    numbers: LoadNumbers | None
    violations: tuple[Violation, ...]


@dataclass(frozen=True, slots=True)
class LoadSession:
    """What one invocation measured; `is_complete` is False while turns are still to come."""

    terms: LoadTerms
    calibration: Calibration
    results: tuple[LoadResult, ...]
    is_complete: bool


TurnListener = Callable[[LoadSession], None]
"""Hears what has been measured so far, after each turn: a long measurement may be stopped."""


async def calibrate_load(
    client: StreamClient, traffic: LoadTraffic, seed: int, vocab_size: int, *, has_knee: bool
) -> Calibration:
    """Measure the normal step, and with `has_knee` the knee of this traffic.

    The knee is what a server makes when `KNEE_CONCURRENCY` requests of the same mix, without
    promises, are there at any time. SpikeError or LoadError if the server cannot be measured.
    """
    prompts = PromptSource(seed, vocab_size)
    normal_s = await measure_normal_step(client, prompts)
    if not has_knee:
        return Calibration(normal_s)
    try:
        # At one per second over twice the span, there are enough of them.
        workload = traffic.workload(1.0, 2.0 * NUM_KNEE_REQUESTS, seed)
    except ValueError as exc:
        raise LoadError(str(exc)) from exc
    arrivals = workload.arrivals[:NUM_KNEE_REQUESTS]
    unpromised = {each.name: SloClass(each.name) for each in traffic.classes}
    requests = requests_of(Workload(workload.name, arrivals), unpromised, prompts)
    return Calibration(normal_s, await measure_knee(client, requests, KNEE_CONCURRENCY))


async def measure_loads(
    contestants: Sequence[LoadContestant],
    terms: LoadTerms,
    calibration: Calibration,
    clock: Clock,
    *,
    sleep: Sleep = asyncio.sleep,
    on_stage: StageListener = lambda label, done, total: None,
    on_turn: TurnListener = lambda session: None,
) -> LoadSession:
    """Measure every contestant at every rate, `num_rounds` times, in turn.

    A server that fails is a result too, so that the others go on. LoadError if such a load cannot
    be made.
    """
    classes = calibration.classes(terms.traffic.classes)
    progress = _Progress(_num_requests(terms) * len(contestants), on_stage)
    results: list[LoadResult] = []
    for round_no in range(terms.num_rounds):
        for contestant in contestants:
            turn = _Turn(contestant, terms, calibration.normal_s, classes, round_no, clock, sleep)
            results += await turn.run(progress)
            on_turn(LoadSession(terms, calibration, tuple(results), is_complete=False))
    progress.finish()
    return LoadSession(terms, calibration, tuple(results), is_complete=True)


def _num_requests(terms: LoadTerms) -> int:
    """Return how many requests each contestant gets; LoadError if they cannot be made."""
    num_prompts = terms.vocab_size - terms.vocab_size // 8 - CALM.num_short
    total = 0
    for round_no in range(terms.num_rounds):
        try:
            sizes = [terms.workload(round_no, rate).num_requests for rate in terms.rates]
        except ValueError as exc:
            raise LoadError(str(exc)) from exc
        if sum(sizes) > num_prompts:
            raise LoadError(
                f"{sum(sizes)} prompts of a round cannot all begin with tokens of their own:"
                " give a larger --vocab-size, a shorter --duration or fewer rates"
            )
        total += sum(sizes)
    return total


class _Progress:
    """Counts requests that have ended, over all rounds."""

    def __init__(self, total: int, on_stage: StageListener) -> None:
        self._on_stage = on_stage
        self._label = ""
        self._done = 0
        self._total = total

    def stage(self, label: str) -> None:
        self._label = label
        self._on_stage(label, self._done, self._total)

    def count(self) -> None:
        self._done += 1
        self._on_stage(self._label, self._done, self._total)

    def finish(self) -> None:
        self._on_stage("done", self._total, self._total)


class _Turn:
    """One contestant's turn in one round: its server, the calm phase, all rates."""

    def __init__(
        self,
        contestant: LoadContestant,
        terms: LoadTerms,
        normal_s: float,
        classes: dict[str, SloClass],
        round_no: int,
        clock: Clock,
        sleep: Sleep,
    ) -> None:
        self._contestant = contestant
        self._terms = terms
        self._target_normal_s = normal_s
        self._classes = classes
        self._round_no = round_no
        self._clock = clock
        self._sleep = sleep
        self._normal_s: float | None = None

    async def run(self, progress: _Progress) -> list[LoadResult]:
        """Return one result per rate."""
        results: list[LoadResult] = []
        name = f"round {self._round_no + 1}, {self._contestant.label}"
        progress.stage(f"{name}: starting")
        try:
            async with self._contestant.open_client(self._round_no) as client:
                prompts = self._terms.prompts(self._round_no)
                # Also a warm-up: every server has served the same before its first rate.
                self._normal_s = await measure_normal_step(client, prompts)
                for rate in self._terms.rates:
                    progress.stage(f"{name}: {rate:.2f}/s")
                    results.append(await self._measure(client, rate, prompts, progress))
        except (ServerError, SpikeError, LoadError) as exc:
            failed = (Violation(ViolationKind.SERVER_FAILED, str(exc)),)
            missing = self._terms.rates[len(results) :]
            results += [self._result(rate, 0, 0, (), failed) for rate in missing]
        return results

    async def _measure(
        self, client: StreamClient, rate: float, prompts: PromptSource, progress: _Progress
    ) -> LoadResult:
        assert self._normal_s is not None  # noqa: S101 - measured before the first rate
        workload = self._terms.workload(self._round_no, rate)
        run = await run_load(
            client,
            workload,
            requests_of(workload, self._classes, prompts),
            self._clock,
            drain_s=self._terms.drain_s,
            sleep=self._sleep,
            on_done=progress.count,
        )
        found = (
            *check_machine(self._normal_s, self._target_normal_s, self._terms.max_step_ratio),
            *load_violations(run, self._target_normal_s),
        )
        outcomes = outcomes_of(run, self._classes)
        return self._result(rate, run.started_ms, run.ended_ms, outcomes, found)

    def _result(
        self,
        rate: float,
        started_ms: int,
        ended_ms: int,
        outcomes: tuple[Outcome, ...],
        found: tuple[Violation, ...],
    ) -> LoadResult:
        is_quoted = bool(outcomes) and not found
        return LoadResult(
            round_no=self._round_no,
            key=self._contestant.key,
            label=self._contestant.label,
            rate=rate,
            normal_s=self._normal_s,
            started_ms=started_ms,
            ended_ms=ended_ms,
            outcomes=outcomes,
            numbers=numbers_of(outcomes, self._terms.duration_s) if is_quoted else None,
            violations=found,
        )
