"""Log-probabilities in OpenAI's two spellings.

Owns how one token is written alone. Must not know a stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from controller.runtime.detokenize import REPLACEMENT
from controller.runtime.generation import TokenEvent, Tokenizer

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
    """A token with its score and where its text begins in the completion."""

    event: TokenEvent
    text_offset: int


def completion_logprobs(
    tokens: Sequence[ScoredToken], speller: TokenSpeller, num_logprobs: int
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion; alternatives only if at least one was asked."""
    top: list[dict[str, float]] | None = None
    if num_logprobs > 0:
        top = []
        for token in tokens:
            entries: dict[str, float] = {}
            for alternative in token.event.top_logprobs:
                # Two ids may be written alike: the likelier one stands first and stays.
                entries.setdefault(
                    speller.spell(alternative.token_id), _finite(alternative.logprob)
                )
            entries.setdefault(speller.spell(token.event.token_id), _finite(token.event.logprob))
            top.append(entries)
    return {
        "tokens": [speller.spell(token.event.token_id) for token in tokens],
        "token_logprobs": [_finite(token.event.logprob) for token in tokens],
        "top_logprobs": top,
        "text_offset": [token.text_offset for token in tokens],
    }


def chat_logprobs(
    tokens: Sequence[ScoredToken], speller: TokenSpeller, num_logprobs: int
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion, `num_logprobs` alternatives a token."""
    content = []
    for token in tokens:
        event = token.event
        content.append(
            {
                **_entry(speller, event.token_id, event.logprob),
                "top_logprobs": [
                    _entry(speller, alternative.token_id, alternative.logprob)
                    for alternative in event.top_logprobs[:num_logprobs]
                ],
            }
        )
    return {"content": content, "refusal": None}


def _entry(speller: TokenSpeller, token_id: int, logprob: float | None) -> dict[str, Any]:
    text = speller.spell(token_id)
    # Part of a character has no text, and its bytes cannot be told from its replacement.
    encoded = None if REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": _finite(logprob), "bytes": encoded}


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else MIN_LOGPROB
