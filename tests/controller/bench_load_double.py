"""Servers under an open loop on virtual time: arrivals and steps on one timeline, refusals as HTTP.

Owns the timeline and the other end of the load client. Loop, planners, feedback and refusals are
the production ones; only the runner and the clock are pretended.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from controller.api.errors import refusal
from controller.bench.client import LoadClient, StreamClient
from controller.config import Settings
from controller.policy.lengths import OutputLengths
from controller.policy.policies import make_planner
from controller.policy.promise import Promise
from controller.policy.slo import Slo, SloClass
from controller.runtime.feedback import Offer, PromiseKeeper, Teacher, TelemetryFeed
from controller.runtime.warmup import run_sweep
from costmodel.prior import fit_prior, sweep_plan
from engine.blocks import BlockPool
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.ports import StepListener
from engine.request import FinishReason, Request
from engine.simulated import SimulatedRunner
from engine.step import AdmissionAction, StepPlan, StepReport
from store.records import RunRecord
from store.schema import migrate
from store.writer import TelemetryWriter
from tests.controller.bench_double import settle, sse, token_event

STEP_S = 0.1
DECODE_S = 0.005
PREFILL_TOKEN_S = 0.002
NUM_BLOCKS = 4096
Result = TypeVar("Result")


class Timeline:
    """Virtual time: it moves on to the next sleeper when nobody has anything left to do."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._num_busy = 0

    async def sleep(self, seconds: float) -> None:
        """Return when that much virtual time has passed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        at = self.clock.now() + seconds
        heapq.heappush(self._sleepers, (at, next(self._numbers), future))
        await future

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Time stands still meanwhile."""
        self._num_busy += 1
        try:
            yield
        finally:
            self._num_busy -= 1

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """Run `main` to its end on this timeline."""

        async def drive() -> Result:
            task = asyncio.create_task(main)
            while True:
                await settle()
                while self._num_busy:
                    await settle()
                if task.done():
                    return task.result()
                at, _, future = heapq.heappop(self._sleepers)
                if not future.done():
                    self.clock.advance(max(0.0, at - self.clock.now()))
                    future.set_result(None)

        return asyncio.run(drive())


@dataclass(eq=False)
class _Served:
    engine: Request
    started: asyncio.Future[httpx.Response]
    queue: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)


class _Body(httpx.AsyncByteStream):
    def __init__(self, served: _Served, hang_up: Callable[[str], None]) -> None:
        self._served = served
        self._hang_up = hang_up

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (chunk := await self._served.queue.get()) is not None:
            yield chunk

    async def aclose(self) -> None:
        self._hang_up(self._served.engine.request_id)


