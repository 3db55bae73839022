"""Promises: deadlines, re-basing, pacing and judging."""

from __future__ import annotations

import math

import pytest

from controller.policy.promise import Promise
from controller.policy.slo import Slo, SloClass


def promise(
    ttft: float | None = 1.0, tpot: float | None = 0.1, e2e: float | None = None
) -> Promise:
    return Promise(Slo(ttft, tpot, e2e), SloClass("chat", weight=2.0), arrived_at=10.0)


def test_deadlines_before_the_first_token_start_at_d1() -> None:
    p = promise()
    assert p.token_deadline_at(1) == 11.0
    assert p.token_deadline_at(3) == pytest.approx(11.2)
    with pytest.raises(ValueError, match="counts from 1"):
        p.token_deadline_at(0)


def test_an_early_first_token_banks_slack_and_a_late_one_rebases() -> None:
    early, late = promise(), promise()
    early.record_token(10.4)
    late.record_token(11.7)
    assert early.token_deadline_at(2) == pytest.approx(11.1)
    assert late.token_deadline_at(2) == pytest.approx(11.8)
    assert (early.num_tokens_on_time, late.num_tokens_on_time) == (1, 0)


def test_one_stall_counts_once() -> None:
    p = promise()
    for at in (11.0, 11.1, 13.0, 13.1, 13.2, 13.3):
        p.record_token(at)
    assert p.num_tokens_on_time == 5
    assert p.longest_gap_s == pytest.approx(1.9)
    assert p.token_deadline_at(7) == pytest.approx(13.4)


def test_a_token_late_by_less_than_p_does_not_rebase() -> None:
    p = promise()
    p.record_token(11.0)
    p.record_token(11.15)
    assert p.token_deadline_at(3) == pytest.approx(11.2)


def test_targets_that_are_absent_bound_nothing() -> None:
    p = promise(ttft=None, tpot=None)
    assert math.isinf(p.first_deadline_at)
    assert math.isinf(p.last_deadline_at)
    p.record_token(12.0)
    assert p.base_at == 12.0
    assert math.isinf(p.token_deadline_at(2))
    assert p.judge().attained is None
    assert p.slo.is_best_effort


def test_without_a_ttft_target_the_schedule_starts_at_the_first_token() -> None:
    p = promise(ttft=None)
    p.record_token(50.0)
    assert p.token_deadline_at(2) == pytest.approx(50.1)


def test_judging_means_and_maxima() -> None:
    p = promise(e2e=1.5)
    for at in (10.8, 10.9, 11.0, 11.1):
        p.record_token(at)
    verdict = p.judge()
    assert verdict.ttft_s == pytest.approx(0.8)
    assert verdict.tpot_s == pytest.approx(0.1)
    assert verdict.e2e_s == pytest.approx(1.1)
    assert (verdict.is_ttft_met, verdict.is_e2e_met) == (True, True)
    assert verdict.fluidity == 1.0
    assert p.last_deadline_at == 11.5


def test_a_missed_target_is_a_miss() -> None:
    p = promise()
    for at in (10.8, 11.8):
        p.record_token(at)
    verdict = p.judge()
    assert (verdict.is_ttft_met, verdict.is_tpot_met, verdict.attained) == (True, False, False)
    assert verdict.is_e2e_met is None


def test_one_token_cannot_miss_tpot_and_none_attains_nothing() -> None:
    p = promise(ttft=None)
    assert p.judge().attained is False
    assert p.judge().fluidity is None
    p.record_token(10.2)
    verdict = p.judge()
    assert (verdict.tpot_s, verdict.is_tpot_met, verdict.attained) == (None, True, True)


def test_a_degraded_promise_weighs_nothing() -> None:
    p = promise()
    assert p.weight == 2.0
    p.is_degraded = True
    assert p.weight == 0.0


@pytest.mark.parametrize("name", ["ttft_s", "tpot_s", "e2e_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e5])
def test_targets_are_checked_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Slo(**{name: value})


def test_classes_are_checked_by_name() -> None:
    with pytest.raises(ValueError, match="name"):
        SloClass("")
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight"):
            SloClass("chat", weight=weight)
