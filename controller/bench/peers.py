"""Closed loops of several contestants in turn, A B A B, and whether they said the same.

Owns the repetition, the comparison of texts and the choice among a peer's settings. Must not know
how a contestant is reached: it is handed in as something that opens a client.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from controller.bench.closed import (
    ClosedNumbers,
    ClosedRun,
    ClosedScenario,
    closed_numbers,
    closed_violations,
    run_closed,
)
from controller.bench.rounds import Contestant, StageListener
from controller.bench.scenario import PromptSource, ScenarioRequest
from controller.bench.series import RequestSeries
from controller.bench.servers import ServerError
from controller.bench.validity import Violation, ViolationKind


@dataclass(frozen=True, slots=True)
class ClosedResult:
    """One contestant's closed loop in one round (from 0); `numbers` is None where `violations` is
    not empty, `run` is None where it never became ready.
    """

    round_no: int
    key: str
    label: str
    run: ClosedRun | None
    numbers: ClosedNumbers | None
    violations: tuple[Violation, ...]


@dataclass(frozen=True, slots=True)
class ClosedSession:
    """Every closed loop of one invocation; within a round all contestants got the same prompts."""

    scenario: ClosedScenario
    num_rounds: int
    results: tuple[ClosedResult, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far `key` and the reference generated the same texts for the same prompts, greedily.

    `common_share` is the mean share of a text that both begin with: a tie between two tokens that
    rounding decides makes everything after it differ.
    """

    key: str
    label: str
    num_compared: int
    num_equal: int
    common_share: float | None


async def measure_closed(
    contestants: Sequence[Contestant],
    scenario: ClosedScenario,
    prompts: PromptSource,
    num_rounds: int,
    on_stage: StageListener = lambda label, done, total: None,
) -> ClosedSession:
    """Measure every contestant `num_rounds` times, in turn; the progress counts requests."""
    results: list[ClosedResult] = []
    total = num_rounds * len(contestants) * scenario.num_requests
    for round_no in range(num_rounds):
        requests = scenario.requests(prompts)
        for contestant in contestants:
            done = len(results) * scenario.num_requests
            on_stage(f"{contestant.label}: starting", done, total)
            results.append(
                await _measure_one(
                    contestant, scenario, prompts, requests, round_no, on_stage, done, total
                )
            )
    on_stage("done", total, total)
    return ClosedSession(scenario, num_rounds, tuple(results))


async def _measure_one(
    contestant: Contestant,
    scenario: ClosedScenario,
    prompts: PromptSource,
    requests: Sequence[ScenarioRequest],
    round_no: int,
    on_stage: StageListener,
    done_before: int,
    total: int,
) -> ClosedResult:
    """Warm up and measure one contestant; one that fails is a result too, so the others go on."""
    run: ClosedRun | None = None
    found: tuple[Violation, ...]

    def on_done(done: int, _: int) -> None:
        on_stage(contestant.label, done_before + done, total)

    try:
        async with contestant.open_client() as client:
            warmup = scenario.warmup_requests(prompts)
            await run_closed(client, scenario, warmup)
            on_stage(contestant.label, done_before, total)
            run = await run_closed(client, scenario, requests, on_done)
        found = closed_violations(run)
    except ServerError as exc:
        found = (Violation(ViolationKind.SERVER_FAILED, str(exc)),)
    numbers = None if run is None or found else closed_numbers(run)
    return ClosedResult(round_no, contestant.key, contestant.label, run, numbers, found)


async def fastest(
    candidates: Sequence[Contestant],
    scenario: ClosedScenario,
    prompts: PromptSource,
    on_stage: StageListener = lambda label, done, total: None,
) -> tuple[str, ClosedSession]:
    """Return the key of the candidate with most tokens per second in one short closed loop each.

    ServerError, with every candidate's reason, if none of them runs.
    """
    short = replace(scenario, num_requests=scenario.concurrency)
    session = await measure_closed(candidates, short, prompts, 1, on_stage)
    speeds = {
        result.key: result.numbers.tokens_per_second
        for result in session.results
        if result.numbers is not None
    }
    if not speeds:
        reasons = "\n".join(
            f"{result.label}: {result.violations[0].message}" for result in session.results
        )
        raise ServerError(f"no setting of the peer runs\n{reasons}")
    return max(speeds, key=lambda key: speeds[key]), session


def agreements(session: ClosedSession, reference: str) -> tuple[Agreement, ...]:
    """Compare every contestant's texts with those of `reference`, round by round."""
    by_round = {
        result.round_no: result.run.series
        for result in session.results
        if result.key == reference and result.run is not None
    }
    others: dict[str, list[ClosedResult]] = {}
    for result in session.results:
        if result.key != reference:
            others.setdefault(result.key, []).append(result)
    return tuple(
        _agreement(
            results,
            (
                pair
                for result in results
                if result.run is not None and result.round_no in by_round
                for pair in zip(by_round[result.round_no], result.run.series, strict=True)
            ),
        )
        for results in others.values()
    )


def _agreement(
    results: Sequence[ClosedResult], pairs: Iterable[tuple[RequestSeries, RequestSeries]]
) -> Agreement:
    shares = [
        _common_share(_comparable(ours.text), _comparable(other.text))
        for ours, other in pairs
        if ours.error is None
        and other.error is None
        # A program that sends no text cannot be compared; an empty one it did send can.
        and ours.text is not None
        and other.text is not None
    ]
    return Agreement(
        key=results[0].key,
        label=results[0].label,
        num_compared=len(shares),
        num_equal=sum(share == 1.0 for share in shares),
        common_share=sum(shares) / len(shares) if shares else None,
    )


def _comparable(text: str | None) -> str:
    # A character whose bytes are not complete is held back by some and shown as U+FFFD by others.
    return (text or "").rstrip("\ufffd")


def _common_share(a: str, b: str) -> float:
    """Return the length of the common beginning over that of the longer text; 1 if equal."""
    if a == b:
        return 1.0
    shorter = min(len(a), len(b))
    common = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    return common / max(len(a), len(b))
