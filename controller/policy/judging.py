"""The queue judged as a whole: ordered, predicted, split into those served in time and the rest.

Owns the sequence order → predict → on-time set → verdicts. Must not spend blocks or tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from controller.policy.admission import is_rejected, verdicts_on_kept
from controller.policy.alternating import bent_curve
from controller.policy.attention import OwnPast
from controller.policy.budget import (
    DecodeLoad,
    LatencyCurve,
    PrefillLoad,
    candidate_tokens,
    demanded_tokens,
    made_safe,
)
from controller.policy.capacity import Intake
from controller.policy.demand import Expected
from controller.policy.facts import PRIORITY, IntArray, greatest, least
from controller.policy.given_up import given_up_s
from controller.policy.haste import first_aims_s, unhurried_s, unhurried_tokens
from controller.policy.interference import overtaken_s
from controller.policy.on_time import Outlook, drain_s, late_set, late_starters
from controller.policy.ordering import BoolArray, PrefillQueue, relegated_last
from controller.policy.pacing import Pacing
from controller.policy.precedence import heavier_first
from controller.policy.settings import PolicyConfig
from controller.policy.steady import SteadyCurve
from controller.policy.verdicts import probe_tolerance, verdicts_on_late, verdicts_on_pace
from costmodel.base import CostModel
from costmodel.features import FloatArray
from engine.ports import EngineView, RequestView
from engine.request import RequestPhase
from engine.step import Admission


class Judged(NamedTuple):
    """The queue in its serving order without those that are refused; arrays of shape (n,).

    `is_kept_out` marks those that may not start for the sake of streams that are expected: they are
    no work of this step. `head` is the work that `curve` was predicted for. `predicted_ttft_s`
    counts from arrival. `lower_tokens` is N⁻. `curve` predicts steps beside the decodes up to the
    most prompt tokens that a step may hold; `own_tokens` of them are worth steps that streams bank
    for (0: every step may as well hold some). `unhurried` is what a step computes while nobody is
    in a hurry (`haste.py`). `token_s` is what a prompt token takes, 0 where nobody is late.
    `verdicts` holds what was decided about requests that are refused or
    degraded, by id; `new` are the indices of those who have heard nothing yet.
    """

    queue: PrefillQueue
    is_relegated: BoolArray
    is_kept_out: BoolArray
    predicted_ttft_s: FloatArray
    lower_tokens: int
    head: PrefillLoad
    curve: LatencyCurve
    own_tokens: int
    unhurried: int | None
    token_s: float
    verdicts: dict[str, Admission]
    new: list[int]

    def work(self, now: float) -> tuple[FloatArray, FloatArray]:
        """Return the tokens left of everybody who may compute some, and the seconds to their
        deadlines (`left_s`).
        """
        remaining, left_s = self.queue.remaining, self.left_s(now)
        if not self.is_kept_out.any():
            return remaining, left_s
        return remaining[~self.is_kept_out], left_s[~self.is_kept_out]

    def left_s(self, now: float) -> FloatArray:
        """Return the seconds to each first-token deadline that can be met, +inf without one."""
        return np.where(self.is_relegated, math.inf, self.queue.deadline_at - now)

    def admissions(
        self, wanting: Sequence[RequestView], starting: Sequence[int]
    ) -> list[Admission]:
        """Return the step's verdicts: refusals, and what changes for the kept ones of the `wanting`
        (those at the indices `starting` get work now).
        """
        refused, degraded = [], {}
        for request_id, verdict in self.verdicts.items():
            if is_rejected(verdict):
                refused.append(verdict)
            else:
                degraded[request_id] = verdict
        heard = {*self.new, *starting}
        if degraded:
            heard |= {i for i, r in enumerate(wanting) if r.request_id in degraded}
        if all(wanting[i].phase is not RequestPhase.WAITING for i in heard):
            return refused
        ttft_s = np.full(len(wanting), math.nan)
        ttft_s[self.queue.index] = self.predicted_ttft_s
        # Who is refused is not in the queue any more.
        kept = [i for i in sorted(heard) if not math.isnan(ttft_s[i])]
        return refused + verdicts_on_kept(
            [wanting[i] for i in kept],
            [float(ttft_s[i]) for i in kept],
            degraded,
            {wanting[i].request_id for i in starting},
        )


def judge_queue(
    view: EngineView,
    wanting: Sequence[RequestView],
    facts: FloatArray,
    num_expected: FloatArray,
    decodes: DecodeLoad,
    pacing: Pacing,
    room: int,
    intake: Intake,
    config: PolicyConfig,
    cost_model: CostModel,
    expected: Expected | None = None,
) -> Judged:
    """Judge everybody whose prompt is not done (`wanting`, running ones first, waiting ones last;
    `facts` and `num_expected` output tokens are theirs); `room` is the most prompt tokens that the
    step may compute, `expected` who is expected to come.
    """
    now = view.now
    token_s = 0.0
    if config.order_blend > 0.0:
        token_s = float(made_safe(np.array([cost_model.marginals().prefill_token_s]))[0])
    queue = PrefillQueue.of(
        wanting, facts, config, pacing.gap_limit_s, num_expected, pacing.decode_s, token_s
    )
    if not pacing.holds_periods:
        queue.period_s[:] = math.inf
    head = PrefillLoad(queue.remaining, queue.past).head(room)
    curve = bent_curve(cost_model, decodes, head, candidate_tokens(room))
    # Where the decodes leave no room at all, prompts still get one block per turn.
    quota_rate = view.block_size / (config.turn_period * max(pacing.decode_s, 1e-9))
    new = [i for i, request in enumerate(wanting) if request.admission is None]
    left_s = queue.deadline_at - now
    steady = SteadyCurve(curve, curve.steered_s(config.upper_share))
    own_past = OwnPast(cost_model, decodes, head, steady, config.upper_share)
    work_s, done_s, passed_s = _drained(
        queue,
        decodes,
        pacing,
        steady,
        intake,
        quota_rate,
        left_s,
        config,
        own_past,
        expected,
        is_told=bool(new),
    )
    own_tokens, wait_s = own_step(steady, pacing, head.num_tokens, config)
    done_s += wait_s
    # Work is not all: who finds no seat or no blocks waits for somebody to end. Until then steps
    # hold decodes and what replaces those who end. Who is lost whatever happens waits for nothing.
    possible = (work_s <= left_s).nonzero()[0]
    fed_s = steady.mean_s(intake.feed_tokens(queue))
    step_s = max(pacing.decode_s, min(fed_s, pacing.period_s))
    is_kept_out = intake.yielding(queue)
    delays_s = intake.start_delays_s(queue, possible, step_s, is_kept_out)
    beyond_s = done_s - work_s.cumsum()
    if delays_s is None:
        work_left_s = left_s - beyond_s
        is_late = late_set(work_s, work_left_s, queue.weight, queue.is_started, config)
        if is_late.any():
            # Whoever is dropped makes nobody wait.
            done_s -= np.where(is_late, work_s, 0.0).cumsum()
    else:
        is_late = late_starters(queue, possible, delays_s, work_s, done_s, left_s, config)
    alone_tokens = max(1, room + decodes.num_requests)
    tolerance = probe_tolerance(view, config)
    verdicts = verdicts_on_pace([wanting[i] for i in new], cost_model, tolerance)
    has_late, token_s = bool(is_late.any()), 0.0
    if has_late:
        token_s = float(work_s.sum() / max(queue.remaining.sum(), 1.0))
        done_s, seatless_s = given_up_s(
            queue,
            is_late,
            work_s,
            done_s,
            passed_s,
            beyond_s - passed_s,
            intake,
            step_s,
            is_kept_out,
        )
    unhurried = None
    # Who waits for a seat or blocks waits for others to end, and they for their prompts: no time
    # is to be taken then. Nor before a backlog that whoever comes next would find undone.
    is_here = ~is_kept_out
    is_free = delays_s is None or not (delays_s[is_here[possible]] > 0.0).any()
    if not own_tokens and is_free and is_here.any() and intake.is_roomy(len(queue)):
        aims_s = first_aims_s(queue, config)
        if float(work_s[is_here].sum()) <= config.patience_backlog * least(aims_s[is_here]):
            aim_s = queue.arrived_at - now + aims_s
            unhurried = unhurried_tokens(
                curve,
                queue.remaining[is_here],
                np.where(is_late, math.inf, left_s)[is_here],
                aim_s[is_here],
                pacing,
                config,
            )
            if unhurried is not None:
                done_s[is_here] = unhurried_s(
                    curve, unhurried, queue.remaining[is_here], done_s[is_here], aim_s[is_here]
                )
    ttft_s = now + done_s - queue.arrived_at
    if has_late:
        is_idle = not view.running and not view.preempted and len(queue) == 1
        verdicts |= verdicts_on_late(
            queue,
            is_late,
            ttft_s,
            passed_s,
            seatless_s,
            now,
            alone_tokens,
            config,
            cost_model,
            tolerance,
            is_idle=is_idle,
        )
    places = None
    if verdicts or has_late:
        places = relegated_last(is_late)
        if verdicts:
            out = {key for key, verdict in verdicts.items() if is_rejected(verdict)}
            is_kept = np.array([request.request_id not in out for request in wanting])
            places = places[is_kept[queue.index[places]]]
    # While nobody is in a hurry the order of deadlines is what keeps everybody on time.
    is_ordered = unhurried is None and not own_tokens
    if is_ordered and len(queue) > 1 and least(queue.weight) < greatest(queue.weight):
        # Who waits for a seat or blocks is left where it is: the order decides who gets them.
        is_now = ~is_late
        if delays_s is not None:
            is_now[possible] &= delays_s <= 0.0
        if places is None:
            places = np.arange(len(queue))
        is_movable = queue.period_s >= pacing.period_s
        later_s = _put_heavier_first(queue, places, is_now, work_s, left_s - done_s, is_movable)
        ttft_s += later_s
    if places is not None:
        queue, is_late, ttft_s = queue.take(places), is_late[places], ttft_s[places]
        is_kept_out = is_kept_out[places]
        left_s = np.where(is_late, math.inf, queue.deadline_at - now)
    is_here = ~is_kept_out
    lower = 0
    if is_here.any():
        lower = demanded_tokens(curve, queue.remaining[is_here], left_s[is_here])
    return Judged(
        queue,
        is_late,
        is_kept_out,
        ttft_s,
        lower,
        head,
        curve,
        own_tokens,
        unhurried,
        token_s,
        verdicts,
        new,
    )


def _put_heavier_first(
    queue: PrefillQueue,
    places: IntArray,
    is_here: BoolArray,
    work_s: FloatArray,
    spare_s: FloatArray,
    is_movable: BoolArray,
) -> FloatArray:
    """Move heavier promises ahead within `places`, the order of service (`precedence.py`), which is
    changed; return how many seconds later everybody of the queue is done for it.

    Only those who may compute now (`is_here`) change places with each other. Who brings a pace
    along that nobody running holds yet is not moved (`is_movable`): prompts behind it would be
    computed at that pace.
    """
    later_s = np.zeros(len(queue))
    slots = is_here[places].nonzero()[0]
    here = places[slots]
    moved = heavier_first(
        work_s[here],
        spare_s[here],
        queue.weight[here],
        queue.facts_at(here)[PRIORITY],
        is_movable[here],
    )
    if moved is not None:
        places[slots] = here[moved[0]]
        later_s[here] = moved[1]
    return later_s


def own_step(
    steady: SteadyCurve, pacing: Pacing, num_tokens: int, config: PolicyConfig
) -> tuple[int, float]:
    """Return the prompt tokens, at most `num_tokens`, that are worth a step which streams bank for
    (0 if mixing is as good), and the seconds that they still have to.
    """
    if not pacing.is_paced:
        return 0, 0.0
    rate = steady.rate(pacing.period_s, config.pace * pacing.gap_limit_s)
    if not rate.is_alternating:
        return 0, 0.0
    curve = steady.curve
    own_tokens = min(num_tokens, int(rate.tokens))
    step_s = float(np.interp(own_tokens, curve.tokens, curve.upper_s))
    saving = pacing.banks.saving(step_s, pacing.decode_s)
    return own_tokens, saving.wait_s(step_s, pacing.decode_s)


def _drained(
    queue: PrefillQueue,
    decodes: DecodeLoad,
    pacing: Pacing,
    steady: SteadyCurve,
    intake: Intake,
    quota_rate: float,
    left_s: FloatArray,
    config: PolicyConfig,
    own_past: OwnPast,
    expected: Expected | None,
    *,
    is_told: bool,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Predict work and end of everybody (`drain_s`), with those who are expected in between, and
    how much later the end is for them.

    Streams that hold the rate down end, and leave their share of the step. That is looked at where
    somebody is told a prediction, or would be late without it: who is on time without is so with.
    """
    longest_s = config.pace * pacing.gap_limit_s

    def drained(outlook: Outlook) -> tuple[FloatArray, FloatArray, FloatArray]:
        work_s, done_s = drain_s(steady, queue, outlook, quota_rate, longest_s, own_past)
        if expected is None:
            return work_s, done_s, np.zeros(done_s.size)
        later_s = _overtaken(queue, expected, own_past, pacing, done_s, left_s, config)
        return work_s, later_s, later_s - done_s

    if pacing.tightest_id is None or not is_told:
        found = drained(Outlook.still(pacing.period_s))
        if pacing.tightest_id is None or not (found[1] > left_s).any():
            return found
    relief_s = (pacing.decode_s - pacing.empty_s) / decodes.num_requests
    # A step takes what its budget takes, as long as prompts wait.
    step_s = steady.mixed_s(pacing.period_s)
    return drained(intake.outlook(pacing, relief_s, step_s))


def _overtaken(
    queue: PrefillQueue,
    expected: Expected,
    own_past: OwnPast,
    pacing: Pacing,
    done_s: FloatArray,
    left_s: FloatArray,
    config: PolicyConfig,
) -> FloatArray:
    """Return when everybody is done with those in between who are expected to come."""
    if not greatest(done_s) > config.pace * least(expected.ttft_s):
        return done_s
    period_s = pacing.period_s
    if pacing.tightest_id is None:
        # Nobody streams yet; those who wait will.
        period_s = min(period_s, least(queue.period_s))
    longest_s = config.pace * pacing.gap_limit_s
    token_s = own_past.token_s(expected.num_prompt / 2.0, period_s, longest_s)
    if token_s is None:
        return done_s
    num_tokens = queue.remaining + queue.past
    priority = queue.facts_at(np.arange(len(queue)))[PRIORITY]
    return overtaken_s(
        expected,
        token_s,
        config.pace,
        done_s,
        left_s,
        num_tokens,
        queue.weight,
        priority >= 0.0,
    )
