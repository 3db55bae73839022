"""One choice of an answer: tokens in, text and scores out, and how it ended.

Owns detokenising, stop strings and the scores of one stream. Must not know JSON or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from controller.api.echo import EchoedPrompt
from controller.api.errors import ApiError, refusal
from controller.api.logprobs import ScoredToken
from controller.runtime.detokenize import Detokenizer, StopMatcher
from controller.runtime.generation import (
    AdmissionEvent,
    FinishedEvent,
    GenerationEvent,
    GenerationRequest,
    GenerationStream,
    PromptEvent,
    TokenEvent,
    Tokenizer,
)
from engine.request import FinishReason
from engine.step import Admission, PromptToken

_FINISH_NAMES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a body wants its text: stop strings and special tokens."""

    stop_strings: tuple[str, ...] = ()
    is_stop_included: bool = False
    skip_special_tokens: bool = True
    ending_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event adds to a choice; `finish_reason` is set on the last one."""

    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    finish_reason: str | None = None


@dataclass(slots=True)
class Choice:
    """The state of one stream's text. Feed it every event, in order.

    `leader` is the first choice of the same prompt, None for that one itself: only the leader's
    request asks for the scores of the prompt, and it has them before another choice begins.
    """

    index: int
    request: GenerationRequest
    stream: GenerationStream
    detokenizer: Detokenizer
    matcher: StopMatcher
    ending_token_ids: frozenset[int]
    echo: EchoedPrompt | None = None
    leader: Choice | None = None
    admission: Admission | None = None
    finished: FinishedEvent | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    _scores: tuple[PromptToken, ...] = field(default=(), init=False)
    _num_chars: int = field(default=0, init=False)

    @classmethod
    def of(
        cls,
        index: int,
        request: GenerationRequest,
        stream: GenerationStream,
        tokenizer: Tokenizer,
        options: TextOptions,
        *,
        echo: EchoedPrompt | None = None,
        leader: Choice | None = None,
    ) -> Choice:
        """Return a choice that has no text yet."""
        if echo is not None and echo.detokenizer is not None:
            detokenizer = echo.detokenizer.fork()
        else:
            detokenizer = Detokenizer(
                tokenizer, request.prompt_token_ids, skip_special_tokens=options.skip_special_tokens
            )
        matcher = StopMatcher(options.stop_strings, is_included=options.is_stop_included)
        return cls(
            index,
            request,
            stream,
            detokenizer,
            matcher,
            options.ending_token_ids,
            echo=echo,
            leader=leader,
        )

    @property
    def is_finished(self) -> bool:
        """Whether the last event was seen."""
        return self.finished is not None

    @property
    def is_judged(self) -> bool:
        """Whether a first verdict is known: from then on the choice is not refused out of hand."""
        return self.admission is not None or self.num_tokens > 0 or self.is_finished

    @property
    def predicted_ttft_s(self) -> float | None:
        """The prediction at admission, seconds from arrival."""
        return None if self.admission is None else self.admission.predicted_ttft_s

    @property
    def decision(self) -> str:
        """What `x-slo-decision` says of a request that was not rejected."""
        is_degraded = self.admission is not None and self.admission.is_degraded
        return "degraded" if is_degraded else "admitted"

    @property
    def prompt_scores(self) -> tuple[PromptToken, ...]:
        """Scores of the prompt's tokens from the second one on; empty if none were asked for."""
        return self._scores if self.leader is None else self.leader.prompt_scores

    def feed(self, event: GenerationEvent) -> Delta | None:
        """Take an event; None if it adds nothing that a client sees, ApiError on a failure."""
        if isinstance(event, AdmissionEvent):
            self.admission = event.admission
            return None
        if isinstance(event, PromptEvent):
            return self._take_prompt(event)
        if isinstance(event, TokenEvent):
            return None if self.matcher.is_stopped else self._take_token(event)
        self.finished = event
        return self._end(event)

    def _take_prompt(self, event: PromptEvent) -> Delta | None:
        self.num_cached_tokens = event.num_cached_tokens
        self._scores = event.scores
        echo = self.echo
        if echo is None:
            return None
        self._num_chars = len(echo.text)
        scores = self.prompt_scores
        if not scores and len(self.request.prompt_token_ids) > 1:
            return Delta(echo.text)
        # Nothing comes before the first token, so nothing says how likely it was.
        first = ScoredToken(self.request.prompt_token_ids[0], echo.offsets[0])
        rest = (
            ScoredToken(score.token_id, offset, score.logprob, score.top_logprobs)
            for score, offset in zip(scores, echo.offsets[1:], strict=True)
        )
        return Delta(echo.text, (first, *rest))

    def _take_token(self, event: TokenEvent) -> Delta:
        self.num_tokens += 1
        scored = ScoredToken(event.token_id, self._num_chars, event.logprob, event.top_logprobs)
        # The end-of-text token ends the text without being part of it, special or not.
        is_ending = event.token_id in self.ending_token_ids
        piece = "" if is_ending else self.detokenizer.push(event.token_id)
        self._num_chars += len(piece)
        if self.num_tokens < self.request.sampling.min_tokens:
            text = self.matcher.skip(piece)
        else:
            text = self.matcher.push(piece)
        if self.matcher.is_stopped:
            self.stream.finish(FinishReason.STOP)
        return Delta(text, (scored,))

    def _end(self, event: FinishedEvent) -> Delta:
        if self.matcher.is_stopped:
            return Delta(finish_reason="stop")
        if event.reason is FinishReason.REJECTED:
            verdict = event.admission or self.admission
            if verdict is None:
                raise ApiError(500, "internal_error", "the request was rejected without a reason")
            raise refusal(verdict)
        if event.reason is FinishReason.ERROR:
            failure = event.failure or "the generation failed"
            raise ApiError(500, "generation_failed", failure)
        if event.reason is FinishReason.CANCELLED:
            raise ApiError(503, "cancelled", "the server ended this request")
        text = self.matcher.push(self.detokenizer.flush()) + self.matcher.flush()
        # The text that was held back may end in a stop string.
        name = "stop" if self.matcher.is_stopped else _FINISH_NAMES[event.reason]
        return Delta(text, finish_reason=name)

    def slo_outcome(self) -> dict[str, Any]:
        """Return `slo` of the last chunk or the body: milliseconds, and what was met."""
        finished = self.finished
        if finished is None:
            raise RuntimeError("the outcome of a promise is known at the end")
        return {
            "class": finished.promise.slo_class.name,
            "ttft_ms": to_ms(finished.ttft_s),
            "tpot_ms": to_ms(finished.tpot_s),
            "queue_ms": to_ms(finished.queue_s),
            "ttft_met": finished.is_ttft_met,
            "tpot_met": finished.is_tpot_met,
            "predicted_ttft_ms": to_ms(self.predicted_ttft_s),
        }


def to_ms(duration_s: float | None) -> float | None:
    """Return milliseconds with microseconds kept."""
    return None if duration_s is None else round(duration_s * 1000, 3)
