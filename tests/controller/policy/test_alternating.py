"""Steps of their own for prompts, on machines where any prompt token makes a step much longer."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from controller.policy.alternating import (
    bends_of,
    bent_curve,
    fewest_steps_tokens,
    jumps,
    may_alternate,
    sustained_rate,
)
from controller.policy.budget import DecodeLoad, LatencyCurve, PrefillLoad, candidate_tokens
from controller.policy.lengths import OutputLengths
from controller.policy.planner import SloPlanner
from controller.policy.promise import Promise
from controller.policy.settings import PolicyConfig
from controller.policy.slo import Slo
from controller.policy.steady import SteadyCurve
from engine.config import EngineConfig
from engine.ports import EngineView
from engine.request import Request
from tests.controller.policy.checking import CheckedPlanner
from tests.controller.policy.doubles import JumpingModel, Simulation, decode, view_of, waiting

TOKENS = candidate_tokens(8192)


def curve(jump_s: float, token_s: float = 1e-4, floor_tokens: float = 0.0) -> LatencyCurve:
    """30 ms of decodes; prompts add a jump and then 100 µs per token beyond `floor_tokens`."""
    more_s = jump_s * (TOKENS > 0.0) + token_s * np.maximum(TOKENS - floor_tokens, 0.0)
    return LatencyCurve(TOKENS, 0.03 + more_s, 0.03 + more_s)


def rate(of: LatencyCurve, period_s: float, saved_s: float = 0.0) -> tuple[float, float, bool]:
    found = sustained_rate(of, of.mean_s, np.array([period_s]), np.array([saved_s]))
    return float(found.token_s[0]), float(found.tokens[0]), bool(found.is_alternating[0])


def test_steps_that_rise_evenly_are_mixed_however_little_room_is_left() -> None:
    even = curve(0.0)
    assert not may_alternate(even)
    token_s, tokens, is_alternating = rate(even, 0.04)
    assert tokens == pytest.approx(100.0)
    assert not is_alternating
    assert token_s == pytest.approx(0.04 / 100.0)
    assert rate(even, 0.02) == (math.inf, 0.0, False)


def test_a_free_floor_is_no_reason_to_alternate() -> None:
    assert not may_alternate(curve(0.0, floor_tokens=512.0))


def test_a_jump_of_the_size_of_noise_is_none() -> None:
    nothing = LatencyCurve(np.zeros(1), np.full(1, 0.03), np.full(1, 0.03))
    assert not jumps(nothing)
    assert not may_alternate(nothing)
    assert not jumps(curve(0.002))
    assert jumps(curve(0.004))
    assert not jumps(curve(0.0))
    # 10 % more for one token: what mixes keeps mixing, however much better a step of 512 would be.
    little = uneven((0, 0.1), (1, 0.1099), (512, 0.11), (1024, 0.2))
    assert may_alternate(little)
    assert not rate(little, 0.1099)[2]
    assert rate(uneven((0, 0.1), (1, 0.1101), (512, 0.111), (1024, 0.2)), 0.11011)[2]


def test_where_no_mixed_step_fits_the_smallest_jump_is_alternated_over() -> None:
    # Otherwise no prompt would be computed beside such streams.
    token_s, tokens, is_alternating = rate(
        uneven((0, 0.1), (1, 0.109), (512, 0.109), (1024, 0.2)), 0.1055
    )
    assert is_alternating
    assert tokens == 512.0
    assert token_s == pytest.approx((0.109 + 0.1 * 0.0035 / 0.0055) / 512.0)


def test_a_jump_beyond_the_period_is_paid_by_quick_steps_before_it() -> None:
    jump = curve(0.04, floor_tokens=512.0)
    assert may_alternate(jump)
    # 70 ms do not fit 50: a step of 512 after one quick one of 30 ms keeps the mean at 50.
    token_s, tokens, is_alternating = rate(jump, 0.05)
    assert is_alternating
    assert 362.0 <= tokens <= 512.0
    assert token_s == pytest.approx(0.1 / tokens)
    # A longer period needs fewer of them, one shorter than a decode none helps.
    assert rate(jump, 0.06)[0] < token_s
    assert rate(jump, 0.03) == (math.inf, 0.0, False)


def test_where_the_rate_gains_less_than_the_gap_loses_every_gap_stays_short() -> None:
    jump = curve(0.01, floor_tokens=64.0)
    assert may_alternate(jump)
    token_s, tokens, is_alternating = rate(jump, 0.06)
    assert not is_alternating
    assert tokens == pytest.approx(264.0, rel=0.05)
    assert token_s == pytest.approx(0.06 / tokens)


def uneven(*points: tuple[float, float]) -> LatencyCurve:
    tokens, mean_s = (np.array(each) for each in zip(*points, strict=True))
    return LatencyCurve(tokens, mean_s, mean_s)


def test_a_step_that_is_hardly_longer_need_not_gain_much() -> None:
    # 494 tokens fit the period of 95 ms, and 870 hardly do not.
    slow = uneven((0, 0.07), (1, 0.0949), (494, 0.095), (870, 0.097), (4096, 0.35))
    token_s, tokens, is_alternating = rate(slow, 0.095)
    assert is_alternating
    assert tokens == 870.0
    # 2 ms too long, paid by a twelfth of a step of 70 ms.
    assert token_s == pytest.approx((0.097 + 0.07 * 0.002 / 0.025) / 870.0)


def test_a_step_twice_as_long_must_double_the_rate() -> None:
    # 100 tokens fit the period of 50 ms: 0.5 ms each. 100 ms and 2.5 of 30 are 175 for 400: 0.44.
    little = uneven((0, 0.03), (1, 0.05), (100, 0.05), (400, 0.1), (401, 9.0))
    assert rate(little, 0.05)[1:] == (100.0, False)
    # 1,000 tokens in the same time: 0.175, and times 2 still less.
    much = uneven((0, 0.03), (1, 0.05), (100, 0.05), (1000, 0.1), (1001, 9.0))
    assert rate(much, 0.05)[0] == pytest.approx(1.75e-4)
    assert rate(much, 0.05)[1:] == (1000.0, True)


def test_streams_that_end_leave_their_share() -> None:
    jump = curve(0.04, floor_tokens=512.0)
    # 20 ms less per step: 50 ms with prompts fit the period of 50.
    assert not rate(jump, 0.05, 0.02)[2]


def test_streams_that_have_ended_shorten_the_gap_too() -> None:
    points = ((0, 0.07), (1, 0.1), (100, 0.1), (500, 0.15))
    before = rate(uneven(*points), 0.05, 0.05)
    after = rate(uneven(*((num, each_s - 0.05) for num, each_s in points)), 0.05)
    assert before == pytest.approx(after)
    assert not before[2]


def test_an_empty_curve_alternates_nothing() -> None:
    nothing = LatencyCurve(np.zeros(1), np.full(1, 0.03), np.full(1, 0.03))
    assert not may_alternate(nothing)
    assert rate(nothing, 0.05) == (math.inf, 0.0, False)


def test_candidates_have_the_bend_among_them() -> None:
    load = PrefillLoad(np.array([8192.0]), np.zeros(1))
    bent = bent_curve(JumpingModel(), DecodeLoad(4, 400), load, TOKENS)
    assert 512.0 in TOKENS
    assert bent.tokens.tolist() == TOKENS.tolist()
    others = np.array([0.0, 1.0, 100.0, 300.0, 700.0, 1500.0])
    bent = bent_curve(JumpingModel(), DecodeLoad(4, 400), load, others)
    assert bent.tokens.tolist() == [0.0, 1.0, 100.0, 300.0, 512.0, 700.0, 1500.0]
    assert bent.mean_s[4] == pytest.approx(0.07)


def test_a_line_has_no_bend_and_few_candidates_show_none() -> None:
    assert bends_of(curve(0.0)).size == 0
    assert bends_of(uneven((0, 0.03), (1, 0.07), (2, 0.08))).size == 0
    # Between two neighbours there is no room for one.
    assert bends_of(uneven((0, 0.03), (1, 0.07), (2, 0.07), (3, 0.08), (4, 0.09))).size == 0
    # Squares of few tokens bend by nothing that matters.
    squares = LatencyCurve(TOKENS, *[0.03 + 0.04 * (TOKENS > 0.0) + 1e-10 * TOKENS**2] * 2)
    assert bends_of(squares).size <= 2


def test_streams_wait_least_where_prompts_take_as_few_steps_as_are_worth_it() -> None:
    # 40 ms, and beyond 512 tokens 100 us each: best at 512.
    jump = curve(0.04, floor_tokens=512.0)
    assert fewest_steps_tokens(jump, 300, 8192.0) == 300
    # 700 at once cost 18.8 ms more than 512; another step costs 40.
    assert fewest_steps_tokens(jump, 700, 8192.0) == 700
    assert fewest_steps_tokens(jump, 1000, 8192.0) == 500
    assert fewest_steps_tokens(jump, 1300, 8192.0) == 650
    # Only what fits beside the streams.
    assert fewest_steps_tokens(jump, 700, 600.0) == 350
    assert fewest_steps_tokens(jump, 1300, 600.0) == 434
    assert fewest_steps_tokens(jump, 1300, 400.0) == 400


def prompt_tokens(
    view: EngineView, config: PolicyConfig | None = None, answers: int | None = None
) -> tuple[int, str]:
    lengths = OutputLengths()
    if answers is not None:
        lengths.observe("chat", answers)
    planner = SloPlanner(config or PolicyConfig(), JumpingModel(), lengths)
    step = CheckedPlanner(planner).plan(view)
    assert step.decision is not None
    return step.num_prefill_tokens, step.decision.binding_constraint


def stream(
    num_output: int, took_s: float, *, tpot_s: float = 0.05, max_tokens: int = 64
) -> EngineView:
    """One stream at second 10, its last token now, the first `took_s` ago; a prompt waits."""
    slo = Slo(tpot_s=tpot_s)
    one = decode("d", slo=slo, num_output=num_output, last_at=10.0, max_tokens=max_tokens)
    one.first_token_at = 10.0 - took_s
    new = waiting("w", 2000, at=9.9, slo=Slo(ttft_s=5.0))
    return view_of(now=10.0, running=[one], waiting=[new], num_blocks=1000)


def test_a_step_for_prompts_waits_until_every_stream_has_banked_enough() -> None:
    # 70 ms are 22.5 more than the pace of 47.5: of what the pace keeps back of 16 gaps (2.5 ms
    # each) 17.5 may be gone. Two tokens in 66 ms are 18.5 behind.
    assert prompt_tokens(stream(2, 0.066), answers=40) == (0, "decode_slack")
    num, why = prompt_tokens(stream(2, 0.064), answers=40)
    assert num == 512
    assert why == "decode_slack"
    # One that was a little slow so far has to catch up first, however many tokens it has.
    assert prompt_tokens(stream(100, 100 * 0.0475 - 0.029))[0] == 0
    assert prompt_tokens(stream(100, 100 * 0.0475 - 0.031))[0] == 512


def test_short_answers_have_little_to_be_behind_by() -> None:
    # What the gaps of four tokens keep back, 7.5 ms, does not make up for 22.5: that takes nine.
    assert prompt_tokens(stream(1, 0.0), answers=4) == (0, "decode_slack")
    assert prompt_tokens(stream(1, 0.0), answers=9) == (0, "decode_slack")
    assert prompt_tokens(stream(1, 0.0), answers=11)[0] == 512
    # Nor if its client allows it no more, or nobody knows.
    assert prompt_tokens(stream(1, 0.0, max_tokens=4), answers=40)[0] == 0
    assert prompt_tokens(stream(1, 0.0))[0] == 0
    # One that is longer than was expected has as many more.
    assert prompt_tokens(stream(10, 9 * 0.0475), answers=4)[0] == 512
    assert prompt_tokens(stream(8, 7 * 0.0475), answers=4)[0] == 0


@pytest.mark.parametrize("num_tokens", [2, 3, 4, 6, 8, 12, 16, 40])
@pytest.mark.parametrize("history", [(), (40,) * 20, (2,) * 2 + (40,) * 8])
def test_answers_of_any_length_keep_their_pace(num_tokens: int, history: tuple[int, ...]) -> None:
    """Steps of 70 ms beside promises of 50 ms a token, whatever answers were like before."""
    lengths = OutputLengths()
    for each in history:
        lengths.observe("chat", each)
    model = JumpingModel()
    planner = SloPlanner(PolicyConfig(exploration=0.0), model, lengths)
    crowd = [
        waiting(f"r{i}", 600, at=0.05 * i, slo=Slo(60.0, 0.05), max_tokens=num_tokens)
        for i in range(6)
    ]
    Simulation(planner, model, EngineConfig(num_blocks=2000)).run(crowd)
    for request in crowd:
        promise = request.promise
        assert isinstance(promise, Promise)
        assert promise.judge().is_tpot_met


def test_nobody_waits_for_a_stream_that_is_behind_for_good() -> None:
    # Twice as slow as promised for 200 tokens: no prompt can wait until that is made up for.
    num, _ = prompt_tokens(stream(200, 199 * 0.1))
    assert num >= 362
    # Beside another one that is not, that one is banked for.
    slow = decode("slow", slo=Slo(tpot_s=0.05), num_output=2, last_at=10.0)
    slow.first_token_at = 10.0 - 0.066
    both = [*stream(200, 199 * 0.1).running, slow]
    assert prompt_tokens(replace(stream(1, 0.0), running=both))[0] == 0


def test_what_is_told_holds_beside_streams_that_are_behind() -> None:
    for took_s in (0.0, 0.1, 0.14, 0.2, 1.0):
        late = decode("d", slo=Slo(tpot_s=0.05), num_output=3, max_tokens=200)
        late.first_token_at, late.last_token_at = -took_s, 0.0
        told_s, came_s = served_beside(late)
        assert came_s < 0.7
        assert 0.5 * told_s < came_s < 2.0 * told_s + 0.1


def served_beside(late: Request) -> tuple[float, float]:
    """Seconds that a prompt is told, and those it takes, beside a stream that goes on."""
    model, now, new = JumpingModel(), 0.0, waiting("w", 300, slo=Slo(ttft_s=5.0))
    planner = CheckedPlanner(SloPlanner(PolicyConfig(exploration=0.0), model, OutputLengths()))
    told_s = None
    for step_no in range(1, 60):
        view = view_of(now=now, step_no=step_no, running=[late], waiting=[new], num_blocks=1000)
        step = planner.plan(view)
        for verdict in step.admissions:
            told_s = verdict.predicted_ttft_s if told_s is None else told_s
        now += model.latency_of(step)
        late.output_token_ids.append(1)
        late.num_computed_tokens += 1
        late.block_table = list(range(500, 500 - (-late.num_computed_tokens // 16)))
        late.last_token_at = now
        if step.num_prefill_tokens >= 300:
            assert told_s is not None
            return told_s, now
    raise AssertionError("the prompt was never computed")


def test_an_end_to_end_target_is_spent_by_what_its_pace_keeps_back() -> None:
    # 2 s are left for 44 tokens, 45 ms each: a mixed step is too long, but 0.1 s may be spent.
    one = decode("d", slo=Slo(e2e_s=12.0), num_output=20, last_at=10.0)
    assert prompt_tokens(replace(stream(1, 0.0), running=[one]))[0] >= 362
    # Of 0.4 s hardly anything.
    one = decode("d", slo=Slo(e2e_s=10.4), num_output=20, last_at=10.0, max_tokens=30)
    assert prompt_tokens(replace(stream(1, 0.0), running=[one]))[0] == 0


def test_a_step_of_its_own_keeps_the_gap_limit() -> None:
    jump = curve(0.04, floor_tokens=512.0)
    period_s, saved_s = np.array([0.05]), np.zeros(1)
    assert sustained_rate(jump, jump.mean_s, period_s, saved_s, 0.08).is_alternating[0]
    assert not sustained_rate(jump, jump.mean_s, period_s, saved_s, 0.06).is_alternating[0]


def test_who_has_no_token_promise_is_not_asked_to_bank() -> None:
    free = replace(stream(1, 0.0), running=[decode("d", num_output=1, last_at=10.0)])
    assert prompt_tokens(free)[0] > 512


def test_the_queue_is_predicted_at_the_rate_of_alternating_steps() -> None:
    """Mixing alone would leave one block per turn: nobody could be promised a first token."""
    planner = SloPlanner(PolicyConfig(), JumpingModel(), OutputLengths())
    verdicts = planner.plan(stream(1, 0.0)).admissions
    assert [each.request_id for each in verdicts] == ["w"]
    assert verdicts[0].predicted_ttft_s == pytest.approx(0.5, abs=0.25)


@given(
    st.floats(0.001, 0.05),
    st.floats(0.0, 3.0),
    st.floats(0.0, 1e-3),
    st.integers(0, 12),
    st.floats(0.0, 1.5) | st.just(math.inf),
    st.floats(0.01, 0.5) | st.just(math.inf),
)
@example(0.03, 1.0, 1e-4, 12, 0.5, math.inf)  # alternates
@example(0.03, 1.0, 1e-4, 12, 0.0, math.inf)  # nothing to spare
def test_in_plain_numbers_the_rate_is_the_same(
    idle_s: float, jump: float, token_s: float, num_powers: int, above: float, longest_s: float
) -> None:
    tokens = np.concatenate(([0.0], np.floor(2.0 ** np.arange(num_powers))))
    jump_s = jump * idle_s
    mean_s = idle_s + np.where(tokens > 0.0, np.maximum(jump_s, token_s * tokens), 0.0)
    of = LatencyCurve(tokens, mean_s, 1.1 * mean_s)
    # Within the jump, where steps of their own are worth it; at its ends; and beyond.
    steered_s, period_s = of.steered_s(0.95), idle_s + above * max(jump_s, 1e-3)
    plain = SteadyCurve(of, steered_s).rate(period_s, longest_s)
    found = sustained_rate(of, steered_s, np.array([period_s]), np.zeros(1), longest_s)
    assert tuple(plain) == tuple(column.item() for column in found)
    mixed = np.interp(np.interp(period_s, steered_s, tokens), tokens, mean_s)
    assert SteadyCurve(of, steered_s).mixed_s(period_s) == mixed


def test_a_jump_with_half_of_it_to_spare_is_alternated_in_plain_numbers_too() -> None:
    jump = curve(0.03, floor_tokens=512.0)
    assert SteadyCurve(jump, jump.mean_s).rate(0.045, math.inf).is_alternating
