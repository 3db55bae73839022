"""When running streams are due."""

from __future__ import annotations

import numpy as np
import pytest

from controller.policy.pacing import Pacing, pace_decodes
from controller.policy.promise import Promise
from controller.policy.settings import PolicyConfig
from controller.policy.slo import Slo
from engine.request import Request
from tests.controller.policy.doubles import LinearCostModel, decode, slo_class, table_of

NOW = 10.0
MODEL = LinearCostModel((0.001, 0.01, 0.0, 0.0, 0.0), 0.1)


def paced(*decodes: Request, config: PolicyConfig | None = None) -> Pacing:
    config = config or PolicyConfig(pace=0.9, gap_limit_s=2.0)
    return pace_decodes(NOW, table_of(decodes), np.full(len(decodes), 11.0), config, MODEL)


def test_the_tightest_stream_sets_the_limit() -> None:
    pacing = paced(
        decode("loose", slo=Slo(tpot_s=1.0), last_at=10.0),
        decode("tight", slo=Slo(tpot_s=0.5), last_at=9.8),
        decode("none", last_at=9.9),
    )
    assert pacing.limit_s == pytest.approx(0.25)
    assert pacing.period_s == pytest.approx(0.45)
    assert pacing.tightest_id == "tight"
    assert pacing.slack_s == pytest.approx(0.25)
    assert not pacing.is_gap_limited
    assert pacing.decode_s == pytest.approx(0.13)


def test_without_targets_the_gap_limit_bounds_the_step() -> None:
    pacing = paced(decode("a", last_at=9.0))
    assert pacing.limit_s == pytest.approx(0.8)
    assert (pacing.tightest_id, pacing.slack_s) == (None, None)
    assert pacing.is_gap_limited
    assert paced().limit_s == pytest.approx(1.8)


def test_a_hopeless_stream_is_protected_by_the_gap_limit_only() -> None:
    # A decode step takes 0.11 s.
    pacing = paced(decode("hopeless", slo=Slo(tpot_s=0.08), last_at=10.0))
    assert pacing.limit_s == pytest.approx(1.8)
    assert pacing.tightest_id is None


@pytest.mark.parametrize("target_s", [0.109, 0.1, 0.09])
def test_a_target_just_below_a_decode_step_is_paced_like_one_at_it(target_s: float) -> None:
    near = paced(decode("near", slo=Slo(tpot_s=target_s), last_at=10.0))
    at = paced(decode("near", slo=Slo(tpot_s=0.11), last_at=10.0))
    assert near.limit_s == pytest.approx(at.limit_s)
    assert near.tightest_id == "near"


def test_the_gap_limit_gives_a_slow_machine_room_for_prompts() -> None:
    pacing = paced(decode("a", last_at=10.0), config=PolicyConfig(pace=1.0, gap_limit_s=0.1))
    assert pacing.gap_limit_s == pytest.approx(2 * 0.11)
    assert pacing.limit_s == pytest.approx(0.22)


def test_banked_slack_is_spent_only_when_asked() -> None:
    stream = decode("a", slo=Slo(tpot_s=0.5), num_output=5, last_at=10.0)
    stream.first_token_at = 9.2
    assert paced(stream).slack_s == pytest.approx(0.45)
    # At 0.45 s a token the sixth would come at 9.2 + 5·0.45; half of the way there from 10.45.
    half = PolicyConfig(pace=0.9, bank=0.5, gap_limit_s=2.0)
    assert paced(stream, config=half).slack_s == pytest.approx((11.45 - 10.45) / 2 + 0.45)
    whole = PolicyConfig(pace=0.9, bank=1.0, gap_limit_s=1.0)
    pacing = paced(stream, config=whole)
    assert pacing.slack_s == pytest.approx(1.45)
    assert pacing.limit_s == pytest.approx(0.9)
    # Whoever is behind its mean has its pace, not less.
    stream.first_token_at = 7.0
    assert paced(stream, config=whole).slack_s == pytest.approx(0.45)


def test_an_early_first_token_is_nothing_that_a_stream_could_spend() -> None:
    # D_2 = 20.5, but TPOT counts from 10: to wait for D_2 would be to miss it.
    stream = decode("a", slo=Slo(ttft_s=20.0, tpot_s=0.5), last_at=10.0)
    bank = PolicyConfig(pace=0.9, bank=1.0, gap_limit_s=20.0)
    assert paced(stream, config=bank).slack_s == pytest.approx(0.45)


