"""The words between a door (HTTP, benchmark, test) and the service: what is asked, and the events
that answer it.

Owns frozen data and two protocols. Must not know HTTP or torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from controller.policy.promise import Promise
from controller.policy.slo import Slo
from engine.request import FinishReason, SamplingParams
from engine.step import Admission, PromptToken, TokenLogprob


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, tokenised, with its sampling and targets.

    `slo_class` names a class of the settings (None = the server's default); `slo` overrides its
    targets field by field where given. `arrived_at` is on the service's clock, taken before
    tokenising. `max_tokens` is already clipped to what fits; 0 computes and scores the prompt
    alone. `label` is the client's own id, echoed only. Requests with different `cache_salt` never
    share KV. `ttft_extra_s` is added to the TTFT target, whoever set it: a request that could not
    start at its arrival (a later choice of a prompt that is computed once) is not late for that.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrived_at: float
    sampling: SamplingParams = field(default_factory=SamplingParams)
    slo: Slo = field(default_factory=Slo)
    slo_class: str | None = None
    priority: int = 0
    tenant: str | None = None
    label: str | None = None
    cache_salt: str | None = None
    ttft_extra_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AdmissionEvent:
    """The first verdict on the request (admit or wait; a rejection arrives as `FinishedEvent`)."""

    admission: Admission


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """The prompt is computed: once, before the first token or, without one, before a regular end.

    `num_cached_tokens` is what the prefix cache spared. `scores` are those of the prompt's tokens
    from the second one on, in order, if the request asked for them.
    """

    num_cached_tokens: int = 0
    scores: tuple[PromptToken, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One output token; `index` from 0, `at` on the service's clock."""

    token_id: int
    index: int
    at: float
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The last event of a stream, exactly one. `admission` is set when the request was rejected
    (`reason` REJECTED).

    `failure` is a line for the client when `reason` is ERROR. `num_cached_tokens` of the prompt
    were spared by the prefix cache. `is_*_met` is None without such a target.
    """

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    promise: Promise
    admission: Admission | None = None
    failure: str | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    is_ttft_met: bool | None = None
    is_tpot_met: bool | None = None
    is_e2e_met: bool | None = None
    num_cached_tokens: int = 0


GenerationEvent = AdmissionEvent | PromptEvent | TokenEvent | FinishedEvent


class GenerationStream(Protocol):
    """The events of one request, in order; iterate from the event loop that submitted it."""

    @property
    def request_id(self) -> str:
        """The server's id of the request."""
        ...

    def __aiter__(self) -> AsyncIterator[GenerationEvent]: ...

    def finish(self, reason: FinishReason) -> None:
        """Ask the engine to end the request: CANCELLED when the client went away.

        STOP on a stop string. Idempotent.
        """
        ...


class Tokenizer(Protocol):
    """Text in and out. Implemented in `engine.device.tokenizer`; thread-safe."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits: token ids must be below it."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return text; incomplete UTF-8 at the end appears as U+FFFD."""
        ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None
    ) -> list[int]:
        """Render messages with a generation prompt and return token ids.

        ValueError with a reason if it cannot.
        """
        ...


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """Liveness and readiness. `reason` says why not, in one line."""

    is_live: bool
    is_ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a client may know about the model; `eos_token_ids` end a text unless `ignore_eos`.

    Prompts that begin alike share KV in whole blocks of `prefix_block_size` tokens, None if they do
    not.
    """

    name: str
    source: str
    created_at: int
    max_model_len: int
    num_pool_tokens: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    prefix_block_size: int | None = None


class InferenceService(Protocol):
    """What a door needs of the service; `controller.runtime.service.Service` implements it."""

    @property
    def model(self) -> ServedModel:
        """The model that is served."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    def now(self) -> float:
        """Return the service's clock, monotonic seconds."""
        ...

    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Hand the request to the loop; call from a running asyncio event loop. Never blocks."""
        ...

    def health(self) -> ServiceHealth:
        """Return liveness from step progress and readiness."""
        ...
