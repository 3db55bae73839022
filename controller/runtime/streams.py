"""Streams: tokens cross from the loop's thread to the asyncio loops of their readers.

Owns one bounded series of events per request (at most `max_tokens` plus three), and puts the scores
of a prompt that is computed in chunks together. A step wakes each reader's event loop once, however
many of its streams got a token. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace

from controller.runtime.feedback import promise_of
from controller.runtime.generation import (
    AdmissionEvent,
    FinishedEvent,
    GenerationEvent,
    PromptEvent,
    TokenEvent,
)
from engine.request import FinishReason, Request
from engine.step import AdmissionAction, PromptScores, PromptToken, StepReport

_REGULAR_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class Stream:
    """The events of one request, read from the asyncio loop that submitted it."""

    def __init__(
        self,
        request_id: str,
        event_loop: asyncio.AbstractEventLoop,
        finish: Callable[[str, FinishReason], None],
    ) -> None:
        self.event_loop = event_loop
        self._request_id = request_id
        self._finish = finish
        self._events: deque[GenerationEvent] = deque()
        self._is_ready = asyncio.Event()

    @property
    def request_id(self) -> str:
        """The server's id of the request."""
        return self._request_id

    def finish(self, reason: FinishReason) -> None:
        """Ask the engine to end the request; idempotent, late calls are ignored."""
        self._finish(self._request_id, reason)

    def deliver(self, events: Iterable[GenerationEvent]) -> None:
        """Append events and wake the reader; on the reader's event loop only."""
        self._events.extend(events)
        self._is_ready.set()

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        """Yield events in order, ending with the one `FinishedEvent`."""
        while True:
            while self._events:
                event = self._events.popleft()
                yield event
                if isinstance(event, FinishedEvent):
                    return
            self._is_ready.clear()
            await self._is_ready.wait()


class StreamHub:
    """Routes a step's tokens and endings to their streams; a `StepListener`."""

    def __init__(self) -> None:
        self._streams: dict[str, tuple[Stream, Request]] = {}
        self._lock = threading.Lock()
        # Of prompts that are being computed; the loop's thread alone.
        self._scores: dict[str, list[PromptToken]] = {}

    def register(self, stream: Stream, request: Request) -> None:
        """Add a stream before its request is handed to the loop."""
        with self._lock:
            self._streams[stream.request_id] = (stream, request)

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Deliver admissions, prompts, tokens and endings of one step."""
        events: dict[str, list[GenerationEvent]] = {}
        for admission in report.plan.admissions:
            if admission.action is not AdmissionAction.REJECT:
                events.setdefault(admission.request_id, []).append(AdmissionEvent(admission))
        for scores in report.prompt_scores:
            self._take_scores(scores)
        for token in report.tokens:
            batch = events.setdefault(token.request_id, [])
            if token.index == 0:
                batch.append(self._prompt_event(requests[token.request_id]))
            batch.append(
                TokenEvent(token.token_id, token.index, token.at, token.logprob, token.top_logprobs)
            )
        for request_id in report.finished:
            request = requests[request_id]
            batch = events.setdefault(request_id, [])
            # Nothing was asked for but the prompt: there is no token to come after it.
            if request.num_output_tokens == 0 and request.finish_reason in _REGULAR_ENDS:
                batch.append(self._prompt_event(request))
            batch.append(finished_event(request))
            self._scores.pop(request_id, None)
        self._deliver(events, ended=report.finished)

    def _take_scores(self, scores: PromptScores) -> None:
        """Append a chunk's scores; what a repeated chunk scores again is not taken twice."""
        taken = self._scores.setdefault(scores.request_id, [])
        # The token at position 0 has no score.
        taken.extend(scores.tokens[max(0, len(taken) + 1 - scores.start) :])

    def _prompt_event(self, request: Request) -> PromptEvent:
        scores = self._scores.pop(request.request_id, [])
        return PromptEvent(request.num_cached_tokens, tuple(scores))

    def end_all(self, requests: Iterable[Request]) -> None:
        """Deliver the ending of requests that no step will report (after a fatal error)."""
        events: dict[str, list[GenerationEvent]] = {
            request.request_id: [finished_event(request)] for request in requests
        }
        self._deliver(events, ended=tuple(events))

    def end_rest(self, failure: str) -> None:
        """Deliver an ERROR to every stream that is left: the loop is gone, and nobody knows its
        request any more.
        """
        with self._lock:
            left = [request for _, request in self._streams.values()]
        events: dict[str, list[GenerationEvent]] = {
            request.request_id: [
                replace(finished_event(request), reason=FinishReason.ERROR, failure=failure)
            ]
            for request in left
        }
        self._deliver(events, ended=tuple(events))

    def _deliver(self, events: Mapping[str, list[GenerationEvent]], ended: Iterable[str]) -> None:
        with self._lock:
            targets = [
                (self._streams[request_id][0], batch)
                for request_id, batch in events.items()
                if request_id in self._streams
            ]
            for request_id in ended:
                self._streams.pop(request_id, None)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, list[GenerationEvent]]]] = {}
        for stream, batch in targets:
            by_loop.setdefault(stream.event_loop, []).append((stream, batch))
        for event_loop, deliveries in by_loop.items():
            try:
                event_loop.call_soon_threadsafe(_deliver_all, deliveries)
            except RuntimeError:
                # The reader's event loop is closed: nobody is left to read, so stop computing.
                for stream, _ in deliveries:
                    stream.finish(FinishReason.CANCELLED)


def _deliver_all(deliveries: list[tuple[Stream, list[GenerationEvent]]]) -> None:
    for stream, events in deliveries:
        stream.deliver(events)


def finished_event(request: Request) -> FinishedEvent:
    """Return the last event of an ended request; its `promise` must be a `Promise`."""
    promise = promise_of(request)
    judged = promise.judge()
    started_at = request.first_scheduled_at
    return FinishedEvent(
        reason=request.finish_reason or FinishReason.ERROR,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        promise=promise,
        admission=request.admission,
        failure=request.failure,
        queue_s=None if started_at is None else max(0.0, started_at - request.arrived_at),
        ttft_s=judged.ttft_s,
        tpot_s=judged.tpot_s,
        is_ttft_met=judged.is_ttft_met,
        is_tpot_met=judged.is_tpot_met,
        is_e2e_met=judged.is_e2e_met,
        num_cached_tokens=request.num_cached_tokens,
    )