class OpenServer(httpx.AsyncBaseTransport):
    """Serves `/v1/completions` under a policy of `POLICY_NAMES` on a timeline.

    A step costs `speed` · (`STEP_S` + `DECODE_S` per decode + `PREFILL_TOKEN_S` per prompt token).
    `offer` takes telemetry. `num_lost` tokens are missing from the prompt that is reported.
    """

    def __init__(
        self,
        timeline: Timeline,
        policy: str,
        *,
        speed: float = 1.0,
        offer: Offer | None = None,
        num_lost: int = 0,
        fail_from: int | None = None,
    ) -> None:
        self.headers: list[httpx.Headers] = []
        self._timeline = timeline
        self._speed = speed
        self._num_lost = num_lost
        self._fail_from = fail_from
        # The loop's clock runs ahead to the end of a step; its bytes leave when time gets there.
        self._clock = VirtualClock()
        runner = SimulatedRunner(self._clock, self._latency_of)
        config = EngineConfig(num_blocks=NUM_BLOCKS, max_num_batched_tokens=8192)
        shapes = sweep_plan(512, config.max_num_seqs, 2048)
        sweep_clock = VirtualClock()
        sweep_runner = SimulatedRunner(sweep_clock, self._latency_of)
        model = fit_prior(run_sweep(sweep_runner, config, sweep_clock, shapes))
        lengths = OutputLengths()
        listeners: list[StepListener] = [PromiseKeeper(), Teacher(model, lengths), self]
        if offer is not None:
            listeners.append(TelemetryFeed(offer, self._clock, "run", model))
        self._loop = EngineLoop(
            make_planner(policy, model, lengths),
            runner,
            BlockPool(config.num_blocks, config.block_size),
            config,
            self._clock,
            tuple(listeners),
        )
        self._served: dict[str, _Served] = {}
        self._outbox: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        self.headers.append(request.headers)
        if self._fail_from is not None and len(self.headers) > self._fail_from:
            return httpx.Response(500, json={"error": {"code": "internal_error", "message": "x"}})
        served = _Served(
            self._engine_request(body, request.headers), asyncio.get_running_loop().create_future()
        )
        self._served[served.engine.request_id] = served
        self._loop.submit(served.engine)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await served.started

    def _engine_request(self, body: dict[str, Any], headers: httpx.Headers) -> Request:
        def seconds(name: str) -> float | None:
            return float(headers[name]) / 1000 if name in headers else None

        now = self._timeline.clock.now()
        slo = Slo(seconds("x-slo-ttft-ms"), seconds("x-slo-tpot-ms"))
        slo_class = SloClass(headers.get("x-llm-d-inference-objective", "default"))
        return Request(
            request_id=f"r{len(self.headers)}",
            prompt_token_ids=tuple(body["prompt"]),
            max_tokens=body["max_tokens"],
            arrived_at=now,
            promise=Promise(slo, slo_class, now),
        )

    def _latency_of(self, plan: StepPlan) -> float:
        work_s: float = (
            PREFILL_TOKEN_S * plan.num_prefill_tokens + DECODE_S * plan.num_decode_tokens
        )
        return self._speed * (STEP_S + work_s)

    async def _run(self) -> None:
        await self._settle()
        while self._loop.has_work:
            self._clock.advance(max(0.0, self._timeline.clock.now() - self._clock.now()))
            if self._loop.step() is None:
                self._clock.advance(STEP_S / 2)
            await self._timeline.sleep(self._clock.now() - self._timeline.clock.now())
            with self._timeline.busy():
                outbox, self._outbox = self._outbox, []
                for send in outbox:
                    send()
            await self._settle()

    async def _settle(self) -> None:
        """Let clients read, and send what they send because of it, before the next step."""
        with self._timeline.busy():
            await settle()

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Put the step's refusals and tokens into the outbox."""
        for admission in report.plan.admissions:
            if admission.action is AdmissionAction.REJECT:
                refused = refusal(admission)
                answer = httpx.Response(
                    refused.status_code, headers=dict(refused.headers or {}), json=refused.body()
                )
                self._outbox.append(self._starter(admission.request_id, answer))
        for token in report.tokens:
            served = self._served[token.request_id]
            is_last = token.index + 1 == served.engine.max_tokens
            event = token_event(
                served.engine.num_prompt_tokens - self._num_lost,
                token.index + 1,
                "length" if is_last else None,
            )
            if token.index == 0:
                body = _Body(served, self._hang_up)
                answer = httpx.Response(200, stream=body)
                self._outbox.append(self._starter(token.request_id, answer))
            chunks = (sse(event), sse("[DONE]"), None) if is_last else (sse(event),)
            self._outbox += [partial(served.queue.put_nowait, chunk) for chunk in chunks]

    def _starter(self, request_id: str, answer: httpx.Response) -> Callable[[], None]:
        started = self._served[request_id].started
        return lambda: None if started.done() else started.set_result(answer)

    def _hang_up(self, request_id: str) -> None:
        if not self._served[request_id].engine.is_finished:
            self._loop.finish(request_id, FinishReason.CANCELLED)


@contextlib.asynccontextmanager
async def open_client(timeline: Timeline, server: OpenServer) -> AsyncIterator[StreamClient]:
    """Yield the load client of a server."""
    async with httpx.AsyncClient(transport=server, base_url="http://test") as http:
        yield LoadClient(http, timeline.clock, "demo")


@contextlib.contextmanager
def telemetry(path: Path, settings: Settings, clock: VirtualClock) -> Iterator[Offer]:
    """Yield what takes records into a new database, which is complete afterwards."""
    url = f"sqlite:///{path}"
    migrate(url)
    run = RunRecord("run", clock.epoch_ms(), "demo", "cpu", "reference", settings.policy, "0",
                    settings=settings.to_json())  # fmt: skip
    writer = TelemetryWriter.open(url, run, clock)
    writer.start()
    try:
        yield writer.offer
    finally:
        writer.close()
