"""Open-loop HTTP load: sends a request and stamps what comes back.

Owns the only place where benchmark time is taken: right after bytes left the socket. Must not wait
for one answer before the next request is sent, nor judge what it saw. Never raises for what a
server did: a refusal or a broken stream is a series with an `error`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from controller.bench.scenario import ScenarioRequest
from controller.bench.series import RequestSeries, TokenRead
from controller.bench.sse import SseParser
from engine.clock import Clock

ReadListener = Callable[[TokenRead], None]
"""Hears of every read that held tokens, while the stream is running."""

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 300.0


def open_http(base_url: str, api_key: str | None = None) -> httpx.AsyncClient:
    """Return a client for one server: no proxies, no cap on connections, patient with silence."""
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=httpx.Timeout(CONNECT_TIMEOUT_S, read=SILENCE_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


@dataclass(slots=True)
class _Tally:
    """What has been counted of one stream so far."""

    num_output_tokens: int = 0
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    server_output_tokens: int | None = None
    error: str | None = None
    is_done: bool = False
    reads: list[TokenRead] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def take(self, data: str) -> int:
        """Account for one event and return how many tokens it brought."""
        if data == "[DONE]":
            self.is_done = True
            return 0
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self.error = f"the stream holds an event that is no JSON object: {data[:80]!r}"
            return 0
        if "error" in event:
            self.error = _error_line(event)
            return 0
        choices = event.get("choices") or []
        for choice in choices:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.texts.append(choice.get("text") or "")
        usage = event.get("usage")
        if isinstance(usage, dict):
            return self._take_usage(usage)
        # Without running usage, a chunk is a token; a last one that only says why it ended is none.
        num_tokens = sum(
            bool(choice.get("text")) or not choice.get("finish_reason") for choice in choices
        )
        self.num_output_tokens += num_tokens
        return num_tokens

    def _take_usage(self, usage: dict[str, Any]) -> int:
        """Take the server's counts; the tokens of this event are what they grew by."""
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = details.get("cached_tokens", self.cached_tokens)
        self.server_output_tokens = int(usage.get("completion_tokens") or 0)
        num_tokens = max(0, self.server_output_tokens - self.num_output_tokens)
        self.num_output_tokens += num_tokens
        return num_tokens


class StreamClient(Protocol):
    """What a scenario is run against: anything that streams one completion."""

    async def stream(
        self, request: ScenarioRequest, on_read: ReadListener | None = None
    ) -> RequestSeries:
        """Send `request` now and return its series when the stream has ended.

        Never raises for what the other end did: that is a series with an `error`.
        """
        ...


class LoadClient:
    """Streams completions from one server; one instance serves any number of requests at once."""

    def __init__(self, http: httpx.AsyncClient, clock: Clock, model: str) -> None:
        self._http = http
        self._clock = clock
        self._model = model

    async def stream(
        self, request: ScenarioRequest, on_read: ReadListener | None = None
    ) -> RequestSeries:
        """Send `request` now and return its series when the stream has ended."""
        sent_at = self._clock.now()
        tally = _Tally()
        answer: httpx.Response | None = None
        try:
            async with self._http.stream(
                "POST",
                "/v1/completions",
                json=request.payload(self._model),
                headers={**request.headers(), "x-request-id": request.name},
            ) as response:
                answer = response
                if response.status_code == httpx.codes.OK:
                    await self._read_tokens(response, tally, on_read)
                else:
                    tally.error = _refusal_line(response.status_code, await response.aread())
        except httpx.HTTPError as exc:
            tally.error = f"{type(exc).__name__}: {exc}"
        headers = httpx.Headers() if answer is None else answer.headers
        return RequestSeries(
            name=request.name,
            sent_at=sent_at,
            reads=tuple(tally.reads),
            finish_reason=tally.finish_reason,
            server_prompt_tokens=tally.prompt_tokens,
            server_cached_tokens=tally.cached_tokens,
            server_output_tokens=tally.server_output_tokens,
            decision=headers.get("x-slo-decision"),
            error=tally.error,
            text="".join(tally.texts),
            status=None if answer is None else answer.status_code,
            dropped_reason=headers.get("x-llm-d-request-dropped-reason"),
            retry_after_s=_retry_after_s(headers),
        )

    async def _read_tokens(
        self, response: httpx.Response, tally: _Tally, on_read: ReadListener | None
    ) -> None:
        """Read to the end of the stream; one timestamp per read, taken before any parsing."""
        parser = SseParser()
        async for chunk in response.aiter_raw():
            at = self._clock.now()
            num_tokens = sum(tally.take(data) for data in parser.feed(chunk))
            if num_tokens > 0:
                read = TokenRead(at, num_tokens)
                tally.reads.append(read)
                if on_read is not None:
                    on_read(read)
        if tally.error is None and not tally.is_done:
            tally.error = "the stream ended without [DONE]"


def _retry_after_s(headers: httpx.Headers) -> float | None:
    """Return when to come back, in seconds; None where nothing is said, or not as a number."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return float(headers[name]) * scale
        except (KeyError, ValueError):
            continue
    return None


def _error_line(body: object) -> str:
    """Return code and message of an OpenAI error object, in one line."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return str(body)[:200]
    return f"{error.get('code') or error.get('type')}: {error.get('message')}"


def _refusal_line(status: int, body: bytes) -> str:
    """Return one line that says how the server refused."""
    try:
        return f"HTTP {status} {_error_line(json.loads(body))}"
    except ValueError:
        return f"HTTP {status} {body[:200].decode('utf-8', 'replace')}"
