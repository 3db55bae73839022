"""`/v1/completions`: whole and streamed answers, prompts, stop strings, scores."""

from __future__ import annotations

import pytest

from controller.api.app import create_app
from controller.api.responses import CompletionAnswer
from controller.runtime.generation import TokenEvent
from engine.request import FinishReason
from tests.controller.service_double import (
    EOS,
    ScriptedService,
    call,
    fails_after,
    refuses,
    says,
    sse,
    usage_of,
)

PATH = "/v1/completions"


def test_a_whole_answer_carries_text_usage_headers_and_the_promise() -> None:
    service = ScriptedService(says("hello"))
    answer = call(
        create_app(service),
        "POST",
        PATH,
        body={"model": "tiny/model", "prompt": "hi", "slo": {"ttft_ms": 600, "tpot_ms": 60}},
        headers={"x-request-id": "mine-7"},
    )
    assert answer.status_code == 200
    body = answer.json()
    CompletionAnswer.model_validate(body)
    assert body["id"] == "cmpl-run-1"
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"] == usage_of(3, 6)
    assert body["slo"] == {
        "class": "default", "ttft_ms": 500.0, "tpot_ms": 50.0, "queue_ms": 125.0,
        "ttft_met": True, "tpot_met": None, "predicted_ttft_ms": 250.0,
    }  # fmt: skip
    assert answer.headers["x-request-id"] == "run-1"
    assert answer.headers["x-client-request-id"] == "mine-7"
    assert answer.headers["x-slo-decision"] == "admitted"
    assert float(answer.headers["x-slo-predicted-ttft-ms"]) == 250.0
    assert answer.headers["server-timing"] == "queue;dur=125.000, ttft;dur=500.000"
    assert service.streams[0].ended_with == []


def test_the_request_that_is_submitted_says_what_the_body_said() -> None:
    service = ScriptedService()
    body = {
        "prompt": [1, 2, 3], "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
        "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3,
        "logit_bias": {"65": 5, "7": -100}, "seed": 42, "logprobs": 3, "stop_token_ids": [9],
        "min_tokens": 2, "priority": -3, "user": "someone",
    }  # fmt: skip
    assert call(create_app(service), "POST", PATH, body=body).status_code == 200
    request = service.request
    assert request.prompt_token_ids == (1, 2, 3)
    assert (request.max_tokens, request.priority, request.tenant) == (7, -3, "someone")
    assert request.arrived_at == 100.0
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, -0.3)
    assert sampling.logit_bias == ((7, -100.0), (65, 5.0))
    assert (sampling.seed, sampling.num_logprobs, sampling.min_tokens) == (42, 3, 2)
    assert sampling.stop_token_ids == (9, EOS)


def test_the_defaults_are_those_of_openai() -> None:
    service = ScriptedService()
    body = {
        "prompt": "x", "temperature": None, "top_p": None, "top_k": -1, "stop": None, "n": 1,
        "best_of": 1, "echo": False, "suffix": None, "logprobs": None, "seed": None,
        "stream": None, "stream_options": None, "logit_bias": None, "ignore_eos": None,
    }  # fmt: skip
    assert call(create_app(service), "POST", PATH, body=body).status_code == 200
    sampling = service.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert service.request.max_tokens == 16


def test_ignore_eos_takes_the_end_of_text_off_the_stop_ids_but_keeps_the_clients_own() -> None:
    service = ScriptedService(says([104, EOS, 105], ends_with_eos=False))
    body = {"prompt": "x", "ignore_eos": True, "stop": None, "max_tokens": 3, "stop_token_ids": [1]}
    answer = call(create_app(service), "POST", PATH, body=body).json()
    assert service.request.sampling.stop_token_ids == (1,)
    assert answer["choices"][0]["text"] == "hi"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_max_tokens_is_clipped_to_what_fits_the_context_and_the_pool() -> None:
    for limits, room in (({"max_model_len": 10}, 4), ({"num_pool_tokens": 8}, 2)):
        service = ScriptedService(**limits)
        body = {"prompt": [1] * 6, "max_tokens": 1000}
        assert call(create_app(service), "POST", PATH, body=body).status_code == 200
        assert service.request.max_tokens == room


