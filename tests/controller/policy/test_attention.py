"""What tokens cost behind their own past, whatever stands at the head of the queue."""

from __future__ import annotations

import numpy as np
import pytest

from controller.policy.attention import OwnPast
from controller.policy.budget import DecodeLoad, PrefillLoad, candidate_tokens, latency_curve
from controller.policy.steady import SteadyCurve
from costmodel.features import FloatArray
from tests.controller.policy.doubles import JumpingModel, LinearCostModel

# 10 ms, 0.1 ms a token, and 10 ns per token that one reads of its past.
MODEL = LinearCostModel((1e-4, 0.0, 0.0, 1e-8, 0.0), 0.01, margin=0.0)
NOBODY = DecodeLoad(0, 0)


def own_past(model: LinearCostModel = MODEL, head: tuple[float, float] = (100.0, 0.0)) -> OwnPast:
    """Of a queue whose head has so many tokens left behind so many."""
    load = PrefillLoad(np.array([head[0]]), np.array([head[1]]))
    curve = latency_curve(model, NOBODY, load, candidate_tokens(4096))
    return OwnPast(model, NOBODY, load, SteadyCurve(curve, curve.steered_s(1.0)), 1.0)


def weighed(
    own: OwnPast, remaining: list[float], past: list[float], period_s: float = 0.11
) -> FloatArray:
    num = len(remaining)
    return own.weighed(
        np.array(remaining), np.array(past), np.full(num, period_s), [(0, num)], 10.0
    )


def test_a_token_costs_what_its_own_past_makes_it_cost() -> None:
    # Steps of 0.11 s hold 0.1 s of tokens: 0.1 ms each, or 0.6 behind 50,000 others.
    token_s = own_past().token_s(np.array([0.0, 50_000.0]), 0.11, 10.0)
    assert token_s is not None
    assert token_s.tolist() == pytest.approx([1.1e-4, 6.6e-4], rel=1e-6)


def test_between_the_pasts_that_are_asked_for_the_cost_is_as_good_as_exact() -> None:
    pasts = np.linspace(0.0, 120_000.0, 50)
    token_s = own_past().token_s(pasts, 0.11, 10.0)
    assert token_s is not None
    assert token_s == pytest.approx(1.1 * (1e-4 + 1e-8 * pasts), rel=1e-6)


def test_the_head_of_the_queue_does_not_say_what_the_others_cost() -> None:
    # A short prompt at the head and 80,000 tokens behind 20,000: 60,000 in the mean.
    long = weighed(own_past(), [100.0, 80_000.0], [0.0, 20_000.0])
    assert long[0] == pytest.approx(100.0, rel=0.01)
    assert long[1] == pytest.approx(80_000.0 * 7.0, rel=0.01)
    # And the other way round: with the long one at the head the short one is cheap.
    short = weighed(own_past(head=(80_000.0, 20_000.0)), [80_000.0, 100.0], [20_000.0, 0.0])
    assert short[1] < 100.0 / 2.5


def test_short_pasts_are_not_looked_at() -> None:
    remaining = [100.0, 400.0]
    own = own_past()
    assert not own.matters(np.array([0.0, 250.0]))
    assert own.matters(np.array([0.0, 2500.0]))
    assert weighed(own, remaining, [0.0, 0.0]).tolist() == remaining


def test_a_single_token_has_half_of_itself_before_it() -> None:
    # Behind one token a step of 256 takes 2.6 % longer: one that is alone has half of that.
    own = own_past(LinearCostModel((0.0, 0.0, 0.0, 1e-6, 0.0), 0.01, margin=0.0), (1.0, 0.0))
    assert own.matters(np.array([1.0]))
    assert weighed(own, [1.0], [0.0]).tolist() == [1.0]


def test_where_prompts_have_no_rate_nothing_is_said() -> None:
    own = own_past()
    assert own.token_s(np.array([50_000.0]), 0.005, 0.005) is None
    assert weighed(own, [100.0, 80_000.0], [0.0, 0.0], period_s=0.005).tolist() == [100.0, 80_000.0]


def test_a_past_behind_which_no_token_fits_costs_in_proportion() -> None:
    # 5 ms are left: a token behind 400,000 takes 4.1, one behind a million 10.1.
    token_s = own_past().token_s(np.array([400_000.0, 1_000_000.0]), 0.015, 0.015)
    assert token_s is not None
    assert np.isfinite(token_s).all()
    assert token_s[1] > 2.0 * token_s[0]


def test_on_a_machine_that_jumps_the_past_counts_on_top() -> None:
    class Model(JumpingModel):
        def predict(self, features: FloatArray):  # type: ignore[no-untyped-def]
            mean_s = super().predict(features).mean_s + 1e-8 * features[:, 3]
            return type(super().predict(features))(mean_s, mean_s)

    token_s = own_past(Model()).token_s(np.array([0.0, 20_000.0]), 0.2, 10.0)
    assert token_s is not None
    assert token_s[1] > token_s[0] + 1.9e-4


def test_a_model_that_says_nothing_of_short_prompts_is_not_divided_by() -> None:
    nothing = LinearCostModel((0.0, 0.0, 0.0, 1e-8, 0.0), 0.0, margin=0.0)
    own = own_past(nothing)
    assert weighed(own, [100.0, 80_000.0], [0.0, 0.0]).tolist() == [100.0, 80_000.0]
