"""Verdicts, predictions and the on-time set."""

from __future__ import annotations

import math

import numpy as np
import pytest

from controller.policy.admission import (
    hard_refusal,
    max_age_s,
    screen,
    verdict_on_late,
    verdict_on_pace,
    verdicts_on_kept,
)
from controller.policy.budget import DecodeLoad, PrefillLoad, candidate_tokens, latency_curve
from controller.policy.on_time import (
    Outlook,
    drain_s,
    late_set,
    predict_alone,
    predict_decode_alone,
)
from controller.policy.promise import Promise
from controller.policy.settings import PolicyConfig
from controller.policy.slo import OnInfeasible, Slo
from controller.policy.steady import SteadyCurve
from engine.request import Request
from engine.step import Admission, AdmissionAction
from tests.controller.policy.doubles import (
    LinearCostModel,
    decode,
    queue_of,
    slo_class,
    view_of,
    waiting,
)

CONFIG = PolicyConfig()
WAIT = AdmissionAction.WAIT


def told_to_wait(request: Request) -> Request:
    request.admission = Admission(request.request_id, WAIT, "queued")
    return request


def test_what_no_policy_can_serve_is_refused_at_once() -> None:
    small = view_of(num_blocks=4, max_model_len=100)

    def reason(request: Request, is_draining: bool = False) -> str | None:
        view = view_of(num_blocks=4, max_model_len=100, is_draining=is_draining)
        refusal = hard_refusal(request, view)
        return None if refusal is None else refusal.reason

    assert reason(waiting("a", 63)) is None
    assert reason(waiting("a", 64)) == "kv_never_fits"
    assert reason(waiting("a", 100)) == "context_length"
    assert reason(waiting("a", 1), is_draining=True) == "draining"
    # Without an answer there is no next token that needs room.
    assert reason(waiting("a", 64, max_tokens=0)) is None
    assert reason(waiting("a", 65, max_tokens=0)) == "kv_never_fits"
    refusal = hard_refusal(waiting("a", 64), small)
    assert refusal is not None
    assert refusal.retry_after_s is None
    assert "64 tokens" in refusal.message


def test_a_full_queue_refuses_the_newcomers_only() -> None:
    requests = [told_to_wait(waiting(f"old{i}", 10)) for i in range(3)]
    view = view_of(waiting=[*requests, waiting("new", 10)], max_waiting=3)
    kept, verdicts = screen(view, 100, None)
    assert [r.request_id for r in kept] == ["old0", "old1", "old2"]
    assert [(v.request_id, v.reason) for v in verdicts] == [("new", "queue_full")]
    assert verdicts[0].retry_after_s == 1.0


def test_queued_prompt_tokens_are_bounded_but_a_lone_long_prompt_is_not() -> None:
    view = view_of(waiting=[waiting("long", 90), waiting("b", 20), waiting("c", 8)])
    kept, verdicts = screen(view, 100, 50)
    assert [r.request_id for r in kept] == ["long"]
    assert [v.reason for v in verdicts] == ["queue_full", "queue_full"]
    kept, verdicts = screen(view, 100, 118)
    assert (len(kept), len(verdicts)) == (3, 0)


def test_newcomers_beyond_the_judged_are_told_to_wait_once() -> None:
    view = view_of(waiting=[waiting("a"), waiting("b"), told_to_wait(waiting("c"))])
    kept, verdicts = screen(view, 1, None)
    assert [r.request_id for r in kept] == ["a"]
    assert [(v.request_id, v.action) for v in verdicts] == [("b", WAIT)]


def curve_and_queue(
    *requests: Request, num_decodes: int = 0, outlook: Outlook | None = None
) -> tuple[float, float]:
    """Seconds until the first and the last of the requests are done at a period of 0.5 s."""
    model = LinearCostModel((0.001, 0.01, 0.0, 0.0, 0.0), 0.1, margin=0.0)
    queue = queue_of(requests, CONFIG)
    curve = latency_curve(
        model,
        DecodeLoad(num_decodes, 0),
        PrefillLoad(queue.remaining, queue.past),
        candidate_tokens(2000),
    )
    steady = SteadyCurve(curve, curve.steered_s(1.0))
    _, done_s = drain_s(steady, queue, outlook or Outlook.still(0.5), 10.0)
    return float(done_s[0]), float(done_s[-1])


def test_the_queue_drains_at_the_rate_that_the_decodes_allow() -> None:
    # 0.1 + 0.001·N within 0.5 s: 400 tokens a step.
    first, last = curve_and_queue(waiting("a", 400), waiting("b", 600))
    assert first == pytest.approx(0.5)
    assert last == pytest.approx(1.0 + 0.3)
    # Ten decodes leave 300 tokens a step.
    _, busy = curve_and_queue(waiting("a", 400), waiting("b", 600), num_decodes=10)
    assert busy == pytest.approx(3 * 0.5 + 0.3)


