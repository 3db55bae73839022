"""A completions server on virtual time, as an httpx transport: the other end of the load client.

Owns a chunked-prefill loop whose step costs are given, and the faults that a benchmark must notice.
Must not know how the client measures.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine.clock import VirtualClock

STEP_S = 0.1
PREFILL_TOKEN_S = 0.003
SETTLE_TURNS = 60


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
    """One request as the server sees it."""

    body: dict[str, Any]
    headers: httpx.Headers
    arrived_at: float
    num_computed: int = 0
    num_output: int = 0
    queue: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)

    @property
    def num_prompt(self) -> int:
        return len(self.body["prompt"])


class _Body(httpx.AsyncByteStream):
    def __init__(self, queue: asyncio.Queue[bytes | None]) -> None:
        self._queue = queue

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (chunk := await self._queue.get()) is not None:
            yield chunk


@dataclass
class VirtualServer(httpx.AsyncBaseTransport):
    """Serves `/v1/completions`; a step costs `STEP_S` plus `PREFILL_TOKEN_S` per prompt token.

    `token_budget` bounds a step, decodes first; None prefills whole prompts. Faults:
    `cached_tokens` are reported as cached, `lost_prompt_tokens` are missing from the reported
    prompt, `stop_after` ends requests early, `decision` is sent as x-slo-decision.
    """

    clock: VirtualClock
    token_budget: int | None = None
    cached_tokens: int = 0
    lost_prompt_tokens: int = 0
    stop_after: int | None = None
    decision: str | None = None
    on_arrival: Callable[[ServedRequest], None] | None = None
    served: list[ServedRequest] = field(default_factory=list)
    active: list[ServedRequest] = field(default_factory=list)
    loop_task: asyncio.Task[None] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        served = ServedRequest(body, request.headers, self.clock.now())
        if self.on_arrival is not None:
            self.on_arrival(served)
        self.served.append(served)
        self.active.append(served)
        if self.loop_task is None or self.loop_task.done():
            self.loop_task = asyncio.create_task(self._loop())
        headers = {} if self.decision is None else {"x-slo-decision": self.decision}
        return httpx.Response(200, headers=headers, stream=_Body(served.queue))

    async def _loop(self) -> None:
        await settle()
        while self.active:
            self._step()
            await settle()

    def _step(self) -> None:
        decodes = [r for r in self.active if r.num_output > 0]
        budget = 10**9 if self.token_budget is None else self.token_budget - len(decodes)
        chunks: list[tuple[ServedRequest, int]] = []
        for request in self.active:
            if request.num_output == 0 and budget > 0:
                chunk = min(budget, request.num_prompt - request.num_computed)
                budget -= chunk
                chunks.append((request, chunk))
        # Time passes BEFORE the bytes exist: whoever stamps earlier than receipt is a step off.
        self.clock.advance(STEP_S + PREFILL_TOKEN_S * sum(chunk for _, chunk in chunks))
        for request in decodes:
            self._emit(request)
        for request, chunk in chunks:
            request.num_computed += chunk
            if request.num_computed == request.num_prompt:
                self._emit(request)

    def _emit(self, request: ServedRequest) -> None:
        request.num_output += 1
        is_stopped = request.num_output == self.stop_after
        is_last = is_stopped or request.num_output == request.body["max_tokens"]
        finish = ("stop" if is_stopped else "length") if is_last else None
        event = token_event(request.num_prompt, request.num_output, finish)
        event["usage"]["prompt_tokens"] -= self.lost_prompt_tokens
        event["usage"]["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        request.queue.put_nowait(sse(event))
        if is_last:
            request.queue.put_nowait(sse({"choices": [], "usage": event["usage"]}))
            request.queue.put_nowait(sse("[DONE]"))
            request.queue.put_nowait(None)
            self.active.remove(request)
