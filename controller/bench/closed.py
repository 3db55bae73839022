"""The closed loop: so many at once, a new request as soon as one ends, until all are done.

Owns the scenario, the order of events and the numbers of one run. Must not start servers, take
time or compare. It measures throughput alone: arrivals that wait for answers say nothing about a
queue, so its TTFT is that of a server that is never overrun.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from controller.bench.client import StreamClient
from controller.bench.scenario import PromptSource, ScenarioRequest
from controller.bench.series import RequestSeries, gaps, tokens_per_second
from controller.bench.validity import Violation, ViolationKind, check_request

WARMUP_TOKENS = 8
"""Output of each warm-up request: enough for several decode steps at full batch."""

DoneListener = Callable[[int, int], None]
"""Hears how many requests are done, of how many."""


@dataclass(frozen=True, slots=True)
class ClosedScenario:
    """Sizes of the closed loop: `num_requests` in all, `concurrency` at once, lengths in tokens."""

    concurrency: int = 8
    prompt_tokens: int = 128
    output_tokens: int = 32
    num_requests: int = 32

    def __post_init__(self) -> None:
        """Check the sizes; ValueError names the field."""
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.output_tokens < 2:
            raise ValueError("output_tokens must be at least 2: a single token has no gap")
        if self.num_requests < self.concurrency:
            raise ValueError(
                f"num_requests ({self.num_requests}) must be at least concurrency"
                f" ({self.concurrency}): so many could never run at once"
            )

    def requests(self, prompts: PromptSource) -> tuple[ScenarioRequest, ...]:
        """Return every measured request, with prompts that no prefix cache can know."""
        return tuple(
            ScenarioRequest(f"closed-{i}", prompts.draw(self.prompt_tokens), self.output_tokens)
            for i in range(self.num_requests)
        )

    def warmup_requests(self, prompts: PromptSource) -> tuple[ScenarioRequest, ...]:
        """Return `concurrency` shorter requests that are not measured."""
        num_tokens = min(WARMUP_TOKENS, self.output_tokens)
        return tuple(
            ScenarioRequest(f"warm-{i}", prompts.draw(self.prompt_tokens), num_tokens)
            for i in range(self.concurrency)
        )


@dataclass(frozen=True, slots=True)
class ClosedRun:
    """What the client saw of one closed loop, in the order of the scenario's requests."""

    scenario: ClosedScenario
    series: tuple[RequestSeries, ...]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """P50, P90 and P99 of one quantity, in its own unit."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Return percentiles by linear interpolation; ValueError of nothing."""
        if not values:
            raise ValueError("no value to take percentiles of")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        return cls(cuts[49], cuts[89], cuts[98])


@dataclass(frozen=True, slots=True)
class ClosedNumbers:
    """The numbers of one run: output tokens per second of wall time, TTFT and gaps in seconds.

    Wall time runs from the first request sent to the last token received. `num_merged_reads` counts
    reads that delivered several tokens of a stream at once: each is one instant, so it hides a gap.
    """

    tokens_per_second: float
    wall_s: float
    num_output_tokens: int
    ttft_s: Percentiles
    gap_s: Percentiles
    num_merged_reads: int


async def run_closed(
    client: StreamClient,
    scenario: ClosedScenario,
    requests: Sequence[ScenarioRequest],
    on_done: DoneListener = lambda done, total: None,
) -> ClosedRun:
    """Send `requests`, `concurrency` at once, and return their series in the same order."""
    results: dict[int, RequestSeries] = {}
    queue = iter(enumerate(requests))

    async def worker() -> None:
        for index, request in queue:
            results[index] = await client.stream(request)
            on_done(len(results), len(requests))

    async with asyncio.TaskGroup() as group:
        for _ in range(scenario.concurrency):
            group.create_task(worker())
    return ClosedRun(scenario, tuple(results[index] for index in range(len(requests))))


def closed_numbers(run: ClosedRun) -> ClosedNumbers:
    """Return the numbers of a run; ValueError if one is undefined (such a run is invalid)."""
    lasts = [s.last_token_at for s in run.series if s.last_token_at is not None]
    speed = tokens_per_second(run.series)
    if speed is None:
        raise ValueError("no token came")
    return ClosedNumbers(
        tokens_per_second=speed,
        wall_s=max(lasts) - min(s.sent_at for s in run.series),
        num_output_tokens=sum(s.num_output_tokens for s in run.series),
        ttft_s=Percentiles.of([s.ttft_s for s in run.series if s.ttft_s is not None]),
        gap_s=Percentiles.of([gap.duration_s for s in run.series for gap in gaps(s)]),
        num_merged_reads=sum(s.num_merged_reads for s in run.series),
    )


def closed_violations(run: ClosedRun) -> tuple[Violation, ...]:
    """Return every reason not to quote `run`; empty for a valid one."""
    found = tuple(_violations(run))
    if not found:
        try:
            closed_numbers(run)
        except ValueError as exc:
            return (Violation(ViolationKind.TOO_FEW_READS, str(exc)),)
    return found


def _violations(run: ClosedRun) -> Iterator[Violation]:
    scenario = run.scenario
    if len(run.series) != scenario.num_requests:
        yield Violation(
            ViolationKind.TOKENS_MISSING,
            f"{len(run.series)} requests ran, the scenario has {scenario.num_requests}",
        )
    for series in run.series:
        yield from check_request(series, scenario.prompt_tokens, scenario.output_tokens)
