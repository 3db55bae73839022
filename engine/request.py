"""A request's life: counters, phases, the table of legal moves and the one door `move()`.

Owns the state of one generation. Must not know an SLO: `promise` belongs to whoever submitted the
request and is carried unread.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.errors import IllegalMoveError
from engine.step import Admission, PromptScores


class RequestPhase(enum.StrEnum):
    """Where a request stands. Prefill and decode are derived from the counters, not phases."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    ERROR = "error"


LEGAL_MOVES: MappingProxyType[RequestPhase, frozenset[RequestPhase]] = MappingProxyType(
    {
        RequestPhase.WAITING: frozenset({RequestPhase.RUNNING, RequestPhase.FINISHED}),
        RequestPhase.RUNNING: frozenset({RequestPhase.PREEMPTED, RequestPhase.FINISHED}),
        RequestPhase.PREEMPTED: frozenset({RequestPhase.RUNNING, RequestPhase.FINISHED}),
        RequestPhase.FINISHED: frozenset(),
    }
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; the defaults are greedy.

    `temperature` 0 means greedy. `top_k` 0 and `top_p` 1 switch their filters off. `num_logprobs`
    None asks for no log-probabilities, 0 for the chosen token's only. `logit_bias` maps token ids
    to an additive bias. Draws depend on `seed` and the index of the output token alone; None draws
    from a seed that the sampler derives from the request's id. `num_prompt_logprobs` None scores no
    prompt token, 0 the tokens of the prompt alone, n the n likeliest beside each.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    num_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    num_prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One generation asked by a client. Only the loop changes it.

    `max_tokens` bounds the output; 0 ends the request once its prompt is computed. `stop_token_ids`
    of the sampling parameters hold everything that ends it, the end-of-text id included. Instants
    are on the loop's clock. `promise` is opaque to the engine.

    KV: `block_table` holds the blocks of a running request; of a waiting or preempted one, those of
    the prefix cache that hold its beginning (not owned, see `engine.prefix`), and then
    `num_computed_tokens` counts the tokens that they spare. `host_block_table` holds what was moved
    to host memory. `block_hashes` names each full block of known tokens, as far as computed;
    `cache_salt` keeps requests apart that must not share. `num_cached_tokens` is what the prefix
    cache spared when the request first started. `num_scored_tokens` counts the prompt tokens whose
    scores were delivered. `arrival_no` counts the requests that the loop has taken, this one
    included.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrived_at: float
    sampling: SamplingParams = field(default_factory=SamplingParams)
    promise: object | None = None
    phase: RequestPhase = RequestPhase.WAITING
    num_computed_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    host_block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    cache_salt: str | None = None
    num_cached_tokens: int = 0
    num_scored_tokens: int = 0
    arrival_no: int = 0
    admission: Admission | None = None
    admitted_at: float | None = None
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    finish_reason: FinishReason | None = None
    failure: str | None = None
    num_preemptions: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.output_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt plus output: all whose KV must stand before the next token can be sampled."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens whose KV is not computed yet; 1 for a request in decode."""
        return self.num_known_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is missing: the next step computes and samples one."""
        # Written out: a planner asks this of everybody in every step.
        num_output = len(self.output_token_ids)
        num_known = len(self.prompt_token_ids) + num_output
        return num_output > 0 and num_known - self.num_computed_tokens == 1

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.phase is RequestPhase.FINISHED

    def known_token_ids(self, start: int, stop: int) -> list[int]:
        """Return known tokens `start..stop` (prompt first, then output)."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        if stop <= num_prompt:
            return list(self.prompt_token_ids[start:stop])
        return [*self.prompt_token_ids[start:], *self.output_token_ids[: stop - num_prompt]]

    def take_scores(self, scores: PromptScores) -> PromptScores | None:
        """Count prompt scores as delivered and return those that the client has not got, None if it
        has all: a recomputed prompt is scored again.
        """
        first = self.num_scored_tokens + 1
        tokens = scores.tokens[max(0, first - scores.start) :]
        if not tokens:
            return None
        self.num_scored_tokens += len(tokens)
        return PromptScores(self.request_id, first, tokens)

    def move(self, phase: RequestPhase) -> None:
        """Change phase; IllegalMoveError if the table does not allow it."""
        if phase not in LEGAL_MOVES[self.phase]:
            raise IllegalMoveError(f"{self.request_id}: {self.phase} -> {phase}")
        self.phase = phase
