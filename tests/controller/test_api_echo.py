"""`echo` and `prompt_logprobs`: the prompt's text, its scores, and where each token begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from controller.api.app import create_app
from controller.api.echo import echo_of_ids, echo_of_text
from controller.api.responses import ChatAnswer, CompletionAnswer
from tests.controller.service_double import (
    ByteTokenizer,
    ScriptedService,
    call,
    says,
    sse,
    usage_of,
)

PATH = "/v1/completions"


def post(service: ScriptedService, path: str = PATH, **body: Any) -> Any:
    answer = call(create_app(service), "POST", path, body=body)
    assert answer.status_code == 200, answer.text
    return answer


def choice_of(service: ScriptedService, **body: Any) -> Any:
    (choice,) = post(service, **body).json()["choices"]
    return choice


def test_echo_puts_the_prompt_in_front_and_scores_nothing_unasked() -> None:
    service = ScriptedService(says("there"))
    choice = choice_of(service, prompt="hi ", echo=True)
    assert choice["text"] == "hi there"
    assert choice["logprobs"] is None
    assert service.request.sampling.num_prompt_logprobs is None


def test_echo_with_logprobs_scores_the_prompt_first() -> None:
    service = ScriptedService(says("yo", ends_with_eos=False))
    answer = post(service, prompt="hi", echo=True, logprobs=2, max_tokens=2)
    body = answer.json()
    CompletionAnswer.model_validate(body)
    assert service.request.sampling.num_prompt_logprobs == 2
    (choice,) = body["choices"]
    assert choice["text"] == "hiyo"
    logprobs = choice["logprobs"]
    # The tokenizer's own first token has an entry and no text.
    assert logprobs["tokens"] == ["<bos>", "h", "i", "y", "o"]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -0.5, -1.5]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3]
    assert logprobs["top_logprobs"] == [
        None,
        {"A": -1.065, "B": -1.066, "h": -1.0},
        {"A": -1.065, "B": -1.066, "i": -2.0},
        {"A": -1.065, "B": -1.066, "y": -0.5},
        {"A": -1.065, "B": -1.066, "o": -1.5},
    ]
    assert body["usage"] == usage_of(3, 2)
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scoring_a_prompt_as_the_evaluation_harness_asks(max_tokens: int) -> None:
    service = ScriptedService(says("!"))
    choice = choice_of(
        service, prompt=[104, 105, 106], echo=True, logprobs=1, max_tokens=max_tokens,
        temperature=0, seed=1234,
    )  # fmt: skip
    assert service.request.max_tokens == max_tokens
    logprobs = choice["logprobs"]
    assert choice["finish_reason"] == "length"
    assert choice["text"] == "hij!"[: 3 + max_tokens]
    assert len(logprobs["tokens"]) == 3 + max_tokens
    assert logprobs["token_logprobs"][:3] == [None, -1.0, -2.0]
    assert logprobs["text_offset"] == [0, 1, 2, 3][: 3 + max_tokens]
    assert all(len(top) >= 1 for top in logprobs["top_logprobs"][1:])


def test_a_prompt_that_fills_the_context_can_be_scored_but_not_continued() -> None:
    service = ScriptedService(max_model_len=3)
    assert choice_of(service, prompt=[104, 105, 106], max_tokens=0, echo=True)["text"] == "hij"
    answer = call(create_app(service), "POST", PATH, body={"prompt": [1, 2, 3], "max_tokens": 1})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    body = {"prompt": [1, 2, 3, 4], "max_tokens": 0}
    answer = call(create_app(service), "POST", PATH, body=body)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_prompt_of_one_token_has_one_entry_without_a_score() -> None:
    choice = choice_of(ScriptedService(), prompt=[104], echo=True, logprobs=1, max_tokens=0)
    assert choice["logprobs"] == {
        "tokens": ["h"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0],
    }  # fmt: skip


def test_logprobs_of_zero_alternatives() -> None:
    choice = choice_of(ScriptedService(), prompt=[1, 2], echo=True, logprobs=0, max_tokens=0)
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
    assert choice["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("prompt", ["hi", [104, 105]])
def test_a_stream_sends_the_prompt_in_its_first_chunk(prompt: object) -> None:
    service = ScriptedService(says("yo"))
    answer = post(
        service, prompt=prompt, echo=True, logprobs=1, stream=True, add_special_tokens=False
    )
    chunks = list(sse(answer.text))[:-1]
    for chunk in chunks:
        CompletionAnswer.model_validate(chunk)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["hi", "y", "o", "", ""]
    assert choices[0]["logprobs"]["token_logprobs"] == [None, -1.0]
    assert choices[0]["finish_reason"] is None
    offsets = [o for c in choices if c["logprobs"] for o in c["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 3, 4]


def test_a_stream_of_the_prompt_alone() -> None:
    answer = post(ScriptedService(), prompt="hi", echo=True, stream=True, max_tokens=0)
    chunks = list(sse(answer.text))[:-1]
    pieces = [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks]
    assert pieces == [("hi", None), ("", "length")]


def test_a_character_that_the_prompt_leaves_open_belongs_to_the_completion() -> None:
    start, rest = "é".encode()
    service = ScriptedService(says([rest, 33], ends_with_eos=False))
    choice = choice_of(service, prompt=[97, start], echo=True, max_tokens=2, logprobs=0)
    assert choice["text"] == "aé!"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]
    # Nothing will finish it: it is shown as what it is.
    alone = choice_of(ScriptedService(), prompt=[97, start], echo=True, max_tokens=0)
    assert alone["text"] == "a\ufffd"


def test_special_tokens_of_a_prompt_are_shown_like_those_of_a_completion() -> None:
    body = {"prompt": [257, 104], "echo": True, "max_tokens": 0}
    assert choice_of(ScriptedService(), **body)["text"] == "h"
    assert choice_of(ScriptedService(), skip_special_tokens=False, **body)["text"] == "<bos>h"


def test_stop_strings_are_not_looked_for_in_the_prompt() -> None:
    choice = choice_of(ScriptedService(says("b END c")), prompt="a END ", echo=True, stop="END")
    assert choice["text"] == "a END b "


def test_every_choice_repeats_the_prompt_and_the_first_one_scored_it() -> None:
    service = ScriptedService(says("A", ends_with_eos=False), says("B", ends_with_eos=False))
    body = post(service, prompt=[1, 2], n=2, echo=True, logprobs=1, prompt_logprobs=0, max_tokens=1)
    first, second = body.json()["choices"]
    assert [first["text"][-1], second["text"][-1]] == ["A", "B"]
    assert first["logprobs"]["token_logprobs"] == second["logprobs"]["token_logprobs"]
    assert first["prompt_logprobs"] == second["prompt_logprobs"]
    asked = [stream.request.sampling.num_prompt_logprobs for stream in service.streams]
    assert asked == [1, None]


def test_prompt_logprobs_as_vllm_writes_them() -> None:
    service = ScriptedService()
    body = post(service, prompt=[104, 65, 105], prompt_logprobs=1, max_tokens=1).json()
    CompletionAnswer.model_validate(body)
    (choice,) = body["choices"]
    assert service.request.sampling.num_prompt_logprobs == 1
    assert choice["prompt_logprobs"] == [
        None,
        # The likeliest token is the prompt's own: it stands once.
        {"65": {"logprob": -1.0, "rank": 1, "decoded_token": "A"}},
        {
            "105": {"logprob": -2.0, "rank": 2, "decoded_token": "i"},
            "65": {"logprob": -1.065, "rank": 1, "decoded_token": "A"},
        },
    ]
    assert choice["text"] == "h"
    assert choice["logprobs"] is None


def test_echo_and_prompt_logprobs_together_ask_for_the_larger_number() -> None:
    service = ScriptedService()
    choice = choice_of(
        service, prompt=[1, 2], echo=True, logprobs=1, prompt_logprobs=3, max_tokens=0
    )
    assert service.request.sampling.num_prompt_logprobs == 3
    assert len(choice["prompt_logprobs"][1]) == 4
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    # Without echo `logprobs` says nothing of the prompt.
    service = ScriptedService()
    choice_of(service, prompt=[1, 2], logprobs=5)
    assert service.request.sampling.num_prompt_logprobs is None


def test_chat_has_the_scores_of_its_prompt_at_the_top() -> None:
    service = ScriptedService()
    messages = [{"role": "user", "content": "hi"}]
    body = post(service, "/v1/chat/completions", messages=messages, prompt_logprobs=0, n=2).json()
    ChatAnswer.model_validate(body)
    num_prompt = len(service.streams[0].request.prompt_token_ids)
    assert len(body["prompt_logprobs"]) == num_prompt == body["usage"]["prompt_tokens"]
    assert body["prompt_logprobs"][0] is None
    assert body["prompt_logprobs"][1]["117"]["decoded_token"] == "u"


class Spacing(ByteTokenizer):
    """Decodes with a space in front, as some tokenizers do."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return " " + super().decode(token_ids, skip_special_tokens=skip_special_tokens)


