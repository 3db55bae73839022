"""The open loop against one server: arrivals at their instants, whatever becomes of the answers.

Owns the order of events and the record of a run. Must not judge, start servers, or let one answer
delay the next arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from controller.bench.client import StreamClient
from controller.bench.closed import ClosedScenario, run_closed
from controller.bench.scenario import PromptSource, ScenarioRequest, SpikeScenario
from controller.bench.series import RequestSeries, TokenRead
from controller.bench.spike import calibrate
from controller.workload.arrivals import Workload
from engine.clock import Clock

CALM = SpikeScenario(num_short=4, calibration_tokens=24)
"""The calm phase that measures the normal step: four short requests alone."""

Sleep = Callable[[float], Awaitable[None]]
DoneListener = Callable[[], None]
"""Hears that one more request has ended."""


class LoadError(RuntimeError):
    """The load cannot be measured; the message is a line for the person who started it."""


@dataclass(frozen=True, slots=True)
class OfferedRequest:
    """One arrival and what the client saw of it.

    `due_at` is the instant at which it was to arrive, on the client's clock; everything is counted
    from there. `is_cut` says that it had not ended when the run was over: what came until then is
    in `series`.
    """

    index: int
    slo_class: str
    due_at: float
    num_prompt_tokens: int
    num_wanted_tokens: int
    series: RequestSeries
    is_cut: bool

    @property
    def late_s(self) -> float:
        """Seconds by which the client itself was late; no server can make up for them."""
        return self.series.sent_at - self.due_at


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One workload against one server. `started_ms` and `ended_ms` are epoch milliseconds, for
    finding the server's own records of it.
    """

    started_ms: int
    ended_ms: int
    requests: tuple[OfferedRequest, ...]


async def run_load(
    client: StreamClient,
    workload: Workload,
    requests: Sequence[ScenarioRequest],
    clock: Clock,
    *,
    drain_s: float,
    sleep: Sleep = asyncio.sleep,
    on_done: DoneListener = lambda: None,
) -> LoadRun:
    """Send each of `requests` at its arrival's instant and return what became of all of them.

    `drain_s` seconds after the last arrival, streams that still run are cut off.
    """
    started_at, started_ms = clock.now(), clock.epoch_ms()
    offers = [
        _Offer(client, request, started_at + arrival.at_s, clock)
        for arrival, request in zip(workload.arrivals, requests, strict=True)
    ]
    tasks: list[asyncio.Task[RequestSeries]] = []
    try:
        for offer in offers:
            wait_s = offer.due_at - clock.now()
            if wait_s > 0:
                await sleep(wait_s)
            task = asyncio.create_task(offer.send())
            task.add_done_callback(lambda _: on_done())
            tasks.append(task)
        await _drain(tasks, drain_s, sleep)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    # What a task raised beside its cancellation is a bug of this program, never a result.
    for outcome in ended:
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
    return LoadRun(
        started_ms,
        clock.epoch_ms(),
        tuple(
            OfferedRequest(
                index=index,
                slo_class=arrival.slo_class or "default",
                due_at=offer.due_at,
                num_prompt_tokens=arrival.num_prompt_tokens,
                num_wanted_tokens=arrival.num_output_tokens,
                series=offer.cut() if isinstance(outcome, BaseException) else outcome,
                is_cut=isinstance(outcome, BaseException),
            )
            for index, (arrival, offer, outcome) in enumerate(
                zip(workload.arrivals, offers, ended, strict=True)
            )
        ),
    )


async def measure_normal_step(client: StreamClient, prompts: PromptSource) -> float:
    """Return the normal step, in seconds: the median gap of a calm phase (see `spike.calibrate`).

    SpikeError if the server cannot be measured.
    """
    return await calibrate(client, CALM, prompts)


async def measure_knee(
    client: StreamClient, requests: Sequence[ScenarioRequest], concurrency: int
) -> float:
    """Return how many of `requests` per second a server makes with `concurrency` of them at once.

    In a closed loop a request is sent when one has ended, so from the first to the last one sent
    all but the last `concurrency` have ended. LoadError if a request failed, or there are too few.
    """
    if len(requests) <= concurrency:
        raise LoadError(f"{len(requests)} requests are too few to keep {concurrency} at once")
    scenario = ClosedScenario(concurrency=concurrency, num_requests=len(requests))
    run = await run_closed(client, scenario, requests)
    for series in run.series:
        if series.error is not None:
            raise LoadError(f"{series.name} failed while the knee was measured: {series.error}")
    sent = [series.sent_at for series in run.series]
    span_s = max(sent) - min(sent)
    if span_s <= 0:
        raise LoadError("all requests were sent at once: the knee cannot be told")
    return (len(requests) - concurrency) / span_s


class _Offer:
    """One request on its way: keeps what has come, so that cutting it off loses nothing."""

    def __init__(
        self, client: StreamClient, request: ScenarioRequest, due_at: float, clock: Clock
    ) -> None:
        self.due_at = due_at
        self._client = client
        self._request = request
        self._clock = clock
        self._sent_at = due_at
        self._reads: list[TokenRead] = []

    async def send(self) -> RequestSeries:
        """Send now and read to the end."""
        self._sent_at = self._clock.now()
        return await self._client.stream(self._request, self._reads.append)

    def cut(self) -> RequestSeries:
        """Return what had come when it was cut off."""
        return RequestSeries(self._request.name, self._sent_at, tuple(self._reads))


async def _drain(
    tasks: Sequence[asyncio.Task[RequestSeries]], drain_s: float, sleep: Sleep
) -> None:
    """Wait until all have ended, at most `drain_s` seconds."""
    everybody = asyncio.ensure_future(asyncio.wait(tasks))
    patience = asyncio.ensure_future(sleep(drain_s))
    try:
        await asyncio.wait((everybody, patience), return_when=asyncio.FIRST_COMPLETED)
    finally:
        everybody.cancel()
        patience.cancel()
        await asyncio.gather(everybody, patience, return_exceptions=True)
