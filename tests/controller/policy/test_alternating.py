"""Steps of their own for prompts, on machines where any prompt token makes a step much longer."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from controller.policy.alternating import may_alternate, sustained_rate
from controller.policy.budget import LatencyCurve, candidate_tokens
from controller.policy.lengths import OutputLengths
from controller.policy.planner import SloPlanner
from controller.policy.settings import PolicyConfig
from controller.policy.slo import Slo
from costmodel.base import LatencyEstimate
from costmodel.features import FloatArray
from engine.ports import EngineView
from tests.controller.policy.checking import CheckedPlanner
from tests.controller.policy.doubles import LinearCostModel, decode, view_of, waiting

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


def test_where_mixing_is_half_as_good_every_gap_stays_short() -> None:
    jump = curve(0.01, floor_tokens=64.0)
    assert may_alternate(jump)
    token_s, tokens, is_alternating = rate(jump, 0.06)
    assert not is_alternating
    assert tokens == pytest.approx(264.0, rel=0.05)
    assert token_s == pytest.approx(0.06 / tokens)


def test_streams_that_end_leave_their_share() -> None:
    jump = curve(0.04, floor_tokens=512.0)
    # 20 ms less per step: 50 ms with prompts fit the period of 50.
    assert not rate(jump, 0.05, 0.02)[2]


def test_an_empty_curve_alternates_nothing() -> None:
    nothing = LatencyCurve(np.zeros(1), np.full(1, 0.03), np.full(1, 0.03))
    assert not may_alternate(nothing)
    assert rate(nothing, 0.05) == (math.inf, 0.0, False)


class JumpingModel(LinearCostModel):
    """30 ms; 70 ms with prompts, up to 512 tokens of them; then 100 µs more per token."""

    def predict(self, features: FloatArray) -> LatencyEstimate:
        prefill = features[:, 0]
        mean_s = 0.03 + 0.04 * (prefill > 0.0) + 1e-4 * np.maximum(prefill - 512.0, 0.0)
        return LatencyEstimate(mean_s, mean_s)


def prompt_tokens(view: EngineView, config: PolicyConfig | None = None) -> tuple[int, str]:
    planner = SloPlanner(config or PolicyConfig(), JumpingModel(), OutputLengths())
    step = CheckedPlanner(planner).plan(view)
    assert step.decision is not None
    return step.num_prefill_tokens, step.decision.binding_constraint


def stream(num_output: int, took_s: float, *, tpot_s: float = 0.05) -> EngineView:
    """One stream at second 10, its last token now, the first `took_s` ago; a prompt waits."""
    one = decode("d", slo=Slo(tpot_s=tpot_s), num_output=num_output, last_at=10.0)
    one.first_token_at = 10.0 - took_s
    new = waiting("w", 2000, at=9.9, slo=Slo(ttft_s=5.0))
    return view_of(now=10.0, running=[one], waiting=[new], num_blocks=1000)


def test_a_step_for_prompts_waits_until_every_stream_has_banked_enough() -> None:
    # Two tokens in 30 ms: 17.5 of the 22.5 ms are in hand that 70 ms need beyond 47.5.
    assert prompt_tokens(stream(2, 0.03)) == (0, "decode_slack")
    # Three in 60 ms: 35 ms are in hand.
    num, why = prompt_tokens(stream(3, 0.06))
    assert 362 <= num <= 512
    assert why == "decode_slack"
    # A stream that was slow so far has nothing in hand, however many tokens it has.
    assert prompt_tokens(stream(100, 99 * 0.05))[0] == 0


def test_who_has_no_token_promise_is_not_asked_to_bank() -> None:
    free = replace(stream(1, 0.0), running=[decode("d", num_output=1, last_at=10.0)])
    assert prompt_tokens(free)[0] > 512


def test_the_queue_is_predicted_at_the_rate_of_alternating_steps() -> None:
    """Mixing alone would leave one block per turn: nobody could be promised a first token."""
    planner = SloPlanner(PolicyConfig(), JumpingModel(), OutputLengths())
    verdicts = planner.plan(stream(1, 0.0)).admissions
    assert [each.request_id for each in verdicts] == ["w"]
    assert verdicts[0].predicted_ttft_s == pytest.approx(0.5, abs=0.25)