@pytest.mark.parametrize("period_s", [0.05, 0.11, 0.5])
@pytest.mark.parametrize("tight_s", [None, 0.08, 0.3])
def test_a_rate_that_never_changes_drains_like_one_that_changes_too_late(
    period_s: float, tight_s: float | None
) -> None:
    requests = [
        waiting("a", 400, slo=Slo(ttft_s=9.0, tpot_s=tight_s)),
        waiting("b", 90, at=0.1, slo=Slo(ttft_s=9.0, tpot_s=0.2)),
        waiting("c", 1000, at=0.2),
    ]
    never = curve_and_queue(*requests, outlook=Outlook.still(period_s))
    late = Outlook(np.array([1e6]), np.array([period_s, period_s]), 0.0)
    assert never == pytest.approx(curve_and_queue(*requests, outlook=late))


def test_those_before_slow_the_rate_once_they_decode() -> None:
    pace = CONFIG.pace
    tight = waiting("a", 400, slo=Slo(ttft_s=9.0, tpot_s=0.3 / pace))
    _, last = curve_and_queue(tight, waiting("b", 600))
    # The last step may or may not be counted as a full one.
    assert 0.5 + 3 * 0.3 - 0.01 <= last <= 0.5 + 3 * 0.3 + 0.11


def test_decodes_without_room_leave_the_quota() -> None:
    first, _ = curve_and_queue(waiting("a", 20), num_decodes=50)
    assert first == pytest.approx(2.0)


def test_streams_that_end_leave_their_share_and_their_claim() -> None:
    def done_s(num_tokens: int, outlook: Outlook) -> float:
        return curve_and_queue(waiting("a", num_tokens), num_decodes=40, outlook=outlook)[0]

    # 40 decodes take 0.5 s: no token fits, and the quota is 10 tokens a second.
    assert done_s(20, Outlook.still(0.5)) == pytest.approx(2.0)
    # After 1 s half of them have ended, and 200 tokens fit 0.5 s.
    ends = Outlook(np.array([1.0]), np.array([0.5, 0.5]), 0.2)
    assert done_s(10, ends) == pytest.approx(1.0)
    assert done_s(210, ends) == pytest.approx(1.5)
    # The one that ended was the one in a hurry: 600 tokens fit 0.9 s.
    loose = Outlook(np.array([1.0]), np.array([0.5, 0.9]), 0.2)
    assert done_s(610, loose) == pytest.approx(1.9)


def chosen(
    work: list[float],
    left: list[float],
    weight: list[float] | None = None,
    started: list[bool] | None = None,
    config: PolicyConfig = CONFIG,
) -> list[bool]:
    n = len(work)
    dropped = late_set(
        np.array(work),
        np.array(left),
        np.array(weight or [1.0] * n),
        np.array(started or [False] * n),
        config,
    )
    return [bool(is_dropped) for is_dropped in dropped]


def test_who_is_kept_is_on_time_in_whatever_order_prompts_are_computed() -> None:
    rng = np.random.default_rng(3)
    num_kept = 0
    for _ in range(300):
        num = int(rng.integers(1, 12))
        work = rng.exponential(1.0, num)
        left = rng.uniform(-0.5, 0.7 * num, num)
        weight = rng.choice([0.5, 1.0, 4.0], num)
        dropped = chosen(work.tolist(), left.tolist(), weight.tolist())
        kept = [k for k in range(num) if not dropped[k]]
        assert (work[kept].cumsum() <= left[kept] + 1e-9).all()
        num_kept += len(kept)
    assert num_kept > 600


def test_nobody_is_dropped_while_all_are_on_time() -> None:
    assert chosen([1, 1, 1], [1, 2, 3]) == [False] * 3


def test_the_largest_is_dropped_so_that_most_are_on_time() -> None:
    assert chosen([1, 5, 1, 1], [9, 9, 6.5, 7]) == [False, True, False, False]


def test_weights_protect_and_started_work_is_dear() -> None:
    assert chosen([2, 3], [4, 4], weight=[1.0, 10.0]) == [True, False]
    assert chosen([2, 3], [4, 4], started=[False, True]) == [True, False]


