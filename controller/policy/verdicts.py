"""What is told to those whose targets cannot be met, and how sure a prediction must be for it.

Owns the verdicts on new and on late requests of a judged queue. Must not decide who is late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from controller.policy.admission import verdict_on_late, verdict_on_pace
from controller.policy.facts import E2E_S, IS_QUEUED, NUM_PROMPT, PROMISED_AT, TTFT_S, live_promise
from controller.policy.on_time import predict_alone, predict_decode_alone
from controller.policy.ordering import BoolArray, PrefillQueue
from controller.policy.settings import PolicyConfig
from costmodel.base import CostModel
from costmodel.features import FloatArray
from engine.ports import EngineView, RequestView
from engine.request import RequestPhase
from engine.step import Admission


def probe_tolerance(view: EngineView, config: PolicyConfig) -> float:
    """Return the factor by which a prediction may exceed a target before it counts as unreachable.

    It is 1, but `probe_factor` in one of `probe_period` passes over an empty engine. A model that
    is wrong on the slow side would otherwise refuse everybody, see no step and stay wrong for ever;
    on an empty engine the attempt costs nobody anything.
    """
    is_empty = not view.running and not view.preempted
    return config.probe_factor if is_empty and view.step_no % config.probe_period == 0 else 1.0


def verdicts_on_pace(
    unheard: Sequence[RequestView], cost_model: CostModel, tolerance: float
) -> dict[str, Admission]:
    """Verdicts on new requests whose token pace not even an idle server reaches."""
    new = [
        request
        for request in unheard
        if request.phase is RequestPhase.WAITING
        and (promise := live_promise(request)) is not None
        and promise.slo.tpot_s is not None
    ]
    if not new:
        return {}
    prompt = np.array([request.num_prompt_tokens for request in new], dtype=np.float64)
    decode_s = predict_decode_alone(cost_model, prompt).tolist()
    verdicts = (
        verdict_on_pace(request, alone_s, tolerance)
        for request, alone_s in zip(new, decode_s, strict=True)
    )
    return {verdict.request_id: verdict for verdict in verdicts if verdict is not None}


def verdicts_on_late(
    queue: PrefillQueue,
    is_late: BoolArray,
    ttft_s: FloatArray,
    passed_s: FloatArray,
    seatless_s: FloatArray,
    now: float,
    alone_tokens: int,
    config: PolicyConfig,
    cost_model: CostModel,
    tolerance: float,
    *,
    is_idle: bool,
) -> dict[str, Admission]:
    """Verdicts on the waiting ones among those that will miss their first-token target; `passed_s`
    (n,) is what those who are expected take of their predictions `ttft_s` (n,), `seatless_s` (n,)
    what the want of a seat or blocks does.
    """
    facts = queue.facts_at(np.flatnonzero(is_late))
    target_s = np.minimum(facts[TTFT_S], facts[E2E_S])
    age_s = now - facts[PROMISED_AT]
    # A class that queues says nothing before its bound on the age.
    bound_s = np.maximum(
        config.max_age_factor * np.where(np.isinf(facts[TTFT_S]), target_s, facts[TTFT_S]),
        config.min_max_age_s,
    )
    is_heard = (target_s < math.inf) & ((facts[IS_QUEUED] == 0.0) | (age_s >= bound_s))
    late = np.flatnonzero(is_late)[is_heard]
    requests = [queue.at(i) for i in late.tolist()]
    is_waiting = np.array([r.phase is RequestPhase.WAITING for r in requests], dtype=np.bool_)
    late, requests = late[is_waiting], [r for r in requests if r.phase is RequestPhase.WAITING]
    if not requests:
        return {}
    prompt = facts[NUM_PROMPT][is_heard][is_waiting]
    first_token_s = predict_alone(cost_model, prompt, alone_tokens)
    if is_idle:
        # This is the idle server: its chunks keep the gap limit, so it may need longer than one
        # unbounded step, and to come back later would not help.
        waited_s = now - queue.arrived_at[late]
        first_token_s = np.maximum(first_token_s, ttft_s[late] - passed_s[late] - waited_s)
    verdicts: dict[str, Admission] = {}
    for i, request, alone_s in zip(late.tolist(), requests, first_token_s.tolist(), strict=True):
        verdict = verdict_on_late(
            request, now, float(ttft_s[i]), alone_s, config, tolerance, float(seatless_s[i])
        )
        if verdict is not None:
            verdicts[request.request_id] = verdict
    return verdicts
