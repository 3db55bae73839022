"""The stream hub: a prompt's scores put together, delivered once; endings when the loop is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controller.policy.promise import Promise
from controller.policy.slo import Slo, SloClass
from controller.runtime.generation import FinishedEvent, PromptEvent, TokenEvent
from controller.runtime.streams import Stream, StreamHub
from engine.request import FinishReason, Request, RequestPhase
from engine.step import EmittedToken, PromptScores, PromptToken, StepPlan, StepReport


class Reader:
    """A stream whose events arrive at once, in this thread."""

    def __init__(self, hub: StreamHub, name: str = "r", **changes: Any) -> None:
        promise = Promise(Slo(), SloClass("default"), 0.0)
        self.request = Request(name, tuple(range(10)), 5, 0.0, promise=promise, **changes)
        self.events: list[Any] = []
        self.stream = Stream(name, self, lambda *_: None)  # type: ignore[arg-type]
        self.stream.deliver = self.events.extend  # type: ignore[method-assign,assignment]
        hub.register(self.stream, self.request)

    def call_soon_threadsafe(self, function: Any, deliveries: Any) -> None:
        function(deliveries)

    def end(self, reason: FinishReason, num_output: int = 0) -> None:
        self.request.move(RequestPhase.FINISHED)
        self.request.finish_reason = reason
        self.request.output_token_ids = [7] * num_output


def scores(*positions: int, name: str = "r") -> PromptScores:
    tokens = tuple(PromptToken(i, -float(i), 1) for i in positions)
    return PromptScores(name, positions[0], tokens)


def step(hub: StreamHub, reader: Reader, **changes: Any) -> None:
    report = StepReport(1, 0.0, 0.0, 0.0, 0.0, StepPlan(), True, 1, 0, 0, 0, 9, **changes)
    hub.on_step(report, {reader.request.request_id: reader.request})


def token(index: int) -> EmittedToken:
    return EmittedToken("r", 40 + index, index, 1.0)


def test_scores_of_chunks_are_delivered_once_and_before_the_first_token() -> None:
    hub = StreamHub()
    reader = Reader(hub, num_cached_tokens=4)
    step(hub, reader, prompt_scores=(scores(1, 2, 3),))
    # A chunk that is computed again after a preemption scores its tokens again.
    step(hub, reader, prompt_scores=(scores(2, 3, 4, 5),))
    assert reader.events == []
    step(hub, reader, prompt_scores=(scores(6, 7, 8, 9),), tokens=(token(0),))
    step(hub, reader, tokens=(token(1),))
    prompt, *tokens = reader.events
    assert isinstance(prompt, PromptEvent)
    assert [score.token_id for score in prompt.scores] == list(range(1, 10))
    assert prompt.num_cached_tokens == 4
    assert [event.index for event in tokens] == [0, 1]


def test_a_prompt_without_an_answer_is_delivered_before_its_end() -> None:
    hub = StreamHub()
    reader = Reader(hub, num_cached_tokens=4)
    step(hub, reader, prompt_scores=(scores(*range(1, 10)),))
    reader.end(FinishReason.LENGTH)
    step(hub, reader, finished=("r",))
    prompt, end = reader.events
    assert len(prompt.scores) == 9
    assert (end.reason, end.num_output_tokens, end.num_cached_tokens) == (FinishReason.LENGTH, 0, 4)


@pytest.mark.parametrize(
    "reason", [FinishReason.ERROR, FinishReason.CANCELLED, FinishReason.REJECTED]
)
def test_a_prompt_that_was_not_finished_is_not_delivered_nor_kept(reason: FinishReason) -> None:
    hub = StreamHub()
    reader = Reader(hub)
    step(hub, reader, prompt_scores=(scores(1, 2, 3),))
    reader.end(reason)
    step(hub, reader, finished=("r",))
    (end,) = reader.events
    assert isinstance(end, FinishedEvent)
    again = Reader(hub)
    step(hub, again, prompt_scores=(scores(*range(1, 10)),), tokens=(token(0),))
    assert [score.token_id for score in again.events[0].scores] == list(range(1, 10))


def test_a_prompt_is_told_once_even_if_the_first_token_is_the_last() -> None:
    hub = StreamHub()
    reader = Reader(hub)
    reader.end(FinishReason.LENGTH, num_output=1)
    step(hub, reader, tokens=(token(0),), finished=("r",))
    assert [type(event) for event in reader.events] == [PromptEvent, TokenEvent, FinishedEvent]


def test_whoever_is_left_is_ended_once() -> None:
    hub = StreamHub()
    known, left = Reader(hub, "known"), Reader(hub, "left")
    known.end(FinishReason.ERROR)
    known.request.failure = "its own"
    hub.end_all([known.request])
    for _ in range(2):
        hub.end_rest("the engine stopped")
    assert [event.failure for event in known.events] == ["its own"]
    assert [(event.reason, event.failure) for event in left.events] == [
        (FinishReason.ERROR, "the engine stopped")
    ]


def test_a_stream_is_read_where_it_was_asked_for() -> None:
    async def scenario() -> list[Any]:
        hub = StreamHub()
        request = Reader(hub, "unused").request
        stream = Stream("unused", asyncio.get_running_loop(), lambda *_: None)
        hub.register(stream, request)
        hub.end_rest("over")
        return [event async for event in stream]

    (end,) = asyncio.run(scenario())
    assert end.failure == "over"
