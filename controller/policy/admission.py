"""Verdicts on waiting requests: refusals with reasons, degradation, who is kept (control.md section
5).

Owns the words of admission. Must not predict, order the queue, or change a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from controller.policy.facts import live_promise
from controller.policy.promise import Promise
from controller.policy.settings import PolicyConfig
from controller.policy.slo import OnInfeasible
from engine.blocks import num_blocks_for
from engine.ports import EngineView, RequestView
from engine.request import RequestPhase
from engine.step import Admission, AdmissionAction

ADMITTED = "admitted"
QUEUED = "queued"
DRAINING = "draining"
CONTEXT_LENGTH = "context_length"
KV_NEVER_FITS = "kv_never_fits"
QUEUE_FULL = "queue_full"
DEADLINE_EXPIRED = "deadline_expired"
OVERLOADED = "overloaded"
TTFT_UNREACHABLE = "ttft_unreachable"
TPOT_UNREACHABLE = "tpot_unreachable"

_UNKNOWN_RETRY_S = 1.0


def refuse(
    request: RequestView,
    reason: str,
    message: str,
    *,
    predicted_ttft_s: float | None = None,
    retry_after_s: float | None = None,
) -> Admission:
    """Return a rejection; predictions that are not finite are left out."""
    return Admission(
        request.request_id,
        AdmissionAction.REJECT,
        reason,
        message,
        predicted_ttft_s=_tellable(predicted_ttft_s),
        retry_after_s=_tellable(retry_after_s),
    )


def is_rejected(verdict: Admission | None) -> bool:
    """Whether there is a verdict and it turns the request away."""
    return verdict is not None and verdict.action is AdmissionAction.REJECT


def hard_refusal(request: RequestView, view: EngineView) -> Admission | None:
    """Return the refusal of a new request that no policy could serve, None if it is possible.

    Draining, a prompt that leaves no room for a token in the context, or one that the whole KV pool
    cannot hold.
    """
    if view.is_draining:
        return refuse(request, DRAINING, "the server is draining and takes no new requests")
    # A prompt that is only scored needs no room for an answer.
    num_needed = request.num_prompt_tokens + min(1, request.max_tokens)
    if num_needed > view.max_model_len:
        return refuse(
            request,
            CONTEXT_LENGTH,
            f"a prompt of {request.num_prompt_tokens} tokens leaves no room for an answer within"
            f" {view.max_model_len} tokens of context",
        )
    if num_blocks_for(num_needed, view.block_size) > view.num_total_blocks:
        return refuse(
            request,
            KV_NEVER_FITS,
            f"a prompt of {request.num_prompt_tokens} tokens does not fit the KV pool of"
            f" {view.num_total_blocks * view.block_size} tokens",
        )
    return None


def screen(
    view: EngineView,
    max_judged: int,
    max_waiting_tokens: int | None,
    drain_s: Callable[[int], float] | None = None,
) -> tuple[list[RequestView], list[Admission]]:
    """Return the waiting requests that are to be judged further, in arrival order, and verdicts on
    others.

    A new request that finds `view.max_waiting_requests` others waiting, or would raise the waiting
    prompt tokens above `max_waiting_tokens`, is refused with `queue_full`. At most `max_judged`
    requests go on to be judged; a new one beyond them is told to wait, without a prediction.
    `drain_s` predicts the seconds that a number of prompt tokens takes, for the retry-after.
    """
    kept = list(view.waiting)
    new = [i for i, request in enumerate(kept) if request.admission is None]
    if not new:
        return kept[:max_judged], []
    # Whoever stands before the first new one has been let in already.
    arriving = kept[new[0] :]
    del kept[new[0] :]
    verdicts: list[Admission] = []
    for request in arriving:
        if request.admission is None:
            refusal = hard_refusal(request, view)
            if refusal is None:
                refusal = _queue_refusal(request, view, kept, max_waiting_tokens, drain_s)
            if refusal is not None:
                verdicts.append(refusal)
                continue
        kept.append(request)
        if len(kept) > max_judged and request.admission is None:
            verdicts.append(Admission(request.request_id, AdmissionAction.WAIT, QUEUED))
    return kept[:max_judged], verdicts


def _queue_refusal(
    request: RequestView,
    view: EngineView,
    ahead: Sequence[RequestView],
    max_waiting_tokens: int | None,
    drain_s: Callable[[int], float] | None,
) -> Admission | None:
    is_full = len(ahead) >= view.max_waiting_requests
    if not is_full and max_waiting_tokens is None:
        return None
    num_tokens = sum([request.num_prompt_tokens for request in ahead])
    if is_full:
        return _full(request, f"{len(ahead)} requests are waiting already", num_tokens, drain_s)
    # A prompt longer than the bound is let in alone: the bound limits the queue, not the prompt.
    is_over = max_waiting_tokens is not None and (
        num_tokens + request.num_prompt_tokens > max_waiting_tokens
    )
    if is_over and num_tokens > 0:
        message = f"{num_tokens} prompt tokens are waiting already"
        return _full(request, message, num_tokens, drain_s)
    return None


def _full(
    request: RequestView, message: str, num_tokens: int, drain_s: Callable[[int], float] | None
) -> Admission:
    """Refuse for a full queue; the retry-after is when the queue's prompts are expected done."""
    if drain_s is None:
        return refuse(request, QUEUE_FULL, message, retry_after_s=_UNKNOWN_RETRY_S)
    queued_s = drain_s(num_tokens)
    return refuse(
        request,
        QUEUE_FULL,
        message,
        predicted_ttft_s=queued_s + drain_s(request.num_prompt_tokens),
        retry_after_s=max(_UNKNOWN_RETRY_S, queued_s),
    )


