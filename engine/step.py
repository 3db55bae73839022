"""The words of one step: what was decided (`StepPlan`) and what happened (`StepReport`).

Owns frozen data only. Must not import anything of the project, read a clock or know an SLO: the
decision record and the admission reasons travel through the engine unread.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class WorkKind(enum.StrEnum):
    """What a request's share of a step computes."""

    PREFILL = "prefill"
    DECODE = "decode"


class PreemptionMethod(enum.StrEnum):
    """What becomes of a preempted request's KV: dropped and computed again, or moved to host memory
    and back.
    """

    RECOMPUTE = "recompute"
    SWAP = "swap"


class AdmissionAction(enum.StrEnum):
    """What was decided about a request that has no tokens yet."""

    ADMIT = "admit"
    WAIT = "wait"
    REJECT = "reject"


class StepWork(NamedTuple):
    """One request's share of a step; a tuple, for a step has many and making them is half of a
    plan.

    `num_tokens` tokens are computed after the `num_computed_tokens` that already stand in the KV
    cache. A decode computes exactly one token. A prefill chunk that reaches the last known token
    samples too; the loop derives that from its own counters.
    """

    request_id: str
    kind: WorkKind
    num_tokens: int
    num_computed_tokens: int

    @property
    def num_context_tokens(self) -> int:
        """Tokens in the KV cache once this work is done: `num_computed_tokens + num_tokens`."""
        return self.num_computed_tokens + self.num_tokens


@dataclass(frozen=True, slots=True)
class Admission:
    """A verdict on a waiting request; `reason` is a stable word such as `overloaded` or
    `context_length`.

    `predicted_ttft_s` counts from arrival. `retry_after_s` is set on rejections that may succeed
    later, None on those that cannot. `is_degraded` says that the request is served without its
    promise (best effort).
    """

    request_id: str
    action: AdmissionAction
    reason: str
    message: str = ""
    predicted_ttft_s: float | None = None
    retry_after_s: float | None = None
    is_degraded: bool = False


@dataclass(frozen=True, slots=True)
class Preemption:
    """Who gives way, and how. A swap needs as many free host blocks as the request holds."""

    request_id: str
    method: PreemptionMethod = PreemptionMethod.RECOMPUTE


@dataclass(frozen=True, slots=True)
class StepDecision:
    """Why the step is what it is (read back from telemetry; the engine never reads it).

    Budgets are prompt tokens except `token_budget`, which counts all tokens of the step.
    `lower_bound_tokens` is N⁻ (what the TTFT deadlines demand), `upper_bound_tokens` N⁺ (what the
    decodes' slack allows, by the mean alone where that is probed). `slack_s` is the tightest
    decode's `next_due - now`, negative = late, None without a decode that has a deadline.
    Predictions are seconds, None for a planner without a cost model.
    """

    policy: str
    token_budget: int
    lower_bound_tokens: int
    upper_bound_tokens: int
    binding_constraint: str
    tightest_request_id: str | None = None
    slack_s: float | None = None
    predicted_mean_s: float | None = None
    predicted_upper_s: float | None = None
    model_version: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The decision for one step: who computes how many tokens, who comes in, who is turned away,
    who gives way.

    `work` names each request at most once. A waiting request may only appear in `work` if it is in
    `admissions` with ADMIT or was admitted before. `preemptions` are applied before any block is
    reserved.
    """

    work: tuple[StepWork, ...] = ()
    admissions: tuple[Admission, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    decision: StepDecision | None = None

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens computed in this step."""
        return sum(w.num_tokens for w in self.work if w.kind is WorkKind.PREFILL)

    @property
    def num_decode_tokens(self) -> int:
        """Decodes in this step, one token each."""
        return sum(w.num_tokens for w in self.work if w.kind is WorkKind.DECODE)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One alternative at a position.

    `logprob` is the natural logarithm under the unmodified distribution.
    """

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What a runner sampled for one request; log-probabilities only where the request asked for
    them.

    `failure` says in one line why no token could be sampled (logits that are not finite, say);
    `token_id` means nothing then.
    """

    request_id: str
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class PromptToken:
    """How likely a prompt token was after the tokens before it; `rank` 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of consecutive prompt tokens, `start` being the first one's position.

    A chunk that computes positions s..e-1 scores the tokens at s+1..e (the token after the last
    prompt token is sampled, not scored); the token at position 0 has no score.
    """

    request_id: str
    start: int
    tokens: tuple[PromptToken, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a runner brings back from one forward pass."""

    tokens: Sequence[SampledToken] = ()
    prompt_scores: Sequence[PromptScores] = ()


class EmittedToken(NamedTuple):
    """A sampled token after commit; a tuple, for every step makes one per stream.

    `index` counts the request's output tokens from 0; `at` is on the loop's clock.
    """

    request_id: str
    token_id: int
    index: int  # type: ignore[assignment]  # of the answer; nobody looks a token up in itself
    at: float
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one pass of the loop did.

    `duration_s` is wall time from the start of this step to the start of the next one (planning,
    bookkeeping and the observers of the step before included), because that is the gap a stream
    sees; `planner_s` and `execute_s` are parts of it. `is_executed` is False where the plan held no
    work (only refusals, say) or one forward was not enough, and nothing was timed that a cost model
    could learn from. `num_retries` counts the forwards beyond the first, made to find the request
    that fails; `num_swapped_blocks` the blocks moved to host memory or back, `num_failed_swaps` the
    copies that were tried and failed. Counts of requests and blocks are those after commit; used
    blocks are held by requests, cached ones are free but still hold the keys and values of a known
    prefix.
    """

    step_no: int
    started_at: float
    duration_s: float
    planner_s: float
    execute_s: float
    plan: StepPlan
    is_executed: bool
    num_running: int
    num_waiting: int
    num_preempted: int
    num_blocks_used: int
    num_blocks_total: int
    tokens: tuple[EmittedToken, ...] = ()
    prompt_scores: tuple[PromptScores, ...] = ()
    finished: tuple[str, ...] = ()
    failure: str | None = None
    num_retries: int = 0
    num_swapped_blocks: int = 0
    num_failed_swaps: int = 0
    num_blocks_cached: int = 0
    num_host_blocks_used: int = 0
    num_host_blocks_total: int = 0
