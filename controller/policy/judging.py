"""The queue judged as a whole: ordered, predicted, split into those served in time and the rest.

Owns the sequence order → predict → on-time set → verdicts. Must not spend blocks or tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from controller.policy.admission import (
    is_rejected,
    verdict_on_late,
    verdict_on_pace,
    verdicts_on_kept,
)
from controller.policy.budget import (
    DecodeLoad,
    LatencyCurve,
    PrefillLoad,
    candidate_tokens,
    demanded_tokens,
    latency_curve,
)
from controller.policy.capacity import Intake
from controller.policy.lengths import OutputLengths
from controller.policy.on_time import drain_s, late_set, predict_alone
from controller.policy.ordering import (
    BoolArray,
    IntArray,
    PrefillQueue,
    class_name,
    live_promise,
)
from controller.policy.pacing import Pacing
from controller.policy.settings import PolicyConfig
from costmodel.base import CostModel
from costmodel.features import FloatArray
from engine.ports import EngineView, RequestView
from engine.request import RequestPhase
from engine.step import Admission


class Judged(NamedTuple):
    """The queue in its serving order without those that are refused; arrays of shape (n,).

    `is_curve_exact` says that it was predicted for this very order. `predicted_ttft_s` counts from
    arrival. `lower_tokens` is N⁻. `curve` predicts steps beside the decodes up to the most prompt
    tokens that a step may hold. `verdicts` holds what was decided about requests that are refused
    or degraded, by id.
    """

    queue: PrefillQueue
    is_relegated: BoolArray
    predicted_ttft_s: FloatArray
    lower_tokens: int
    curve: LatencyCurve
    is_curve_exact: bool
    verdicts: dict[str, Admission]

    def admissions(self, starting: Collection[str]) -> list[Admission]:
        """Return the step's verdicts: refusals, and what changes for the kept ones (`starting` ids
        get work now).
        """
        refused = [verdict for verdict in self.verdicts.values() if is_rejected(verdict)]
        degraded = {key: v for key, v in self.verdicts.items() if not is_rejected(v)}
        ttft_s = self.predicted_ttft_s.tolist()
        return refused + verdicts_on_kept(self.queue.requests, ttft_s, degraded, starting)


def judge_queue(
    view: EngineView,
    wanting: Sequence[RequestView],
    decodes: DecodeLoad,
    pacing: Pacing,
    room: int,
    intake: Intake,
    config: PolicyConfig,
    cost_model: CostModel,
    lengths: OutputLengths,
) -> Judged:
    """Judge everybody whose prompt is not done; `room` is the most prompt tokens that the step may
    compute.
    """
    now = view.now
    num_expected = [lengths.expected(class_name(request)) for request in wanting]
    queue = PrefillQueue.of(wanting, config, pacing.gap_limit_s, num_expected, pacing.decode_s)
    queue = queue.take(queue.order(np.zeros(len(queue), dtype=np.bool_)))
    if not pacing.holds_periods:
        queue.period_s[:] = math.inf
    head = PrefillLoad(queue.remaining, queue.past).head(room)
    curve = latency_curve(cost_model, decodes, head, candidate_tokens(room))
    # Where the decodes leave no room at all, prompts still get one block per turn.
    quota_rate = view.block_size / (config.turn_period * max(pacing.decode_s, 1e-9))
    work_s, done_s = drain_s(curve, queue, pacing.period_s, quota_rate, config.upper_share)
    if pacing.tightest_id is not None:
        # The streams that hold the rate down end one day, and the rest is then done without them.
        end_s = intake.longest_stream_s(pacing.decode_s)
        free_period_s = config.pace * pacing.gap_limit_s
        free_s, free_done_s = drain_s(curve, queue, free_period_s, quota_rate, config.upper_share)
        is_sooner = end_s + free_done_s < done_s
        work_s = np.where(is_sooner, free_s, work_s)
        done_s = np.where(is_sooner, end_s + free_done_s, done_s)
    left_s = queue.deadline_at - now
    work_left_s = left_s - (done_s - np.cumsum(work_s))
    is_late = late_set(work_s, work_left_s, queue.weight, queue.is_started, config)
    # Work is not all: who finds no seat or no blocks waits for somebody to end. Until then steps
    # hold little but decodes, since it is just the prompts that cannot come in.
    kept = np.flatnonzero(~is_late)
    delays_s = intake.start_delays_s([queue.requests[i] for i in kept.tolist()], pacing.decode_s)
    if delays_s is not None:
        started_s = np.array(delays_s) + work_s[kept]
        done_s[kept] = np.maximum(done_s[kept], started_s)
        is_late[kept] = started_s > left_s[kept]
    alone_tokens = max(1, room + decodes.num_requests)
    tolerance = probe_tolerance(view, config)
    verdicts = _on_pace(queue, alone_tokens, cost_model, tolerance)
    if is_late.any():
        # Those that are dropped come after everybody who is kept.
        last_s = np.maximum(done_s, work_s[~is_late].sum() + work_s)
        done_s = np.where(is_late, last_s, done_s)
        ttft_s = now + done_s - queue.arrived_at
        verdicts |= _on_late(
            queue,
            np.flatnonzero(is_late),
            ttft_s,
            now,
            alone_tokens,
            config,
            cost_model,
            tolerance,
            is_empty=not view.running and not view.preempted,
        )
    if not verdicts and not is_late.any():
        return Judged(
            queue=queue,
            is_relegated=is_late,
            predicted_ttft_s=now + done_s - queue.arrived_at,
            lower_tokens=demanded_tokens(curve, queue.remaining, left_s),
            curve=curve,
            is_curve_exact=True,
            verdicts=verdicts,
        )
    index = queue.order(is_late)
    if verdicts:
        is_out = np.array([is_rejected(verdicts.get(r.request_id)) for r in queue.requests])
        index = index[~is_out[index]]
    is_relegated = is_late[index]
    return Judged(
        queue=queue.take(index),
        is_relegated=is_relegated,
        predicted_ttft_s=(now + done_s - queue.arrived_at)[index],
        lower_tokens=demanded_tokens(
            curve, queue.remaining[index], np.where(is_relegated, math.inf, left_s[index])
        ),
        curve=curve,
        is_curve_exact=False,
        verdicts=verdicts,
    )


def probe_tolerance(view: EngineView, config: PolicyConfig) -> float:
    """Return the factor by which a prediction may exceed a target before it counts as unreachable.

    It is 1, but `probe_factor` in one of `probe_period` passes over an empty engine. A model that
    is wrong on the slow side would otherwise refuse everybody, see no step and stay wrong for ever;
    on an empty engine the attempt costs nobody anything.
    """
    is_empty = not view.running and not view.preempted
    return config.probe_factor if is_empty and view.step_no % config.probe_period == 0 else 1.0


def _on_pace(
    queue: PrefillQueue, alone_tokens: int, cost_model: CostModel, tolerance: float
) -> dict[str, Admission]:
    """Verdicts on new requests whose token pace not even an idle server reaches."""
    new = [
        request
        for request in queue.requests
        if request.admission is None
        and request.phase is RequestPhase.WAITING
        and (promise := live_promise(request)) is not None
        and promise.slo.tpot_s is not None
    ]
    if not new:
        return {}
    alone = predict_alone(cost_model, new, alone_tokens)
    verdicts = (
        verdict_on_pace(request, decode_s, tolerance)
        for request, decode_s in zip(new, alone.decode_s.tolist(), strict=True)
    )
    return {verdict.request_id: verdict for verdict in verdicts if verdict is not None}


def _on_late(
    queue: PrefillQueue,
    late: IntArray,
    ttft_s: FloatArray,
    now: float,
    alone_tokens: int,
    config: PolicyConfig,
    cost_model: CostModel,
    tolerance: float,
    *,
    is_empty: bool,
) -> dict[str, Admission]:
    """Verdicts on the waiting ones among those that will miss their first-token target."""
    late_waiting = [i for i in late.tolist() if queue.requests[i].phase is RequestPhase.WAITING]
    if not late_waiting:
        return {}
    requests = [queue.requests[i] for i in late_waiting]
    first_token_s = predict_alone(cost_model, requests, alone_tokens).first_token_s
    if is_empty and len(queue) == 1:
        # This is the idle server: its chunks keep the gap limit, so it may need longer than one
        # unbounded step, and to come back later would not help.
        first_token_s = np.maximum(first_token_s, ttft_s[late] - (now - queue.arrived_at[late]))
    verdicts: dict[str, Admission] = {}
    for i, request, alone_s in zip(late_waiting, requests, first_token_s.tolist(), strict=True):
        verdict = verdict_on_late(request, now, float(ttft_s[i]), alone_s, config, tolerance)
        if verdict is not None:
            verdicts[request.request_id] = verdict
    return verdicts
