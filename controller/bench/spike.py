"""The spike against one server: a calm phase that measures the normal step, then the scenario.

Owns the order of events of one run. Must not start servers, take time or judge the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from controller.bench.client import StreamClient
from controller.bench.record import SpikeRun
from controller.bench.scenario import Promises, PromptSource, ScenarioRequest, SpikeScenario
from controller.bench.series import RequestSeries, TokenRead, normal_gap_s


class SpikeError(RuntimeError):
    """The server cannot be measured; the message is a line for the person who started it."""


@dataclass(frozen=True, slots=True)
class PromiseRule:
    """How promises follow from the normal step.

    Short requests ask for a TPOT of `tpot_factor` times the calibrated gap, None = best effort.
    `long_ttft_s` (seconds) is asked for the long one, None = best effort.
    """

    tpot_factor: float | None = None
    long_ttft_s: float | None = None

    def promises(self, normal_s: float) -> Promises:
        """Return the targets on a server whose normal gap is `normal_s` seconds."""
        factor = self.tpot_factor
        return Promises(
            short_tpot_s=None if factor is None else factor * normal_s,
            long_ttft_s=self.long_ttft_s,
        )


async def measure(
    client: StreamClient, scenario: SpikeScenario, prompts: PromptSource, rule: PromiseRule
) -> SpikeRun:
    """Calibrate and run one spike; SpikeError if not even the calm phase streams tokens."""
    calibrated_s = await calibrate(client, scenario, prompts)
    promises = rule.promises(calibrated_s)
    shorts, long = await run_spike(
        client,
        scenario,
        scenario.short_requests(prompts, promises),
        scenario.long_request(prompts, promises),
    )
    return SpikeRun(scenario, promises, calibrated_s, shorts, long)


async def calibrate(client: StreamClient, scenario: SpikeScenario, prompts: PromptSource) -> float:
    """Return the median gap, in seconds, of the short requests with nothing else going on.

    Every policy gets this phase, so that every server is equally warm when the spike comes.
    """
    requests = scenario.calibration_requests(prompts)
    calm = await asyncio.gather(*(client.stream(request) for request in requests))
    for series in calm:
        if series.error is not None:
            raise SpikeError(f"{series.name} failed: {series.error}")
    lasts = [series.last_token_at for series in calm if series.last_token_at is not None]
    normal_s = normal_gap_s(calm, until=max(lasts)) if lasts else None
    if not normal_s:
        raise SpikeError("the server streamed too few tokens to tell the normal gap")
    return normal_s


async def run_spike(
    client: StreamClient,
    scenario: SpikeScenario,
    shorts: Sequence[ScenarioRequest],
    long: ScenarioRequest,
) -> tuple[tuple[RequestSeries, ...], RequestSeries | None]:
    """Start all short requests at once, send the long one when each has `warm_tokens` tokens.

    Returns the series of the short requests in order, and that of the long one; None instead if a
    short request ended before all were that far.
    """
    num_received = [0] * len(shorts)
    decided = asyncio.Event()

    def is_warm() -> bool:
        return min(num_received) >= scenario.warm_tokens

    async def stream_short(index: int) -> RequestSeries:
        def on_read(read: TokenRead) -> None:
            num_received[index] += read.num_tokens
            if is_warm():
                decided.set()

        series = await client.stream(shorts[index], on_read)
        decided.set()
        return series

    async with asyncio.TaskGroup() as group:
        short_tasks = [group.create_task(stream_short(index)) for index in range(len(shorts))]
        await decided.wait()
        long_task = group.create_task(client.stream(long)) if is_warm() else None
    return (
        tuple(task.result() for task in short_tasks),
        None if long_task is None else long_task.result(),
    )
