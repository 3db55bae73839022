"""Log-probabilities in OpenAI's two spellings, and in vLLM's of a prompt.

Owns how one token is written alone. Must not know a stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from controller.runtime.detokenize import REPLACEMENT
from controller.runtime.generation import Tokenizer
from engine.step import PromptToken, TokenLogprob

MIN_LOGPROB = -9999.0
"""What JSON shows for a probability of zero, which has no finite logarithm (OpenAI's number)."""


class TokenSpeller:
    """Writes single tokens as they read inside a text, spaces in front included."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        # Some tokenizers cut the space in front of the first token: a harmless token stands there.
        self._anchor = anchor
        self._anchor_text = tokenizer.decode(anchor, skip_special_tokens=False) if anchor else ""
        self.spell = lru_cache(maxsize=32768)(self._spell)

    def _spell(self, token_id: int) -> str:
        text = self._tokenizer.decode([*self._anchor, token_id], skip_special_tokens=False)
        if self._anchor and text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its score and where its text begins in the answer's text.

    `logprob` is None for a token that has none: the first one of a prompt.
    """

    token_id: int
    text_offset: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


def completion_logprobs(
    tokens: Sequence[ScoredToken], speller: TokenSpeller, num_logprobs: int
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion; alternatives only if at least one was asked."""
    return {
        "tokens": [speller.spell(token.token_id) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(token, speller, num_logprobs) for token in tokens]
        if num_logprobs > 0
        else None,
        "text_offset": [token.text_offset for token in tokens],
    }


def _top(token: ScoredToken, speller: TokenSpeller, num_logprobs: int) -> dict[str, Any] | None:
    """Return the alternatives at one position, the token itself among them."""
    if token.logprob is None:
        return None
    entries: dict[str, Any] = {}
    for alternative in token.top_logprobs[:num_logprobs]:
        # Two ids may be written alike: the likelier one stands first and stays.
        entries.setdefault(speller.spell(alternative.token_id), _finite(alternative.logprob))
    entries.setdefault(speller.spell(token.token_id), _finite(token.logprob))
    return entries


def chat_logprobs(
    tokens: Sequence[ScoredToken], speller: TokenSpeller, num_logprobs: int
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion, `num_logprobs` alternatives a token."""
    content = [
        {
            **_entry(speller, token.token_id, token.logprob),
            "top_logprobs": [
                _entry(speller, alternative.token_id, alternative.logprob)
                for alternative in token.top_logprobs[:num_logprobs]
            ],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    scores: Sequence[PromptToken], speller: TokenSpeller, num_logprobs: int
) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` as vLLM writes them, one entry per prompt token, None for the first.

    An entry maps token ids, as text, to `{logprob, rank, decoded_token}`: the prompt's own token
    first, then the `num_logprobs` likeliest.
    """
    entries: list[dict[str, Any] | None] = [None]
    for token in scores:
        ranked = [(token.token_id, token.logprob, token.rank)]
        for rank, other in enumerate(token.top_logprobs[:num_logprobs], start=1):
            if other.token_id != token.token_id:
                ranked.append((other.token_id, other.logprob, rank))
        entries.append(
            {
                str(token_id): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": speller.spell(token_id),
                }
                for token_id, logprob, rank in ranked
            }
        )
    return entries


def _entry(speller: TokenSpeller, token_id: int, logprob: float | None) -> dict[str, Any]:
    text = speller.spell(token_id)
    # Part of a character has no text, and its bytes cannot be told from its replacement.
    encoded = None if REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": _finite(logprob), "bytes": encoded}


def _finite(logprob: float | None) -> float | None:
    """Return a number that JSON can write; None, where there is no score, stays."""
    if logprob is None or math.isfinite(logprob):
        return logprob
    return MIN_LOGPROB