def test_a_stream_sends_pieces_one_finish_reason_and_one_done() -> None:
    service = ScriptedService(says("hey"))
    answer = call(create_app(service), "POST", PATH, body={"prompt": "x", "stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-slo-decision"] == "admitted"
    events = list(sse(answer.text))
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    chunks = events[:-1]
    for chunk in chunks:
        CompletionAnswer.model_validate(chunk)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["h", "e", "y", "", ""]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 4 + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert [("slo" in chunk) for chunk in chunks] == [False] * 4 + [True]
    assert {chunk["id"] for chunk in chunks} == {"cmpl-run-1"}


@pytest.mark.parametrize("is_continuous", [False, True])
def test_usage_comes_in_one_chunk_without_choices_only_when_asked(is_continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": is_continuous}
    body = {"prompt": "x", "stream": True, "stream_options": options}
    events = list(sse(call(create_app(ScriptedService(says("ab"))), "POST", PATH, body=body).text))
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == usage_of(2, 3)
    running = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert running == ([1, 2, 3, 3] if is_continuous else [None] * 4)


@pytest.mark.parametrize("is_stream", [False, True])
def test_several_prompts_each_have_their_index_and_their_promise(is_stream: bool) -> None:
    service = ScriptedService(says("one"), says("two"), says("three"))
    body = {"prompt": ["a", "b", "c"], "stream": is_stream}
    answer = call(create_app(service), "POST", PATH, body=body)
    texts = {0: "", 1: "", 2: ""}
    endings: list[int] = []
    if is_stream:
        for chunk in list(sse(answer.text))[:-1]:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                endings.append(choice["index"])
                assert chunk["slo"]["class"] == "default"
    else:
        payload = answer.json()
        CompletionAnswer.model_validate(payload)
        for choice in payload["choices"]:
            texts[choice["index"]] = choice["text"]
            endings.append(choice["index"])
            assert choice["slo"]["ttft_ms"] == 500.0
        assert payload["usage"]["prompt_tokens"] == 6
        assert payload["usage"]["completion_tokens"] == 4 + 4 + 6
    assert texts == {0: "one", 1: "two", 2: "three"}
    assert sorted(endings) == [0, 1, 2]
    assert [stream.request.prompt_token_ids for stream in service.streams] == [
        (257, 97), (257, 98), (257, 99),
    ]  # fmt: skip


def test_lists_of_token_lists_are_prompts_too() -> None:
    service = ScriptedService()
    call(create_app(service), "POST", PATH, body={"prompt": [[1, 2], [3]]})
    assert [stream.request.prompt_token_ids for stream in service.streams] == [(1, 2), (3,)]


@pytest.mark.parametrize("is_stream", [False, True])
def test_one_refused_prompt_refuses_all_and_cancels_the_others(is_stream: bool) -> None:
    service = ScriptedService(refuses("queue_full", retry_after_s=2.0), says("b" * 100))
    body = {"prompt": ["a", "b"], "max_tokens": 100, "stream": is_stream}
    answer = call(create_app(service), "POST", PATH, body=body)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "queue_full"
    assert service.streams[1].ended_with == [FinishReason.CANCELLED]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_cuts_the_text_and_ends_the_request(is_stream: bool) -> None:
    service = ScriptedService(says("one END two", ends_with_eos=False))
    body = {"prompt": "x", "stop": ["END", "zzz"], "stream": is_stream, "max_tokens": 50}
    answer = call(create_app(service), "POST", PATH, body=body)
    if is_stream:
        chunks = list(sse(answer.text))[:-1]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * 7 + ["stop"]
    else:
        text = answer.json()["choices"][0]["text"]
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert answer.json()["usage"]["completion_tokens"] == 7
    assert text == "one "
    assert service.streams[0].ended_with == [FinishReason.STOP]


def test_held_text_is_flushed_at_the_end_and_a_stop_string_can_be_shown() -> None:
    service = ScriptedService(says("one EN"))
    answer = call(create_app(service), "POST", PATH, body={"prompt": "x", "stop": "END"}).json()
    assert answer["choices"][0]["text"] == "one EN"
    service = ScriptedService(says("one END"))
    body = {"prompt": "x", "stop": "END", "include_stop_str_in_output": True}
    answer = call(create_app(service), "POST", PATH, body=body).json()
    assert answer["choices"][0]["text"] == "one END"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    service = ScriptedService(says("abab", ends_with_eos=False))
    body = {"prompt": "x", "stop": "ab", "min_tokens": 3}
    answer = call(create_app(service), "POST", PATH, body=body).json()
    assert answer["choices"][0]["text"] == "ab"


def test_a_character_split_over_tokens_is_never_shown_broken() -> None:
    service = ScriptedService(says("é😀!"))
    answer = call(create_app(service), "POST", PATH, body={"prompt": "x", "stream": True})
    pieces = [chunk["choices"][0]["text"] for chunk in list(sse(answer.text))[:-1]]
    assert "".join(pieces) == "é😀!"
    assert "�" not in answer.text


def test_logprobs_hold_one_entry_per_completion_token() -> None:
    service = ScriptedService(says("hi"))
    answer = call(create_app(service), "POST", PATH, body={"prompt": "x", "logprobs": 2}).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "i", "<eos>"]
    assert logprobs["token_logprobs"] == [-0.5, -1.5, -2.5]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["top_logprobs"][0] == {"A": -1.065, "B": -1.066, "h": -0.5}
    assert answer["usage"]["completion_tokens"] == 3
    service = ScriptedService(says("hi"))
    answer = call(create_app(service), "POST", PATH, body={"prompt": "x", "logprobs": 0}).json()
    assert answer["choices"][0]["logprobs"]["top_logprobs"] is None


def test_a_probability_of_zero_is_still_json() -> None:
    async def script(stream):  # type: ignore[no-untyped-def]
        yield stream.admitted()
        yield TokenEvent(97, 0, 1.0, float("-inf"))
        yield stream.finished(FinishReason.LENGTH, 1)

    body = {"prompt": "x", "logprobs": 0}
    answer = call(create_app(ScriptedService(script)), "POST", PATH, body=body)
    assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_failure_before_the_first_token_is_a_500_in_both_modes(is_stream: bool) -> None:
    service = ScriptedService(fails_after(0))
    answer = call(create_app(service), "POST", PATH, body={"prompt": "x", "stream": is_stream})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "generation_failed"
    assert answer.json()["error"]["message"] == "the step failed"
    assert answer.headers["x-request-id"] == "run-1"


def test_a_failure_after_the_first_token_is_an_error_event_and_the_end() -> None:
    service = ScriptedService(fails_after(2))
    answer = call(create_app(service), "POST", PATH, body={"prompt": "x", "stream": True})
    assert answer.status_code == 200
    events = list(sse(answer.text))
    assert [event["choices"][0]["text"] for event in events[:2]] == ["a", "a"]
    assert events[2]["error"]["code"] == "generation_failed"
    assert len(events) == 3


def test_hints_that_change_nothing_are_named() -> None:
    body = {"prompt": "x", "metadata": {"a": "b"}, "prompt_cache_key": "k"}
    answer = call(create_app(ScriptedService()), "POST", PATH, body=body)
    assert answer.headers["x-paceline-ignored-parameters"] == "metadata, prompt_cache_key"


def test_an_answer_of_no_tokens_is_complete() -> None:
    async def script(stream):  # type: ignore[no-untyped-def]
        yield stream.admitted(is_degraded=True, predicted_ttft_s=None)
        yield stream.finished(FinishReason.STOP, 0)

    for is_stream in (False, True):
        body = {"prompt": "x", "stream": is_stream}
        answer = call(create_app(ScriptedService(script)), "POST", PATH, body=body)
        assert answer.status_code == 200
        assert answer.headers["x-slo-decision"] == "degraded"
        assert "x-slo-predicted-ttft-ms" not in answer.headers


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [(FinishReason.CANCELLED, 503, "cancelled"), (FinishReason.REJECTED, 500, "internal_error")],
)
def test_an_end_that_nobody_asked_for_is_an_error(
    reason: FinishReason, status: int, code: str
) -> None:
    async def script(stream):  # type: ignore[no-untyped-def]
        yield stream.finished(reason, 0)

    answer = call(create_app(ScriptedService(script)), "POST", PATH, body={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_a_bug_in_the_middle_of_a_stream_ends_it_with_an_error_event(prompt: object) -> None:
    async def says_one_and_waits(stream):  # type: ignore[no-untyped-def]
        yield stream.admitted()
        yield TokenEvent(97, 0, 1.0)
        await stream.gate.wait()

    async def fails(stream):  # type: ignore[no-untyped-def]
        yield stream.admitted()
        yield TokenEvent(97, 0, 1.0)
        raise RuntimeError("a secret detail")

    scripts = [fails] if prompt == "x" else [says_one_and_waits, fails]
    service = ScriptedService(*scripts)
    answer = call(create_app(service), "POST", PATH, body={"prompt": prompt, "stream": True})
    assert answer.status_code == 200
    *chunks, error = sse(answer.text)
    assert len(chunks) == len(scripts)
    assert error["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    for stream in service.streams:
        assert stream.ended_with == [FinishReason.CANCELLED]


def test_a_stop_string_in_text_that_is_flushed_at_the_end_still_counts() -> None:
    # Half a character is held back until the end and then shown as U+FFFD.
    service = ScriptedService(says(b"ab\xf0"))
    answer = call(create_app(service), "POST", PATH, body={"prompt": "x", "stop": "b\ufffd"}).json()
    assert answer["choices"][0]["text"] == "a"
    assert answer["choices"][0]["finish_reason"] == "stop"
