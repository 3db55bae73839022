"""The frozen rows that cross the border into the store.

Owns what is remembered of a run, a step, a request and an event. Must not hold prompt text or
secrets, know SQL, or import the cost model or the controller: the features arrive as plain numbers.

Units as in the tables: `_at` epoch milliseconds UTC, `_s` seconds, `_clock_s` monotonic seconds
comparable within one run.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from engine.step import StepReport


class EventKind(enum.StrEnum):
    """What an event row tells."""

    REFUSAL = "refusal"
    PREEMPTION = "preemption"
    RELEGATION = "relegation"
    STEP_FAILURE = "step_failure"
    REQUEST_FAILURE = "request_failure"
    DRIFT_ALARM = "drift_alarm"
    TELEMETRY_LOSS = "telemetry_loss"
    RUN_LOST = "run_lost"
    WARM_START = "warm_start"
    MODEL_REFIT = "model_refit"
    ENGINE_STOPPED = "engine_stopped"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One server life. `settings` is JSON; values named `api_key`, `password`.. are masked."""

    kind: ClassVar[str] = "run"

    run_id: str
    started_at: int
    model: str
    device: str
    attention_backend: str
    policy: str
    code_version: str
    replica_id: str = "local"
    profile: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


class StepWorkRecord(NamedTuple):
    """One request's share of a step; a tuple, because the loop's thread makes many.

    `work_kind` is `prefill` or `decode`. `token_index` is the index (from 0) of the output token
    that this work sampled, None for a chunk that samples nothing; `token_offset_s` is that token's
    instant in seconds after the step's start.
    """

    request_id: str
    work_kind: str
    num_tokens: int
    num_computed_tokens: int
    token_index: int | None = None
    token_offset_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward pass with its shares and the decision behind it.

    `prefill_tokens` .. `chunk_squared_tokens` are the cost model's features, unscaled, in its
    order. Decision fields are those of `engine.step.StepDecision`, None for a planner that gives no
    account. `num_chunks` and `num_prompt_logits` are the last two features. None, like the counts
    of retries and blocks before them, in rows that are older than they.
    """

    kind: ClassVar[str] = "step"

    run_id: str
    step_no: int
    at: int
    clock_s: float
    duration_s: float
    planner_s: float
    execute_s: float
    prefill_tokens: int
    decode_requests: int
    decode_context_tokens: int
    chunk_past_tokens: int
    chunk_squared_tokens: int
    num_emitted_tokens: int
    num_running: int
    num_waiting: int
    num_preempted: int
    num_blocks_used: int
    num_blocks_total: int
    policy: str | None = None
    token_budget: int | None = None
    lower_bound_tokens: int | None = None
    upper_bound_tokens: int | None = None
    binding_constraint: str | None = None
    tightest_request_id: str | None = None
    slack_s: float | None = None
    predicted_mean_s: float | None = None
    predicted_upper_s: float | None = None
    model_version: int | None = None
    failure: str | None = None
    num_retries: int | None = None
    num_swapped_blocks: int | None = None
    num_blocks_cached: int | None = None
    num_chunks: int | None = None
    num_prompt_logits: int | None = None
    num_failed_swaps: int | None = None
    work: tuple[StepWorkRecord, ...] = ()

    @classmethod
    def from_report(
        cls, report: StepReport, *, run_id: str, at: int, features: Sequence[float]
    ) -> StepRecord:
        """Describe an executed step; `at` is `report.started_at` in epoch milliseconds.

        `features` are the cost model's seven numbers for `report`, in its order; ValueError
        otherwise.
        """
        prefill, decodes, context, past, squared, chunks, logits = (
            int(value) for value in features
        )
        tokens = {token.request_id: token for token in report.tokens}
        work = []
        for item in report.plan.work:
            token = tokens.get(item.request_id)
            work.append(
                StepWorkRecord(
                    item.request_id,
                    item.kind.value,
                    item.num_tokens,
                    item.num_computed_tokens,
                    None if token is None else token.index,
                    None if token is None else token.at - report.started_at,
                )
            )
        decision = report.plan.decision
        return cls(
            run_id=run_id,
            step_no=report.step_no,
            at=at,
            clock_s=report.started_at,
            duration_s=report.duration_s,
            planner_s=report.planner_s,
            execute_s=report.execute_s,
            prefill_tokens=prefill,
            decode_requests=decodes,
            decode_context_tokens=context,
            chunk_past_tokens=past,
            chunk_squared_tokens=squared,
            num_emitted_tokens=len(report.tokens),
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            num_preempted=report.num_preempted,
            num_blocks_used=report.num_blocks_used,
            num_blocks_total=report.num_blocks_total,
            policy=decision.policy if decision else None,
            token_budget=decision.token_budget if decision else None,
            lower_bound_tokens=decision.lower_bound_tokens if decision else None,
            upper_bound_tokens=decision.upper_bound_tokens if decision else None,
            binding_constraint=decision.binding_constraint if decision else None,
            tightest_request_id=decision.tightest_request_id if decision else None,
            slack_s=decision.slack_s if decision else None,
            predicted_mean_s=decision.predicted_mean_s if decision else None,
            predicted_upper_s=decision.predicted_upper_s if decision else None,
            model_version=decision.model_version if decision else None,
            failure=report.failure,
            num_retries=report.num_retries,
            num_swapped_blocks=report.num_swapped_blocks,
            num_failed_swaps=report.num_failed_swaps,
            num_blocks_cached=report.num_blocks_cached,
            num_chunks=chunks,
            num_prompt_logits=logits,
            work=tuple(work),
        )


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, offered once, at its end: what was promised, what was decided, what happened.

    `decision` is `admit`, `reject` or `wait` (empty if the request ended before any verdict) with
    its `reason`; `finish_reason` is an `engine.request.FinishReason`. `queue_s` runs from arrival
    to the first scheduled chunk, `prefill_s` on to the first token, `decode_s` on to the end.
    `attained` says whether every target given was met; None without targets.
    """

    kind: ClassVar[str] = "request"

    run_id: str
    request_id: str
    slo_class: str
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    arrived_at: int
    arrived_clock_s: float
    ended_at: int
    finish_reason: str
    decision: str = ""
    reason: str = ""
    is_degraded: bool = False
    priority: int = 0
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    e2e_target_s: float | None = None
    num_cached_tokens: int = 0
    admitted_at: int | None = None
    first_token_at: int | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    longest_gap_s: float | None = None
    fluidity: float | None = None
    num_preemptions: int = 0
    predicted_ttft_s: float | None = None
    failure: str | None = None
    is_ttft_met: bool | None = None
    is_tpot_met: bool | None = None
    is_e2e_met: bool | None = None
    attained: bool | None = None


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Something worth telling beside steps and requests; `numbers` is a flat JSON object."""

    kind: ClassVar[str] = "event"

    run_id: str
    at: int
    event_kind: str
    reason: str
    request_id: str | None = None
    step_no: int | None = None
    numbers: Mapping[str, float | int | str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelSnapshotRecord:
    """The cost model of a run as it stands now; a later one of the same run and key replaces it.

    `key` says what its latencies depend on (model, device, dtype..); `document` is the model's own
    JSON. `version` counts its updates; `mape` and `coverage` are shares over its last steps.
    """

    kind: ClassVar[str] = "model_snapshot"

    run_id: str
    at: int
    learner: str
    version: int
    num_observed: int
    mape: float
    coverage: float
    key: Mapping[str, str | int]
    document: Mapping[str, Any]


def key_hash(key: Mapping[str, str | int]) -> str:
    """Return what a cost model's key is found by: SHA-256 of its JSON, names in order."""
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode("utf-8")).hexdigest()


Record = StepRecord | RequestRecord | EventRecord | ModelSnapshotRecord


def num_rows(record: Record) -> int:
    """Return how many rows the record becomes: a step brings its shares along."""
    return 1 + len(record.work) if isinstance(record, StepRecord) else 1