@pytest.mark.parametrize("bank", [0.035, 0.5, 1.0])
@pytest.mark.parametrize("ttft_s", [0.5, 5.0])
def test_a_stream_that_takes_all_its_time_still_keeps_its_mean(bank: float, ttft_s: float) -> None:
    config = PolicyConfig(bank=bank, gap_limit_s=2.0)
    promise = Promise(Slo(ttft_s=ttft_s, tpot_s=0.5), slo_class(), NOW)
    stream = decode("a", slo=promise.slo)
    stream.promise = promise
    at = first_at = NOW + 0.1
    # Quick for a while; then every token as late as it may come.
    for number in range(1, 80):
        promise.record_token(at)
        stream.first_token_at, stream.last_token_at = first_at, at
        stream.output_token_ids = [1] * number
        stream.num_computed_tokens = stream.num_prompt_tokens + number - 1
        pacing = pace_decodes(at, table_of([stream]), np.full(1, 99.0), config, MODEL)
        at += 0.2 if number < 20 else pacing.limit_s
    assert promise.judge().is_tpot_met


def test_what_an_end_to_end_target_leaves_is_not_banked() -> None:
    bank = PolicyConfig(pace=0.9, bank=1.0, gap_limit_s=2.0)
    for slo in (Slo(e2e_s=12.0), Slo(tpot_s=1.0, e2e_s=12.0)):
        # 2 s for the 6 tokens that are expected to come; 0.2 s a token until now.
        stream = decode("a", slo=slo, num_output=5, last_at=10.0)
        stream.first_token_at = 9.2
        assert paced(stream, config=bank).slack_s == pytest.approx(0.9 * 2 / 6)


def test_an_end_to_end_target_shares_what_is_left() -> None:
    # 5 s for the 10 tokens that are expected to come.
    stream = decode("a", slo=Slo(tpot_s=1.0, e2e_s=15.0), last_at=10.0)
    assert paced(stream).slack_s == pytest.approx(0.45)
    lost = decode("b", slo=Slo(tpot_s=1.0, e2e_s=9.0), last_at=10.0)
    assert paced(lost).slack_s == pytest.approx(0.9)
    only = decode("c", slo=Slo(e2e_s=9.0), last_at=10.0)
    assert paced(only).slack_s is None


def test_a_decode_without_a_token_instant_counts_from_now() -> None:
    stream = decode("a", slo=Slo(tpot_s=0.5))
    stream.last_token_at = stream.first_token_at = None
    assert paced(stream).slack_s == pytest.approx(0.45)
    assert paced(stream).upper_limit_s == pytest.approx(0.5)


def upper_limit(num_output: int, first_at: float, upper_pace: float = 1.2) -> float:
    stream = decode("a", slo=Slo(tpot_s=0.5), num_output=num_output, last_at=10.0)
    stream.first_token_at = first_at
    config = PolicyConfig(pace=0.9, gap_limit_s=2.0, upper_pace=upper_pace)
    return paced(stream, config=config).upper_limit_s


def test_only_a_stream_that_is_ahead_of_its_mean_may_risk_more_than_its_target() -> None:
    # The first token sets the clock: nothing is gained yet.
    assert upper_limit(1, 10.0) == pytest.approx(0.5)
    # Four gaps of 0.2 s leave 1.2 s, more than upper_pace allows; of 0.48 s they leave 0.08 s.
    assert upper_limit(5, 9.2) == pytest.approx(0.6)
    assert upper_limit(5, 9.2, 1.0) == pytest.approx(0.5)
    assert upper_limit(5, 10.0 - 4 * 0.48) == pytest.approx(0.58)
    # One that is behind has its target, not less: the mean is paced in any case.
    assert upper_limit(5, 7.0) == pytest.approx(0.5)
    assert upper_limit(5, 9.2, 99.0) == pytest.approx(1.7)


def test_the_upper_bound_is_scaled_to_the_limit_of_the_mean() -> None:
    pacing = paced(decode("a", slo=Slo(tpot_s=0.5), last_at=10.0))
    assert pacing.upper_share == pytest.approx(0.9)
    assert paced(decode("late", slo=Slo(tpot_s=0.5), last_at=8.0)).upper_share == 1.0
    assert paced().upper_limit_s == pytest.approx(2.0)