def test_who_weighs_much_less_pays_for_what_a_prediction_may_be_wrong_by() -> None:
    # 5 s of work within 5.2 s: a twentieth more than predicted would be too late.
    assert chosen([2, 3], [4, 5.2], weight=[1.0, 4.0]) == [True, False]
    assert chosen([2, 3], [4, 5.6], weight=[1.0, 4.0]) == [False, False]
    # Among equals, or nearly so, that is nobody's fault; nor does the heavier one lose by it.
    assert chosen([2, 3], [4, 5.2], weight=[1.0, 3.9]) == [False, False]
    assert chosen([2, 3], [4, 5.2], weight=[4.0, 1.0]) == [False, False]
    assert chosen([3, 2], [math.inf, 5.2], weight=[0.0, 1.0]) == [True, False]
    # Alone it has nobody to take the time from.
    assert chosen([3], [3.1], weight=[4.0]) == [False]


def test_only_as_many_pay_as_are_needed_and_help() -> None:
    assert chosen([1, 2, 4], [9, 9, 7.5], weight=[1.0, 1.0, 8.0]) == [False, True, False]
    # Not even alone is it done a tenth early: nobody pays for that.
    assert chosen([0.1, 4], [4.15, 4.2], weight=[1.0, 1000.0]) == [False, False]
    assert chosen([0.01] * 9 + [4], [9] * 9 + [4.2], weight=[1.0] * 9 + [1000.0]) == [False] * 10
    # A costlier one that is as heavy hides nobody.
    assert chosen([88, 8, 8], [200, 104, 106], weight=[8.0, 1.0, 8.0]) == [False, True, False]


def test_insurance_looks_at_classes_and_spares_what_was_begun() -> None:
    # A started equal is dear to drop, not a heavier promise.
    assert chosen([2, 3], [4, 5.2], started=[False, True]) == [False, False]
    assert chosen([2, 3], [4, 5.2], weight=[1.0, 8.0], started=[True, False]) == [False, False]
    assert chosen([2, 3], [4, 5.2], weight=[1.0, 32.0], started=[True, False]) == [True, False]


def test_only_the_first_of_a_long_queue_are_insured() -> None:
    light, heavy = [0.1] * 80, [1.0]
    left = [100.0] * 80 + [9.1]
    weight = [1.0] * 80 + [9.0]
    assert not any(chosen(light + heavy, left, weight))
    assert any(chosen(light[:40] + heavy, [100.0] * 40 + [5.1], [1.0] * 40 + [9.0]))


def test_a_hopeless_one_takes_nobody_with_it() -> None:
    assert chosen([1, 9, 1], [5, 5, 5]) == [False, True, False]
    assert chosen([1, 1], [-1, 5]) == [True, False]


def test_best_effort_yields_before_any_promise() -> None:
    assert chosen([1, 3], [math.inf, 3.5], weight=[0.0, 1.0]) == [True, False]


def test_a_stream_in_the_middle_is_never_dropped() -> None:
    assert chosen([3, 3], [math.inf, 4], weight=[math.inf, 1.0]) == [False, True]


def test_length_neutral_shedding_looks_at_weights_alone() -> None:
    neutral = PolicyConfig(length_neutrality=1.0)
    assert chosen([4, 2], [5, 5], weight=[1.5, 1.0]) == [True, False]
    assert chosen([4, 2], [5, 5], weight=[1.5, 1.0], config=neutral) == [False, True]


def test_alone_is_the_best_that_a_server_could_do() -> None:
    model = LinearCostModel((0.001, 0.01, 0.0, 1e-6, 0.0), 0.1)
    num_prompt = np.array([250.0, 50.0, 200.0])
    first_token_s = predict_alone(model, num_prompt, 100)
    # 100 after 0, 100 after 100, 50 after 200.
    assert first_token_s[0] == pytest.approx(0.2 + 0.2 + 0.01 + 0.15 + 0.01)
    assert first_token_s[1] == pytest.approx(0.15)
    assert first_token_s[2] == pytest.approx(0.2 + 0.2 + 0.01)
    assert predict_decode_alone(model, num_prompt).tolist() == pytest.approx([0.11] * 3)


def test_alone_takes_the_chunks_that_are_quickest() -> None:
    # 4,096 tokens at once: 2.1 s for their square alone. Four chunks of 1,024 cost 0.5 s of that;
    # chunks of 256 would pay sixteen floors.
    model = LinearCostModel((0.001, 0.01, 0.0, 0.0, 1.25e-7), 0.1)
    (first_token_s,) = predict_alone(model, np.array([4096.0]), 4096).tolist()
    assert first_token_s == pytest.approx(4.096 + 4 * (0.1 + 1.25e-7 * 1024**2))


def late(on: OnInfeasible, ttft: float | None = 2.0, at: float = 0.0) -> Request:
    return waiting("a", slo=Slo(ttft_s=ttft, tpot_s=0.1), of=slo_class(on_infeasible=on), at=at)


