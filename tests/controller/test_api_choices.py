"""Several choices of a prompt: who is submitted when, seeds, usage, refusals, disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from controller.api.app import create_app
from controller.api.responses import ChatAnswer, ChatChunk, CompletionAnswer
from controller.runtime.generation import GenerationEvent, TokenEvent
from engine.request import FinishReason
from tests.controller.service_double import (
    ScriptedService,
    ScriptedStream,
    Wire,
    call,
    fails_after,
    hangs_after,
    refuses,
    run_async,
    says,
    sse,
    usage_of,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def post(service: ScriptedService, path: str = COMPLETIONS, **body: Any) -> Any:
    return call(create_app(service), "POST", path, body=body)


def texts_of(answer: Any) -> dict[int, str]:
    """The text of every choice of a streamed completion."""
    texts: dict[int, str] = {}
    for chunk in list(sse(answer.text))[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.parametrize("is_stream", [False, True])
def test_choices_are_grouped_by_prompt_and_each_has_its_own_end(is_stream: bool) -> None:
    scripts = [says("a0"), says("a1 is long"), says("b0"), says("b1")]
    service = ScriptedService(*scripts)
    answer = post(service, prompt=["a", "b"], n=2, stream=is_stream, max_tokens=5)
    expected = {0: "a0", 1: "a1 is", 2: "b0", 3: "b1"}
    if is_stream:
        assert texts_of(answer) == expected
        endings = {
            choice["index"]: choice["finish_reason"]
            for chunk in list(sse(answer.text))[:-1]
            for choice in chunk["choices"]
            if choice["finish_reason"]
        }
    else:
        body = answer.json()
        CompletionAnswer.model_validate(body)
        assert {c["index"]: c["text"] for c in body["choices"]} == expected
        assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
        assert all(c["slo"]["ttft_met"] for c in body["choices"])
        assert "slo" not in body
        # Two tokens a prompt, each prompt once.
        assert body["usage"] == usage_of(4, 3 + 5 + 3 + 3)
        endings = {c["index"]: c["finish_reason"] for c in body["choices"]}
    assert endings == {0: "stop", 1: "length", 2: "stop", 3: "stop"}
    prompts = [stream.request.prompt_token_ids for stream in service.streams]
    assert prompts == [(257, 97), (257, 97), (257, 98), (257, 98)]


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (7, [7, 8, 9]),
        (-1, [-1, 0, 1]),
        (2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63)]),
        (-(2**63), [-(2**63), 1 - 2**63, 2 - 2**63]),
        (None, [None] * 3),
    ],
)
def test_each_choice_draws_from_its_own_seed(seed: int | None, expected: list[Any]) -> None:
    service = ScriptedService()
    assert post(service, prompt="x", n=3, seed=seed).status_code == 200
    assert [stream.request.sampling.seed for stream in service.streams] == expected


def test_chat_has_choices_too() -> None:
    service = ScriptedService(says("one"), says("two"))
    body = post(service, CHAT, messages=MESSAGES, n=2, best_of=2).json()
    ChatAnswer.model_validate(body)
    assert [c["message"]["content"] for c in body["choices"]] == ["one", "two"]
    assert [c["index"] for c in body["choices"]] == [0, 1]
    service = ScriptedService(says("one"), says("two"))
    options = {"include_usage": True}
    answer = post(service, CHAT, messages=MESSAGES, n=2, stream=True, stream_options=options)
    *chunks, usage, done = sse(answer.text)
    assert done == "[DONE]"
    roles, texts = [], {0: "", 1: ""}
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if "role" in choice["delta"]:
            roles.append(choice["index"])
    assert (sorted(roles), texts) == ([0, 1], {0: "one", 1: "two"})
    assert usage["usage"]["prompt_tokens"] == len(service.streams[0].request.prompt_token_ids)
    assert usage["usage"]["completion_tokens"] == 8


def test_the_others_wait_for_the_first_token_where_the_prompt_can_be_shared() -> None:
    service = ScriptedService(prefix_block_size=4, num_cached_tokens=4)
    submitted_when: list[int] = []

    async def leader(stream: ScriptedStream) -> AsyncIterator[GenerationEvent]:
        yield stream.admitted()
        await asyncio.sleep(0)
        submitted_when.append(len(service.streams))
        yield stream.computed()
        service.clock.advance(3.0)
        yield TokenEvent(97, 0, 103.0)
        await asyncio.sleep(0)
        submitted_when.append(len(service.streams))
        yield stream.finished(FinishReason.LENGTH, 1)

    service.scripts = [leader, says("b"), says("c")]
    body = post(service, prompt=[1, 2, 3, 4, 5], n=3, max_tokens=1, slo={"ttft_ms": 500}).json()
    assert submitted_when == [1, 3]
    assert [choice["text"] for choice in body["choices"]] == ["a", "b", "c"]
    requests = [stream.request for stream in service.streams]
    # Same arrival; what the first one took is added to the target of those that waited for it.
    assert {request.arrived_at for request in requests} == {100.0}
    assert [request.ttft_extra_s for request in requests] == [0.0, 3.0, 3.0]
    # The others hit the cache with what the first one computed: that is no news to the client.
    assert body["usage"] == usage_of(5, 3, 4)


@pytest.mark.parametrize("size", [None, 5])
def test_all_start_at_once_where_nothing_can_be_shared(size: int | None) -> None:
    service = ScriptedService(hangs_after(0), says("b"), prefix_block_size=size)

    async def run() -> None:
        wire = Wire(COMPLETIONS, {"prompt": [1, 2, 3, 4, 5], "n": 2})
        exchange = asyncio.ensure_future(create_app(service)(wire.scope, wire.receive, wire.send))
        await service.submitted.wait()
        assert len(service.streams) == 2
        assert [stream.request.ttft_extra_s for stream in service.streams] == [0.0, 0.0]
        service.streams[0].gate.set()
        await exchange
        assert wire.status == 200

    run_async(run())


def test_a_prompt_that_ends_without_a_token_still_has_all_its_choices() -> None:
    service = ScriptedService(prefix_block_size=1)
    body = post(service, prompt=[1, 2, 3], n=3, max_tokens=0).json()
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 3
    assert body["usage"] == usage_of(3, 0)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_one_refused_choice_refuses_all_before_any_byte(is_stream: bool, is_shared: bool) -> None:
    scripts = [hangs_after(2), refuses("overloaded", retry_after_s=2.0)]
    service = ScriptedService(*scripts, prefix_block_size=1 if is_shared else None)
    answer = post(service, prompt=[1, 2], n=2, stream=is_stream)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "overloaded"
    assert answer.headers["x-request-id"] == "run-1"
    assert answer.headers["x-slo-decision"] == "rejected"
    assert service.streams[0].ended_with == [FinishReason.CANCELLED]


def test_a_refused_first_choice_submits_no_other() -> None:
    service = ScriptedService(refuses("queue_full"), prefix_block_size=1)
    assert post(service, prompt=[1, 2], n=5).status_code == 429
    assert len(service.streams) == 1


def test_a_stream_waits_for_verdicts_not_for_tokens() -> None:
    # The second choice is admitted, or told to wait, and says nothing: the first one is sent.
    service = ScriptedService(says("abc"), hangs_after(0), prefix_block_size=1)

    async def run() -> None:
        wire = Wire(COMPLETIONS, {"prompt": [1, 2], "n": 2, "stream": True})
        exchange = asyncio.ensure_future(create_app(service)(wire.scope, wire.receive, wire.send))
        while '"text":"c"' not in wire.text:
            wire.has_sent.clear()
            await wire.has_sent.wait()
        assert not service.streams[1].gate.is_set()
        service.streams[1].gate.set()
        await exchange
        assert wire.text.endswith("data: [DONE]\n\n")

    run_async(run())


def test_a_failure_of_one_choice_after_the_first_byte_ends_the_others() -> None:
    service = ScriptedService(hangs_after(1), fails_after(1))
    answer = post(service, prompt="x", n=2, stream=True)
    assert answer.status_code == 200
    *chunks, error = sse(answer.text)
    assert len(chunks) == 2
    assert error["error"]["code"] == "generation_failed"
    assert service.streams[0].ended_with == [FinishReason.CANCELLED]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_every_choice(is_stream: bool) -> None:
    service = ScriptedService(hangs_after(1), prefix_block_size=1)

    async def run() -> None:
        body = {"prompt": [1, 2], "n": 3, "stream": is_stream}
        wire = Wire(COMPLETIONS, body)
        exchange = asyncio.ensure_future(create_app(service)(wire.scope, wire.receive, wire.send))
        while len(service.streams) < 3:  # noqa: ASYNC110 - the exchange is what changes it
            await asyncio.sleep(0)
        wire.hung_up.set()
        await exchange

    run_async(run())
    assert [stream.ended_with for stream in service.streams] == [[FinishReason.CANCELLED]] * 3


def test_a_stop_string_ends_its_own_choice_alone() -> None:
    service = ScriptedService(says("a END b"), says("abcdefgh"))
    body = post(service, prompt="x", n=2, stop="END").json()
    assert [choice["text"] for choice in body["choices"]] == ["a ", "abcdefgh"]
    assert [stream.ended_with for stream in service.streams] == [[FinishReason.STOP], []]


def test_running_usage_counts_all_choices_and_the_cache() -> None:
    service = ScriptedService(says("ab"), says("cd"), num_cached_tokens=1)
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = post(service, prompt="x", n=2, stream=True, stream_options=options)
    *chunks, last, _ = sse(answer.text)
    assert last["usage"] == usage_of(2, 6, 1)
    assert chunks[-1]["usage"] == last["usage"]
    completion = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert completion == sorted(completion)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}


def test_a_salt_reaches_every_request_and_is_no_hint_any_more() -> None:
    service = ScriptedService()
    answer = post(service, prompt="x", n=2, cache_salt="tenant-7")
    assert [stream.request.cache_salt for stream in service.streams] == ["tenant-7"] * 2
    assert "x-paceline-ignored-parameters" not in answer.headers
    assert post(service, prompt="x").status_code == 200
    assert service.streams[-1].request.cache_salt is None
