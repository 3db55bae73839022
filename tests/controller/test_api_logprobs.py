"""How a single token is written beside its score."""

from __future__ import annotations

from collections.abc import Sequence

from controller.api.logprobs import (
    ScoredToken,
    TokenSpeller,
    chat_logprobs,
    completion_logprobs,
)
from engine.step import TokenLogprob
from tests.controller.service_double import ByteTokenizer


class SpacingTokenizer(ByteTokenizer):
    """A tokenizer that, like SentencePiece, cuts the space in front of the first token."""

    words = ("a", " the", " world", "the", "\ufffd")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.words.index(text)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.words[i] for i in token_ids).removeprefix(" ")


class NoLetters(SpacingTokenizer):
    """A tokenizer that has no token for a plain letter."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return []


def scored(*ids: int, top: tuple[TokenLogprob, ...] = ()) -> list[ScoredToken]:
    return [ScoredToken(i, n, -1.0, top) for n, i in enumerate(ids)]


def test_a_token_keeps_the_space_that_it_has_inside_a_text() -> None:
    speller = TokenSpeller(SpacingTokenizer())
    assert [speller.spell(i) for i in (1, 2, 3)] == [" the", " world", "the"]
    assert TokenSpeller(NoLetters()).spell(1) == "the"


def test_part_of_a_character_has_no_bytes() -> None:
    speller = TokenSpeller(SpacingTokenizer())
    content = chat_logprobs(scored(4, 1), speller, 0)["content"]
    assert [entry["bytes"] for entry in content] == [None, list(b" the")]


def test_the_likelier_of_two_alternatives_that_are_written_alike_stays() -> None:
    class Twins(SpacingTokenizer):
        words = ("a", "x", "x", "y", "z")

    top = (TokenLogprob(1, -0.1), TokenLogprob(2, -0.2), TokenLogprob(3, float("-inf")))
    logprobs = completion_logprobs(scored(4, top=top), TokenSpeller(Twins()), 3)
    assert logprobs["top_logprobs"] == [{"x": -0.1, "y": -9999.0, "z": -1.0}]


def test_chat_shows_no_more_alternatives_than_asked() -> None:
    top = tuple(TokenLogprob(i, -float(i)) for i in range(4))
    (entry,) = chat_logprobs(scored(1, top=top), TokenSpeller(SpacingTokenizer()), 2)["content"]
    assert [each["token"] for each in entry["top_logprobs"]] == ["a", " the"]
