"""A completions server on virtual time, as an httpx transport: the other end of the load client.

Owns the way from HTTP to the production loop and back, and the faults that a benchmark must notice.
The loop and the planner are the production ones; only the runner and the clock are pretended.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from controller.policy.baselines import StaticPlanner
from controller.policy.lengths import OutputLengths
from controller.policy.planner import SloPlanner
from controller.policy.promise import Promise
from controller.policy.settings import PolicyConfig
from controller.policy.slo import Slo, SloClass
from controller.runtime.feedback import PromiseKeeper, Teacher
from controller.runtime.warmup import run_sweep
from costmodel.prior import fit_prior, sweep_plan
from engine.blocks import BlockPool
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.ports import Planner, StepListener
from engine.request import FinishReason, Request
from engine.simulated import SimulatedRunner
from engine.step import StepPlan, StepReport

STEP_S = 0.1
PREFILL_TOKEN_S = 0.003
CONFIG = EngineConfig(num_blocks=1024, max_num_batched_tokens=8192)
SETTLE_TURNS = 60
IDLE_S = 0.05


def sse(data: dict[str, Any] | str) -> bytes:
    """Return one event as it stands on the wire."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n".encode()


def token_event(num_prompt: int, num_output: int, finish: str | None = None) -> dict[str, Any]:
    """Return the chunk that brings output token number `num_output`."""
    return {
        "choices": [{"index": 0, "text": "x", "finish_reason": finish}],
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_output},
    }


async def settle() -> None:
    """Let every task run until it waits for the server again; no time passes."""
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)


@dataclass(eq=False)
class ServedRequest:
    """One request as it came over HTTP, and the bytes that answer it."""

    body: dict[str, Any]
    headers: httpx.Headers
    engine: Request
    queue: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)

    @property
    def num_output(self) -> int:
        return self.engine.num_output_tokens


class _Body(httpx.AsyncByteStream):
    def __init__(self, queue: asyncio.Queue[bytes | None]) -> None:
        self._queue = queue

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (chunk := await self._queue.get()) is not None:
            yield chunk


@dataclass
class VirtualServer(httpx.AsyncBaseTransport):
    """Serves `/v1/completions`; a step costs `STEP_S` plus `prefill_token_s` per prompt token.

    `token_budget` is the fixed budget, None computes whole prompts; `is_slo` runs the SLO planner.
    Faults: `cached_tokens` are reported as cached, `lost_prompt_tokens` are missing from the
    reported prompt, `stop_after` ends requests early, `decision` is sent as x-slo-decision.
    """

    clock: VirtualClock
    token_budget: int | None = None
    is_slo: bool = False
    prefill_token_s: float = PREFILL_TOKEN_S
    cached_tokens: int = 0
    lost_prompt_tokens: int = 0
    stop_after: int | None = None
    decision: str | None = None
    on_arrival: Callable[[ServedRequest], None] | None = None
    served: list[ServedRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        runner = SimulatedRunner(self.clock, self._latency_of)
        planner: Planner = StaticPlanner(self.token_budget)
        listeners: tuple[StepListener, ...] = (PromiseKeeper(), self)
        if self.is_slo:
            shapes = sweep_plan(2048, CONFIG.max_num_seqs, CONFIG.max_model_len)
            model = fit_prior(run_sweep(runner, CONFIG, self.clock, shapes))
            lengths = OutputLengths()
            planner = SloPlanner(PolicyConfig(), model, lengths)
            listeners = (*listeners, Teacher(model, lengths))
        pool = BlockPool(CONFIG.num_blocks, CONFIG.block_size)
        self._loop = EngineLoop(planner, runner, pool, CONFIG, self.clock, listeners)
        self._by_id: dict[str, ServedRequest] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def active(self) -> list[ServedRequest]:
        """Requests that have not ended."""
        return [served for served in self.served if not served.engine.is_finished]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        served = ServedRequest(body, request.headers, self._engine_request(body, request.headers))
        if self.on_arrival is not None:
            self.on_arrival(served)
        self.served.append(served)
        self._by_id[served.engine.request_id] = served
        self._loop.submit(served.engine)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        headers = {} if self.decision is None else {"x-slo-decision": self.decision}
        return httpx.Response(200, headers=headers, stream=_Body(served.queue))

    def _engine_request(self, body: dict[str, Any], headers: httpx.Headers) -> Request:
        def seconds(name: str) -> float | None:
            return float(headers[name]) / 1000 if name in headers else None

        now = self.clock.now()
        slo = Slo(seconds("x-slo-ttft-ms"), seconds("x-slo-tpot-ms"))
        return Request(
            request_id=f"r{len(self.served)}",
            prompt_token_ids=tuple(body["prompt"]),
            max_tokens=body["max_tokens"],
            arrived_at=now,
            promise=Promise(slo, SloClass("default"), now),
        )

    def _latency_of(self, plan: StepPlan) -> float:
        # Time passes BEFORE the bytes exist: whoever stamps earlier than receipt is a step off.
        return STEP_S + self.prefill_token_s * plan.num_prefill_tokens

    async def _run(self) -> None:
        await settle()
        while self._loop.has_work:
            if self._loop.step() is None:
                self.clock.advance(IDLE_S)
            await settle()

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Send the step's tokens, and the end of what has ended."""
        for token in report.tokens:
            served = self._by_id[token.request_id]
            is_stopped = token.index + 1 == self.stop_after
            if is_stopped:
                self._loop.finish(token.request_id, FinishReason.STOP)
            is_last = is_stopped or token.index + 1 == served.engine.max_tokens
            finish = ("stop" if is_stopped else "length") if is_last else None
            served.queue.put_nowait(sse(self._event(served, token.index + 1, finish)))
            if is_last:
                end = {**self._event(served, token.index + 1, None), "choices": []}
                for chunk in (sse(end), sse("[DONE]"), None):
                    served.queue.put_nowait(chunk)

    def _event(self, served: ServedRequest, num_output: int, finish: str | None) -> dict[str, Any]:
        num_prompt = served.engine.num_prompt_tokens - self.lost_prompt_tokens
        event = token_event(num_prompt, num_output, finish)
        event["usage"]["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return event
