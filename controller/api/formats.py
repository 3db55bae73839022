"""The JSON of an answer: completions and chat completions, whole and in chunks.

Owns the two spellings behind one protocol. Must not know events or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from controller.api.choices import Choice, Delta
from controller.api.generation import Generation
from controller.api.logprobs import (
    ScoredToken,
    TokenSpeller,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every object of one answer repeats."""

    answer_id: str
    created: int
    model: str

    def around(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the object that holds `choices`."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class Format(Protocol):
    """How one endpoint writes its answers."""

    id_prefix: str

    def opening(self, envelope: Envelope, choice: Choice) -> dict[str, Any] | None:
        """Return the chunk that opens a choice, None if the endpoint has none."""
        ...

    def chunk(self, envelope: Envelope, choice: Choice, delta: Delta) -> dict[str, Any]:
        """Return a chunk of a stream."""
        ...

    def usage_chunk(self, envelope: Envelope, generation: Generation) -> dict[str, Any]:
        """Return the chunk with no choices that carries the usage."""
        ...

    def whole(
        self, envelope: Envelope, generation: Generation, deltas: Sequence[Sequence[Delta]]
    ) -> dict[str, Any]:
        """Return the whole body; `deltas` of each choice, in order."""
        ...


class CompletionFormat:
    """`text_completion` objects."""

    id_prefix = "cmpl-"

    def __init__(
        self,
        speller: TokenSpeller,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self._speller = speller
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs

    def opening(self, envelope: Envelope, choice: Choice) -> dict[str, Any] | None:
        """Completions have no opening chunk."""
        return None

    def chunk(self, envelope: Envelope, choice: Choice, delta: Delta) -> dict[str, Any]:
        """Return a chunk with a piece of text, the last one with `slo`."""
        entry = self._choice(choice, delta.text, delta.tokens, delta.finish_reason)
        return _with_slo(envelope.around("text_completion", [entry]), choice, delta)

    def usage_chunk(self, envelope: Envelope, generation: Generation) -> dict[str, Any]:
        """Return the last chunk before `[DONE]`."""
        return {**envelope.around("text_completion", []), "usage": generation.usage()}

    def whole(
        self, envelope: Envelope, generation: Generation, deltas: Sequence[Sequence[Delta]]
    ) -> dict[str, Any]:
        """Return the body; a single choice's `slo` stands at the top, else each has its own."""
        entries = []
        for choice, parts in zip(generation.choices, deltas, strict=True):
            text = "".join(part.text for part in parts)
            tokens = [token for part in parts for token in part.tokens]
            entries.append(self._choice(choice, text, tokens, parts[-1].finish_reason))
        if self._num_prompt_logprobs is not None:
            for entry, choice in zip(entries, generation.choices, strict=True):
                scores = choice.prompt_scores
                number = self._num_prompt_logprobs
                entry["prompt_logprobs"] = prompt_logprobs(scores, self._speller, number)
        body = {**envelope.around("text_completion", entries), "usage": generation.usage()}
        return _with_outcomes(body, entries, generation)

    def _choice(
        self, choice: Choice, text: str, tokens: Sequence[ScoredToken], finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._num_logprobs is not None and tokens:
            logprobs = completion_logprobs(tokens, self._speller, self._num_logprobs)
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }


class ChatFormat:
    """`chat.completion` objects and their chunks."""

    id_prefix = "chatcmpl-"

    def __init__(
        self,
        speller: TokenSpeller,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self._speller = speller
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs

    def opening(self, envelope: Envelope, choice: Choice) -> dict[str, Any] | None:
        """Return the role-only chunk."""
        return self._chunk(envelope, choice, {"role": "assistant", "content": ""}, (), None)

    def chunk(self, envelope: Envelope, choice: Choice, delta: Delta) -> dict[str, Any]:
        """Return a chunk with a piece of content, the last one with `slo`."""
        content = {"content": delta.text} if delta.text or delta.tokens else {}
        chunk = self._chunk(envelope, choice, content, delta.tokens, delta.finish_reason)
        return _with_slo(chunk, choice, delta)

    def usage_chunk(self, envelope: Envelope, generation: Generation) -> dict[str, Any]:
        """Return the last chunk before `[DONE]`."""
        return {**envelope.around("chat.completion.chunk", []), "usage": generation.usage()}

    def whole(
        self, envelope: Envelope, generation: Generation, deltas: Sequence[Sequence[Delta]]
    ) -> dict[str, Any]:
        """Return the body; a single choice's `slo` stands at the top, else each has its own."""
        entries = []
        for choice, parts in zip(generation.choices, deltas, strict=True):
            tokens = [token for part in parts for token in part.tokens]
            message = {
                "role": "assistant",
                "content": "".join(part.text for part in parts),
                "refusal": None,
            }
            entries.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": self._logprobs(tokens),
                    "finish_reason": parts[-1].finish_reason,
                }
            )
        body = {**envelope.around("chat.completion", entries), "usage": generation.usage()}
        if self._num_prompt_logprobs is not None:
            scores = generation.choices[0].prompt_scores
            number = self._num_prompt_logprobs
            body["prompt_logprobs"] = prompt_logprobs(scores, self._speller, number)
        return _with_outcomes(body, entries, generation)

    def _chunk(
        self,
        envelope: Envelope,
        choice: Choice,
        delta: dict[str, Any],
        tokens: Sequence[ScoredToken],
        finish_reason: str | None,
    ) -> dict[str, Any]:
        entry = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish_reason,
        }
        return envelope.around("chat.completion.chunk", [entry])

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if self._num_logprobs is None or not tokens:
            return None
        return chat_logprobs(tokens, self._speller, self._num_logprobs)


def _with_outcomes(
    body: dict[str, Any], entries: Sequence[dict[str, Any]], generation: Generation
) -> dict[str, Any]:
    if len(entries) == 1:
        return {**body, "slo": generation.choices[0].slo_outcome()}
    for entry, choice in zip(entries, generation.choices, strict=True):
        entry["slo"] = choice.slo_outcome()
    return body


def _with_slo(chunk: dict[str, Any], choice: Choice, delta: Delta) -> dict[str, Any]:
    if delta.finish_reason is None:
        return chunk
    return {**chunk, "slo": choice.slo_outcome()}
