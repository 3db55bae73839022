"""Bad input: a status, a code, the field's name; nothing submitted; the server well afterwards."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controller.api.app import create_app
from controller.api.prompts import MAX_CHARS_PER_TOKEN
from controller.api.responses import ErrorAnswer
from tests.controller.service_double import VOCAB_SIZE, ByteTokenizer, ScriptedService, call

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
NAN, INFINITY = float("nan"), float("inf")

FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "invalid_value", "prompt"),
    ({"prompt": []}, "invalid_value", "prompt"),
    ({"prompt": ["a", ""]}, "invalid_value", "prompt[1]"),
    ({"prompt": [[1], []]}, "invalid_value", "prompt[1]"),
    ({"prompt": None}, "invalid_value", "prompt"),
    ({"prompt": 5}, "invalid_value", "prompt"),
    ({"prompt": {"a": 1}}, "invalid_value", "prompt"),
    ({"prompt": [1, "a"]}, "invalid_value", "prompt[1]"),
    ({"prompt": ["a", 1]}, "invalid_value", "prompt[1]"),
    ({"prompt": [1.0]}, "invalid_value", "prompt[0]"),
    ({"prompt": [True]}, "invalid_value", "prompt[0]"),
    ({"prompt": [1, -1]}, "invalid_token_id", "prompt[1]"),
    ({"prompt": [1, VOCAB_SIZE]}, "invalid_token_id", "prompt[1]"),
    ({"prompt": [[1], [2, 10**30]]}, "invalid_token_id", "prompt[1][1]"),
    ({"prompt": "\ud800"}, "invalid_value", "prompt"),
    ({"prompt": ["a", "b\udfff"]}, "invalid_value", "prompt[1]"),
    ({"prompt": ["a"] * 1025}, "invalid_value", "prompt"),
    ({"model": 5}, "invalid_value", "model"),
    ({"model": "gpt-4"}, "model_not_found", "model"),
    ({"temperature": NAN}, "invalid_value", "temperature"),
    ({"temperature": INFINITY}, "invalid_value", "temperature"),
    ({"temperature": -0.1}, "invalid_value", "temperature"),
    ({"temperature": 2.1}, "invalid_value", "temperature"),
    ({"temperature": "1"}, "invalid_value", "temperature"),
    ({"temperature": True}, "invalid_value", "temperature"),
    ({"temperature": 10**400}, "invalid_value", "temperature"),
    ({"top_p": 0}, "invalid_value", "top_p"),
    ({"top_p": -INFINITY}, "invalid_value", "top_p"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"top_k": 1.5}, "invalid_value", "top_k"),
    ({"top_k": 10**30}, "invalid_value", "top_k"),
    ({"min_p": NAN}, "invalid_value", "min_p"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"presence_penalty": NAN}, "invalid_value", "presence_penalty"),
    ({"frequency_penalty": 3}, "invalid_value", "frequency_penalty"),
    ({"logit_bias": {"1": NAN}}, "invalid_value", "logit_bias.1"),
    ({"logit_bias": {"1": 101}}, "invalid_value", "logit_bias.1"),
    ({"logit_bias": {"a": 1}}, "invalid_token_id", "logit_bias.a"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "invalid_token_id", f"logit_bias.{VOCAB_SIZE}"),
    ({"logit_bias": [1]}, "invalid_value", "logit_bias"),
    ({"seed": 10**400}, "invalid_value", "seed"),
    ({"seed": True}, "invalid_value", "seed"),
    ({"seed": 1.0}, "invalid_value", "seed"),
    ({"max_tokens": -5}, "invalid_value", "max_tokens"),
    ({"max_tokens": "5"}, "invalid_value", "max_tokens"),
    ({"max_tokens": 10**30}, "invalid_value", "max_tokens"),
    ({"min_tokens": 17}, "invalid_value", "min_tokens"),
    ({"logprobs": 21}, "invalid_value", "logprobs"),
    ({"logprobs": True}, "invalid_value", "logprobs"),
    ({"stop": ""}, "invalid_value", "stop"),
    ({"stop": ["a", ""]}, "invalid_value", "stop[1]"),
    ({"stop": [5]}, "invalid_value", "stop[0]"),
    ({"stop": "\udc00"}, "invalid_value", "stop"),
    ({"stop": ["a"] * 17}, "invalid_value", "stop"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "invalid_token_id", "stop_token_ids[0]"),
    ({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids[0]"),
    ({"stream": "yes"}, "invalid_value", "stream"),
    ({"stream": 1}, "invalid_value", "stream"),
    ({"stream_options": {"usage": True}}, "unknown_parameter", "stream_options.usage"),
    ({"stream_options": 1}, "invalid_value", "stream_options"),
    ({"user": 5}, "invalid_value", "user"),
    ({"priority": 1.5}, "invalid_value", "priority"),
    ({"service_tier": 1}, "invalid_value", "service_tier"),
    ({"seed": 2**63}, "invalid_value", "seed"),
    ({"seed": -(2**63) - 1}, "invalid_value", "seed"),
    ({"n": 0}, "invalid_value", "n"),
    ({"n": 129}, "invalid_value", "n"),
    ({"n": True}, "invalid_value", "n"),
    ({"n": 9, "prompt": ["x"] * 128}, "invalid_value", "n"),
    ({"best_of": 3}, "unsupported_parameter", "best_of"),
    ({"best_of": 3, "n": 2}, "unsupported_parameter", "best_of"),
    ({"echo": 1}, "invalid_value", "echo"),
    ({"suffix": "x"}, "unsupported_parameter", "suffix"),
    ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    ({"use_beam_search": True}, "unsupported_parameter", "use_beam_search"),
    ({"prompt_logprobs": -1}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": True}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
    ({"cache_salt": ""}, "invalid_value", "cache_salt"),
    ({"cache_salt": 5}, "invalid_value", "cache_salt"),
    ({"cache_salt": "\ud800"}, "invalid_value", "cache_salt"),
    ({"cache_salt": "x" * 513}, "invalid_value", "cache_salt"),
    ({"temprature": 1}, "unknown_parameter", "temprature"),
    ({"messages": []}, "unknown_parameter", "messages"),
]  # fmt: skip

MESSAGES = [{"role": "user", "content": "x"}]
CHAT_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": "hi"}, "invalid_value", "messages"),
    ({"messages": [5]}, "invalid_value", "messages[0]"),
    ({"messages": [{}]}, "missing_required_parameter", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "invalid_value", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "invalid_value",
        "messages[0].content[0].text",
    ),
    (
        {"messages": [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [1]}]},
        "unsupported_parameter",
        "messages[1].tool_calls",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "mood": "good"}]},
        "unknown_parameter",
        "messages[0].mood",
    ),
    ({"n": 129}, "invalid_value", "n"),
    ({"best_of": 2}, "unsupported_parameter", "best_of"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"prompt_logprobs": 0, "stream": True}, "invalid_value", "prompt_logprobs"),
    ({"echo": True}, "unsupported_parameter", "echo"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"logprobs": 1}, "invalid_value", "logprobs"),
    ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
    ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, "unsupported_parameter", "response_format"),
    ({"chat_template": "{{x}}"}, "unsupported_parameter", "chat_template"),
    ({"prompt": "x"}, "unknown_parameter", "prompt"),
]


def check(service: ScriptedService, path: str, body: Any, code: str, param: str | None) -> None:
    app = create_app(service)
    answer = call(app, "POST", path, body=body)
    payload = answer.json()
    ErrorAnswer.model_validate(payload)
    error = payload["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert error["type"] == "invalid_request_error"
    assert service.streams == []
    assert call(app, "POST", path, body=good(path)).status_code == 200


def good(path: str) -> dict[str, Any]:
    return {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}


@pytest.mark.parametrize(("fields", "code", "param"), FIELDS)
def test_a_bad_field_of_a_completion_is_named(
    fields: dict[str, Any], code: str, param: str
) -> None:
    check(ScriptedService(), COMPLETIONS, {**good(COMPLETIONS), **fields}, code, param)


@pytest.mark.parametrize(("fields", "code", "param"), CHAT_FIELDS)
def test_a_bad_field_of_a_chat_is_named(fields: dict[str, Any], code: str, param: str) -> None:
    check(ScriptedService(), CHAT, {**good(CHAT), **fields}, code, param)


@pytest.mark.parametrize(("salt", "num_chars"), [("", 0), ("x" * 513, 513)])
def test_a_salt_of_a_wrong_length_is_told_what_to_send(salt: str, num_chars: int) -> None:
    body = {"prompt": "x", "cache_salt": salt}
    answer = call(create_app(ScriptedService()), "POST", COMPLETIONS, body=body)
    message = answer.json()["error"]["message"]
    assert message.startswith("cache_salt: send 1 to 512 characters, or leave it out")
    assert message.endswith(f"got {num_chars}")


@pytest.mark.parametrize("is_stream", [False, True])
def test_streams_are_refused_alike(is_stream: bool) -> None:
    body = {"prompt": "", "stream": is_stream}
    check(ScriptedService(), COMPLETIONS, body, "invalid_value", "prompt")


def test_a_missing_prompt_is_named() -> None:
    check(ScriptedService(), COMPLETIONS, {}, "missing_required_parameter", "prompt")


@pytest.mark.parametrize("limits", [{"max_model_len": 8}, {"num_pool_tokens": 8}])
def test_a_prompt_that_leaves_no_room_is_refused_with_numbers(limits: dict[str, int]) -> None:
    service = ScriptedService(**limits)
    answer = call(create_app(service), "POST", COMPLETIONS, body={"prompt": [[1], [1] * 8]})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt[1]")
    assert "8 tokens" in error["message"]
    assert service.streams == []
    fits = ScriptedService(**limits)
    assert call(create_app(fits), "POST", COMPLETIONS, body={"prompt": [1] * 7}).status_code == 200


@pytest.mark.parametrize("bad", [True, -1, 2**31, 1.0, None, "1", [1]])
@pytest.mark.parametrize("is_nested", [False, True])
def test_one_bad_token_id_among_many_is_found(bad: Any, is_nested: bool) -> None:
    ids = [*[1] * 500, bad, *[1] * 500]
    prompt, name = ([[1], ids], "prompt[1][500]") if is_nested else (ids, "prompt[500]")
    code = "invalid_token_id" if bad in (-1, 2**31) else "invalid_value"
    check(ScriptedService(), COMPLETIONS, {"prompt": prompt}, code, name)


class CountingTokenizer(ByteTokenizer):
    """Knows how many texts it was given."""

    def __init__(self) -> None:
        self.num_texts = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_texts += 1
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_a_text_that_cannot_fit_is_not_tokenised() -> None:
    for num_chars, num_texts in ((8 * MAX_CHARS_PER_TOKEN, 1), (8 * MAX_CHARS_PER_TOKEN + 1, 0)):
        text = "x" * num_chars
        chat = [{"role": "user", "content": text[1:]}, {"role": "user", "content": "x"}]
        for path, body, param in (
            (COMPLETIONS, {"prompt": text}, "prompt"),
            (COMPLETIONS, {"prompt": [text]}, "prompt[0]"),
            (CHAT, {"messages": chat}, "messages"),
        ):
            service = ScriptedService(max_model_len=8)
            service.tokenizer = tokenizer = CountingTokenizer()
            app = create_app(service)
            tokenizer.num_texts = 0  # the application spells single tokens at its start
            error = call(app, "POST", path, body=body).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert error["param"] == param
            assert tokenizer.num_texts == num_texts


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"not json", b"{} {}", b'{"prompt": "a",}', b"\xff\xfe", b'{"prompt": "\xff"}',
     b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "prompt": "b"}'],
)  # fmt: skip
def test_a_body_that_is_not_json_is_said_to_be_so(content: bytes) -> None:
    service = ScriptedService()
    headers = {"content-type": "application/json"}
    answer = call(create_app(service), "POST", COMPLETIONS, content=content, headers=headers)
    assert answer.status_code == 400
    expected = "invalid_json" if content else "missing_required_parameter"
    assert answer.json()["error"]["code"] == expected
    assert service.streams == []


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "\ud800": 1},
        {"prompt": "x", "slo": {"\ud800": 1}},
        {"prompt": "x", "logit_bias": {"\ud800": 1}},
        {"prompt": "x", "service_tier": "\ud800"},
        {"prompt": "x", "slo": "\ud800"},
        {"prompt": "x", "slo": {"ttft_ms": "\ud800"}},
        {"prompt": "x", "model": "\ud800"},
        {"prompt": "x", "user": "\ud800"},
        {"prompt": "x", "suffix": "\ud800"},
        {"prompt": {"\ud800": "\ud800"}},
    ],
)
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(body: dict[str, Any]) -> None:
    answer = call(create_app(ScriptedService()), "POST", COMPLETIONS, body=body)
    assert answer.status_code == 400
    ErrorAnswer.model_validate(answer.json())


def test_a_long_unknown_name_is_not_sent_back_whole() -> None:
    body = {"prompt": "x", "y" * 10_000: 1}
    answer = call(create_app(ScriptedService()), "POST", COMPLETIONS, body=body)
    assert answer.json()["error"]["code"] == "unknown_parameter"
    assert answer.json()["error"]["param"] == "y" * 200 + "..."
    assert len(answer.text) < 4000


@pytest.mark.parametrize("content", [b"[]", b"5", b"null", b'"x"', b"NaN"])
def test_a_body_that_is_no_object_is_a_400(content: bytes) -> None:
    headers = {"content-type": "application/json"}
    app = create_app(ScriptedService())
    answer = call(app, "POST", COMPLETIONS, content=content, headers=headers)
    assert answer.status_code == 400
    ErrorAnswer.model_validate(answer.json())


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_must_be_declared_as_json(content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    app = create_app(ScriptedService())
    answer = call(app, "POST", COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_may_be_declared_in_any_spelling(content_type: str) -> None:
    body = json.dumps({"prompt": "é"}, ensure_ascii=False).encode()
    app = create_app(ScriptedService())
    answer = call(app, "POST", COMPLETIONS, content=body, headers={"content-type": content_type})
    assert answer.status_code == 200