def max_age_s(promise: Promise, config: PolicyConfig) -> float:
    """The age at which a waiting promise is shed rather than kept: max(factor·T, minimum)."""
    target_s = promise.slo.ttft_s or promise.slo.e2e_s or 0.0
    return max(config.max_age_factor * target_s, config.min_max_age_s)


def verdict_on_late(
    request: RequestView,
    now: float,
    predicted_ttft_s: float,
    alone_s: float,
    config: PolicyConfig,
    tolerance: float = 1.0,
    seatless_s: float = 0.0,
) -> Admission | None:
    """Judge a waiting request that will miss its first-token target; None = keep it waiting,
    relegated.

    `predicted_ttft_s` counts from arrival, `alone_s` is what an idle server would take; up to
    `tolerance` times the target that is not held against the request. Nor is what the prediction
    holds of waiting for a seat or blocks, `seatless_s`: when others end is a guess, and who would
    be on time if they did so now may be lucky (docs/log.md, "who waits for a seat"). The class
    decides: reject, degrade (best effort from now on) or queue, the last up to `max_age_s`.
    """
    promise = live_promise(request)
    target_s = math.inf if promise is None else _first_token_target_s(promise)
    if promise is None or math.isinf(target_s):
        return None
    age_s = now - promise.arrived_at
    is_expired = age_s >= target_s
    if target_s < alone_s <= tolerance * target_s and not is_expired:
        return None
    if max(predicted_ttft_s - seatless_s, alone_s) <= target_s:
        # Late for the paced deadline, not for the promise: kept, behind those who are on time.
        return None
    if alone_s > target_s:
        # What is told must agree with why.
        predicted_ttft_s = max(predicted_ttft_s, alone_s)
        reason, message = TTFT_UNREACHABLE, f"even an idle server needs {alone_s:.3g} s"
    elif is_expired:
        reason, message = DEADLINE_EXPIRED, f"the first token was due after {target_s:.3g} s"
    else:
        reason, message = OVERLOADED, f"the first token would take {predicted_ttft_s:.3g} s"
    message = f"{message} against a target of {target_s:.3g} s"
    action = promise.slo_class.on_infeasible
    if action is OnInfeasible.DEGRADE:
        return Admission(
            request.request_id,
            AdmissionAction.WAIT,
            reason,
            message,
            predicted_ttft_s=_tellable(predicted_ttft_s),
            is_degraded=True,
        )
    if action is OnInfeasible.QUEUE and age_s < max_age_s(promise, config):
        return None
    # Once the excess has drained the same request would be on time, by the deadline that the queue
    # is judged by, if nobody else came.
    # Who comes again has not waited yet.
    excess_s = predicted_ttft_s - age_s - config.pace * target_s
    retry_after_s = None if reason == TTFT_UNREACHABLE else max(excess_s, alone_s)
    return refuse(
        request, reason, message, predicted_ttft_s=predicted_ttft_s, retry_after_s=retry_after_s
    )


def verdict_on_pace(
    request: RequestView, decode_s: float, tolerance: float = 1.0
) -> Admission | None:
    """Judge a new request whose TPOT target is below what one decode alone takes (`decode_s`).

    None = it is not, or `decode_s` is within `tolerance` times the target.
    Reject or degrade as the class says; a class that queues cannot make it faster by waiting and
    keeps it as it is.
    """
    promise = live_promise(request)
    if promise is None or promise.slo.tpot_s is None or tolerance * promise.slo.tpot_s >= decode_s:
        return None
    message = (
        f"a token takes {decode_s:.3g} s even on an idle server,"
        f" the target is {promise.slo.tpot_s:.3g} s"
    )
    if promise.slo_class.on_infeasible is OnInfeasible.REJECT:
        return refuse(request, TPOT_UNREACHABLE, message)
    if promise.slo_class.on_infeasible is OnInfeasible.DEGRADE:
        return Admission(
            request.request_id, AdmissionAction.WAIT, TPOT_UNREACHABLE, message, is_degraded=True
        )
    return None


def _first_token_target_s(promise: Promise) -> float:
    targets = [t for t in (promise.slo.ttft_s, promise.slo.e2e_s) if t is not None]
    return min(targets, default=math.inf)


def _tellable(value: float | None) -> float | None:
    """Return seconds that can be told, or None: a model may say anything."""
    return value if value is not None and 0.0 <= value < 1e8 else None


def verdicts_on_kept(
    requests: Sequence[RequestView],
    predicted_ttft_s: Sequence[float],
    degraded: Mapping[str, Admission],
    starting: Collection[str],
) -> list[Admission]:
    """Return what changes for the waiting requests that are kept: ADMIT for `starting` ones, WAIT
    for new ones.

    A request degraded now (`degraded`, by id) or before stays so; one that was told to wait hears
    nothing until it starts.
    """
    admissions: list[Admission] = []
    for request, ttft_s in zip(requests, predicted_ttft_s, strict=True):
        if request.phase is not RequestPhase.WAITING:
            continue
        before = request.admission
        verdict = degraded.get(request.request_id)
        if request.request_id in starting:
            verdict = verdict or (before if before is not None and before.is_degraded else None)
            admissions.append(
                Admission(
                    request.request_id,
                    AdmissionAction.ADMIT,
                    ADMITTED if verdict is None else verdict.reason,
                    "" if verdict is None else verdict.message,
                    predicted_ttft_s=_tellable(ttft_s),
                    is_degraded=verdict is not None,
                )
            )
        elif verdict is not None:
            admissions.append(verdict)
        elif before is None:
            admissions.append(
                Admission(
                    request.request_id,
                    AdmissionAction.WAIT,
                    QUEUED,
                    predicted_ttft_s=_tellable(ttft_s),
                )
            )
    return admissions
