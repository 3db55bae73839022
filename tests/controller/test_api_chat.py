"""`/v1/chat/completions`: messages in, chunks out."""

from __future__ import annotations

from typing import Any

import pytest

from controller.api.app import create_app
from controller.api.responses import ChatAnswer, ChatChunk
from tests.controller.service_double import ScriptedService, call, refuses, says, sse

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_whole_answer() -> None:
    service = ScriptedService(says("hello"))
    answer = call(create_app(service), "POST", PATH, body={"messages": MESSAGES})
    assert answer.status_code == 200
    body = answer.json()
    ChatAnswer.model_validate(body)
    assert body["id"] == "chatcmpl-run-1"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = "user: hi\nassistant:"
    assert service.request.prompt_token_ids == (257, *prompt.encode())
    assert body["usage"]["prompt_tokens"] == len(prompt) + 1


def test_the_answer_may_fill_the_context_unless_told_otherwise() -> None:
    for asked, expected in (
        ({}, 180),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_completion_tokens": 5000}, 180),
    ):
        service = ScriptedService()
        call(create_app(service), "POST", PATH, body={"messages": MESSAGES, **asked})
        assert service.request.max_tokens == expected


def test_a_stream_opens_with_the_role_alone() -> None:
    options = {"include_usage": True}
    body = {"messages": MESSAGES, "stream": True, "stream_options": options}
    events = list(sse(call(create_app(ScriptedService(says("ab"))), "POST", PATH, body=body).text))
    assert events.pop() == "[DONE]"
    for chunk in events:
        ChatChunk.model_validate(chunk)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in events[1:-1]] == [
        {"content": "a"}, {"content": "b"}, {"content": ""}, {},
    ]  # fmt: skip
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in events[:-1]]
    assert reasons == [None, None, None, None, "stop"]
    assert events[-2]["slo"]["ttft_ms"] == 500.0
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs_come_as_a_content_list_with_bytes(is_stream: bool) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "stream": is_stream}
    answer = call(create_app(ScriptedService(says("aé"))), "POST", PATH, body=body)
    content: list[dict[str, Any]] = []
    if is_stream:
        for chunk in list(sse(answer.text))[:-1]:
            ChatChunk.model_validate(chunk)
            logprobs = chunk["choices"][0]["logprobs"]
            content += logprobs["content"] if logprobs else []
    else:
        ChatAnswer.model_validate(answer.json())
        content = answer.json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[97], None, None, list(b"<eos>")]
    assert content[0]["top_logprobs"] == [
        {"token": "A", "logprob": -1.065, "bytes": [65]},
        {"token": "B", "logprob": -1.066, "bytes": [66]},
    ]
    assert content[0]["logprob"] == -0.5


def test_logprobs_without_alternatives() -> None:
    service = ScriptedService(says("a"))
    body = {"messages": MESSAGES, "logprobs": True}
    answer = call(create_app(service), "POST", PATH, body=body).json()
    assert service.request.sampling.num_logprobs == 0
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_text_parts_developers_and_returned_answers_are_understood() -> None:
    service = ScriptedService()
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "audio": None},
        {"role": "user", "content": "d"},
    ]
    assert call(create_app(service), "POST", PATH, body={"messages": messages}).status_code == 200
    text = bytes(service.request.prompt_token_ids[1:]).decode()
    assert text == "system: be brief\nuser: a\nb\nassistant: c\nuser: d\nassistant:"


def test_messages_that_the_template_cannot_render_are_a_400_with_its_reason() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "x"}]
    answer = call(create_app(ScriptedService()), "POST", PATH, body={"messages": messages})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_messages", "messages")
    assert "must be the user's" in error["message"]


def test_a_conversation_beyond_the_context_names_messages_and_the_numbers() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 300}]}
    answer = call(create_app(ScriptedService()), "POST", PATH, body=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "messages"
    assert "318" in error["message"]
    assert "200" in error["message"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_refusal_has_its_own_status_in_both_modes(is_stream: bool) -> None:
    service = ScriptedService(
        refuses("overloaded", message="busy", predicted_ttft_s=3.5, retry_after_s=1.25)
    )
    body = {"messages": MESSAGES, "stream": is_stream}
    answer = call(create_app(service), "POST", PATH, body=body)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "2"
    assert answer.headers["retry-after-ms"] == "1250"
    assert answer.headers["x-llm-d-request-dropped-reason"] == "overloaded"
    assert answer.headers["x-slo-decision"] == "rejected"
    assert answer.headers["x-slo-predicted-ttft-ms"] == "3500"
    assert answer.headers["x-request-id"] == "run-1"
    assert "x-should-retry" not in answer.headers
    assert answer.json()["error"] == {
        "message": "busy", "type": "rate_limit_error", "param": None, "code": "overloaded",
        "predicted_ttft_ms": 3500.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("ttft_unreachable", 429),
        ("deadline_expired", 429),
        ("kv_never_fits", 400),
        ("context_length", 400),
        ("draining", 503),
    ],
)
def test_the_status_follows_the_reason(reason: str, status: int) -> None:
    app = create_app(ScriptedService(refuses(reason)))
    answer = call(app, "POST", PATH, body={"messages": MESSAGES})
    assert answer.status_code == status
    assert answer.headers["x-slo-decision"] == "rejected"
    assert answer.headers.get("x-should-retry") == ("false" if status == 429 else None)
    assert answer.headers.get("retry-after") == ("2" if status == 503 else None)