class Stripping(ByteTokenizer):
    """Loses spaces in front."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens).lstrip(" ")


class Shouting(ByteTokenizer):
    """Normalises: nothing comes back as it was."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens).upper() + "!"


@pytest.mark.parametrize(
    ("tokenizer", "text", "offsets"),
    [
        (ByteTokenizer(), "añb", (0, 1, 1, 2)),
        (Spacing(), "abc", (0, 1, 2)),
        (Stripping(), " abc", (0, 1, 2, 3)),
    ],
)
def test_the_text_is_repeated_exactly_whatever_the_tokenizer_makes_of_it(
    tokenizer: ByteTokenizer, text: str, offsets: tuple[int, ...]
) -> None:
    echo = echo_of_text(tokenizer, text, list(text.encode()))
    assert (echo.text, echo.offsets) == (text, offsets)


def test_offsets_stay_within_a_text_that_does_not_come_back() -> None:
    echo = echo_of_text(Shouting(), "abc", [97, 98, 99])
    assert echo.text == "abc"
    assert len(echo.offsets) == 3
    assert all(0 <= offset <= 3 for offset in echo.offsets)
    assert list(echo.offsets) == sorted(echo.offsets)


def test_each_completion_continues_a_detokenizer_of_its_own() -> None:
    start, rest = "é".encode()
    echo = echo_of_ids(ByteTokenizer(), [97, start], skip_special_tokens=True, is_all=False)
    assert (echo.text, echo.offsets) == ("a", (0, 1))
    assert echo.detokenizer is not None
    twins = [echo.detokenizer.fork() for _ in range(2)]
    assert [twin.push(rest) for twin in twins] == ["é", "é"]
    assert [twins[0].push(98), twins[1].push(99)] == ["b", "c"]
