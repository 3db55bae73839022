"""Rounds of spikes: every contestant in turn, A B A B, with one scenario for all of them.

Owns the repetition and the choice of a scenario that is long enough for everybody. Must not know
how a contestant is reached: it is handed in as something that opens a client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from controller.bench.client import StreamClient
from controller.bench.record import SpikeNumbers, SpikeRun, numbers_of
from controller.bench.scenario import PromptSource, SpikeScenario
from controller.bench.servers import ServerError
from controller.bench.spike import PromiseRule, SpikeError, measure
from controller.bench.validity import Violation, ViolationKind, violations

MAX_ATTEMPTS = 3
"""How many lengths of the short requests are tried before a run stays invalid."""

StageListener = Callable[[str, int, int], None]
"""Hears what is measured now: label, spikes done, spikes in all."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server under a policy: a stable key, a label for people, its promises, and a way in."""

    key: str
    label: str
    rule: PromiseRule
    open_client: Callable[[], AbstractAsyncContextManager[StreamClient]]


@dataclass(frozen=True, slots=True)
class SpikeResult:
    """One contestant's spike in one round (from 0); `numbers` is None where `violations` is not
    empty, `run` is None where not even the calm phase succeeded."""

    round_no: int
    key: str
    label: str
    run: SpikeRun | None
    numbers: SpikeNumbers | None
    violations: tuple[Violation, ...]


@dataclass(frozen=True, slots=True)
class SpikeSession:
    """Everything that one invocation measured, all of it with the same `scenario`."""

    scenario: SpikeScenario
    num_rounds: int
    results: tuple[SpikeResult, ...]


async def measure_rounds(
    contestants: Sequence[Contestant],
    scenario: SpikeScenario,
    prompts: PromptSource,
    num_rounds: int,
    on_stage: StageListener = lambda label, done, total: None,
) -> SpikeSession:
    """Measure every contestant `num_rounds` times, in turn.

    If the short requests of any run did not outlast the long prefill, everything starts again with
    longer ones: numbers of different scenarios do not share a table.
    """
    for _ in range(MAX_ATTEMPTS - 1):
        session = await _attempt(contestants, scenario, prompts, num_rounds, on_stage)
        if not _is_too_short(session.results[-1]):
            return session
        scenario = scenario.outlasting()
    return await _attempt(contestants, scenario, prompts, num_rounds, on_stage, is_last=True)


async def _attempt(
    contestants: Sequence[Contestant],
    scenario: SpikeScenario,
    prompts: PromptSource,
    num_rounds: int,
    on_stage: StageListener,
    *,
    is_last: bool = False,
) -> SpikeSession:
    """Run the rounds; stops at the first run that was too short, unless this is the last try."""
    results: list[SpikeResult] = []
    total = num_rounds * len(contestants)
    for round_no in range(num_rounds):
        for contestant in contestants:
            on_stage(contestant.label, len(results), total)
            results.append(await _measure_one(contestant, scenario, prompts, round_no))
            if _is_too_short(results[-1]) and not is_last:
                return SpikeSession(scenario, num_rounds, tuple(results))
    on_stage("done", total, total)
    return SpikeSession(scenario, num_rounds, tuple(results))


async def _measure_one(
    contestant: Contestant, scenario: SpikeScenario, prompts: PromptSource, round_no: int
) -> SpikeResult:
    """Measure one contestant once; a server that fails is a result too, so the others go on."""
    run: SpikeRun | None = None
    found: tuple[Violation, ...]
    try:
        async with contestant.open_client() as client:
            run = await measure(client, scenario, prompts, contestant.rule)
        found = violations(run)
    except (ServerError, SpikeError) as exc:
        found = (Violation(ViolationKind.SERVER_FAILED, str(exc)),)
    numbers = None if run is None or found else numbers_of(run)
    return SpikeResult(round_no, contestant.key, contestant.label, run, numbers, found)


def _is_too_short(result: SpikeResult) -> bool:
    """Whether a run failed only because the short requests were too short."""
    kinds = {violation.kind for violation in result.violations}
    return kinds == {ViolationKind.NOT_OUTLASTING}