def test_a_late_request_is_refused_with_the_reason_and_an_honest_retry() -> None:
    now = verdict_on_late(late(OnInfeasible.REJECT), 0.5, 5.0, 1.0, CONFIG)
    never = verdict_on_late(late(OnInfeasible.REJECT), 0.5, 5.0, 3.0, CONFIG)
    expired = verdict_on_late(late(OnInfeasible.REJECT), 2.5, 5.0, 1.0, CONFIG)
    assert now is not None
    assert never is not None
    assert expired is not None
    assert (now.reason, now.predicted_ttft_s) == ("overloaded", 5.0)
    # In 4.5 s it would be done; who comes anew has until its paced deadline, 0.95 of 2 s.
    assert now.retry_after_s == pytest.approx(2.6)
    assert (never.reason, never.retry_after_s) == ("ttft_unreachable", None)
    # Nothing but its own work is left by then.
    assert (expired.reason, expired.retry_after_s) == ("deadline_expired", 1.0)
    assert {v.action for v in (now, never, expired)} == {AdmissionAction.REJECT}
    assert "5 s against a target of 2 s" in now.message


def test_a_class_may_degrade_or_queue() -> None:
    degraded = verdict_on_late(late(OnInfeasible.DEGRADE), 0.5, math.inf, 1.0, CONFIG)
    assert degraded is not None
    assert (degraded.action, degraded.is_degraded) == (WAIT, True)
    assert degraded.predicted_ttft_s is None
    queued = late(OnInfeasible.QUEUE)
    assert verdict_on_late(queued, 29.0, 40.0, 1.0, CONFIG) is None
    too_old = verdict_on_late(queued, 30.0, 40.0, 1.0, CONFIG)
    assert too_old is not None
    assert too_old.action is AdmissionAction.REJECT


def test_without_a_first_token_target_nobody_is_late() -> None:
    assert verdict_on_late(late(OnInfeasible.REJECT, ttft=None), 9.0, 9.0, 1.0, CONFIG) is None
    assert verdict_on_late(waiting("a"), 9.0, 9.0, 1.0, CONFIG) is None


def test_the_age_bound_grows_with_the_target() -> None:
    def bound(slo: Slo) -> float:
        return max_age_s(Promise(slo, slo_class(), 0.0), CONFIG)

    assert bound(Slo(ttft_s=1.0)) == 30.0
    assert bound(Slo(ttft_s=9.0)) == 90.0
    assert bound(Slo(e2e_s=5.0)) == 50.0
    assert bound(Slo(tpot_s=5.0)) == 30.0


def test_a_pace_that_no_server_reaches() -> None:
    refused = verdict_on_pace(late(OnInfeasible.REJECT), 0.2)
    degraded = verdict_on_pace(late(OnInfeasible.DEGRADE), 0.2)
    assert refused is not None
    assert degraded is not None
    assert (refused.reason, refused.action) == ("tpot_unreachable", AdmissionAction.REJECT)
    assert (degraded.action, degraded.is_degraded) == (WAIT, True)
    assert verdict_on_pace(late(OnInfeasible.QUEUE), 0.2) is None
    assert verdict_on_pace(late(OnInfeasible.REJECT), 0.1) is None
    assert verdict_on_pace(waiting("a"), 0.2) is None


def test_kept_requests_hear_only_what_changes() -> None:
    new, told, starting, degraded, before = (waiting(i) for i in "abcde")
    told_to_wait(told)
    before.admission = Admission("e", WAIT, "overloaded", is_degraded=True)
    verdict = Admission("d", WAIT, "overloaded", is_degraded=True)
    heard = verdicts_on_kept(
        [new, told, starting, degraded, before, decode("f")],
        [1.0, 1.0, 0.5, 9.0, 2.0, 0.0],
        {"d": verdict},
        {"c", "e", "f"},
    )
    assert [(v.request_id, v.action.value, v.reason, v.is_degraded) for v in heard] == [
        ("a", "wait", "queued", False),
        ("c", "admit", "admitted", False),
        ("d", "wait", "overloaded", True),
        ("e", "admit", "overloaded", True),
    ]
    assert heard[0].predicted_ttft_s == 1.0


def test_the_prediction_of_a_refusal_agrees_with_its_reason() -> None:
    request = waiting("r", 100, slo=Slo(ttft_s=0.1))
    verdict = verdict_on_late(request, 0.0, 0.05, 0.4, PolicyConfig())
    assert verdict is not None
    assert (verdict.reason, verdict.predicted_ttft_s) == ("ttft_unreachable", 0.4)
