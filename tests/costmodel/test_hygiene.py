from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from costmodel.features import StepFeatures
from costmodel.fields import SnapshotError
from costmodel.hygiene import (
    COLD_SHIFT_RUN,
    MAX_UNKNOWN_RUN,
    SHIFT_RUN,
    RejectReason,
    Screen,
    Verdict,
    check_sample,
)

ROOT = Path(__file__).resolve().parents[2]
DECODE = StepFeatures(num_decode_requests=1.0, decode_context_tokens=10.0)


def _warm() -> Screen:
    screen = Screen()
    for ratio in np.exp(np.random.default_rng(0).normal(0.0, 0.03, 300)).tolist():
        screen.judge(ratio)
    return screen


@pytest.mark.parametrize(
    ("features", "latency_s", "reason"),
    [
        (DECODE, 0.01, None),
        (StepFeatures(num_prefill_tokens=4.0), 3600.0, None),
        (DECODE, math.nan, RejectReason.NOT_FINITE),
        (DECODE, math.inf, RejectReason.NOT_FINITE),
        (DECODE._replace(chunk_past_tokens=math.inf), 0.01, RejectReason.NOT_FINITE),
        (DECODE._replace(chunk_past_tokens=math.nan), 0.01, RejectReason.NOT_FINITE),
        (DECODE, 0.0, RejectReason.NOT_POSITIVE),
        (DECODE, -1.0, RejectReason.NOT_POSITIVE),
        (DECODE, 3601.0, RejectReason.OUT_OF_RANGE),
        (DECODE._replace(decode_context_tokens=-1.0), 0.01, RejectReason.OUT_OF_RANGE),
        (DECODE._replace(decode_context_tokens=1e13), 0.01, RejectReason.OUT_OF_RANGE),
        (StepFeatures(), 0.01, RejectReason.NO_WORK),
        (StepFeatures(decode_context_tokens=5.0), 0.01, RejectReason.NO_WORK),
    ],
)
def test_what_is_no_sample_is_refused_with_a_reason(
    features: StepFeatures, latency_s: float, reason: RejectReason | None
) -> None:
    assert check_sample(features, latency_s) is reason


def test_the_typical_residual_is_tracked_and_bounds_what_is_a_surprise() -> None:
    screen = _warm()
    # The median of |N(0, 0.03)| is 0.0202.
    assert 0.014 < screen.size < 0.028
    assert screen.limit == pytest.approx(max(0.08, 5.0 * screen.size))


def test_within_the_limit_a_sample_teaches_in_full() -> None:
    screen = _warm()
    for ratio in (1.0, 1.0 + 0.9 * screen.limit, 1.0 - 0.7 * screen.limit):
        verdict = screen.judge(ratio)
        assert verdict.taught_ratio == ratio
        assert verdict.shift is None


@pytest.mark.parametrize("ratio", [1.5, 7.9, 0.5, 0.13])
def test_a_surprise_teaches_no_more_than_the_limit(ratio: float) -> None:
    screen = _warm()
    limit = screen.limit
    verdict = screen.judge(ratio)
    expected = 1.0 + limit if ratio > 1.0 else 1.0 / (1.0 + limit)
    assert verdict.taught_ratio == pytest.approx(expected)
    assert verdict.shift is None


@pytest.mark.parametrize("ratio", [8.1, 1000.0, 0.12, 0.001])
def test_an_outlier_does_not_teach(ratio: float) -> None:
    assert _warm().judge(ratio).taught_ratio is None


@pytest.mark.parametrize("ratio", [1.5, 2.0, 0.5, 1000.0])
def test_a_run_of_surprises_is_a_change_of_speed(ratio: float) -> None:
    screen = _warm()
    verdicts = [screen.judge(ratio) for _ in range(SHIFT_RUN)]
    assert [verdict.shift for verdict in verdicts[:-1]] == [None] * (SHIFT_RUN - 1)
    assert verdicts[-1].shift == min(ratio, 64.0)
    assert not verdicts[-1].is_cold
    assert screen.judge(1.0).shift is None


def test_a_cold_screen_believes_a_shorter_run() -> None:
    screen = Screen()
    verdicts = [screen.judge(20.0) for _ in range(COLD_SHIFT_RUN)]
    assert verdicts[-1].shift == 20.0
    assert verdicts[-1].is_cold
    assert verdicts[-1].taught_ratio == 1.0


def test_surprises_on_both_sides_are_no_run() -> None:
    screen = _warm()
    verdicts = [screen.judge(3.0 if index % 2 else 0.3) for index in range(40)]
    assert all(verdict.shift is None for verdict in verdicts)


def test_a_normal_sample_ends_a_run() -> None:
    screen = _warm()
    for _ in range(10):
        for _ in range(SHIFT_RUN - 1):
            assert screen.judge(1.6).shift is None
        screen.judge(1.0)


def test_a_trial_ends_with_a_sample_that_is_no_surprise() -> None:
    screen = _warm()
    screen.judge(1.9)
    screen.put_on_trial()
    assert screen.is_on_trial
    assert all(screen.judge(1.9).shift is None for _ in range(SHIFT_RUN - 1))
    assert screen.is_on_trial
    screen.judge(1.0)
    assert not screen.is_on_trial


def test_a_restored_screen_has_the_same_future() -> None:
    screen = _warm()
    for _ in range(SHIFT_RUN - 2):
        screen.judge(2.0)
    screen.is_on_trial = True
    twin = Screen.restore(screen.state(), "screen")
    for ratio in (2.0, 2.0, 1.0, 0.3, 1.01):
        assert screen.judge(ratio) == twin.judge(ratio)
    assert screen.state() == twin.state()


def test_every_reason_is_given_by_somebody_and_documented() -> None:
    sources = [
        path.read_text()
        for name in ("costmodel", "controller")
        for path in (ROOT / name).rglob("*.py")
    ]
    text = (ROOT / "docs/costmodel.md").read_text()
    documented = text.split("\n## Samples\n")[1].split("Within 5 typical")[0]
    for reason in RejectReason:
        assert any(f"RejectReason.{reason.name}" in source for source in sources), reason
        assert f"`{reason}`" in documented, reason


def test_surprises_of_an_unknown_kind_teach_from_the_second_that_agrees() -> None:
    screen = Screen()
    limit = 1.0 + screen.limit
    assert not screen.is_among_unknown(3.0)
    assert screen.judge_unknown(3.0) == Verdict(limit)
    assert screen.is_among_unknown(3.0)
    assert not screen.is_among_unknown(0.5)
    # The other way is another matter, and begins anew.
    assert screen.judge_unknown(0.5) == Verdict(1.0 / limit)
    assert screen.judge_unknown(3.0) == Verdict(limit)
    assert screen.judge_unknown(2.5) == Verdict(2.5)
    # What is no surprise ends the run.
    assert screen.judge(1.0) == Verdict(1.0)
    assert not screen.is_among_unknown(3.0)


@pytest.mark.parametrize("ratio", [9.0, 1.0 / 9.0])
def test_far_off_an_unknown_kind_is_an_outlier_until_a_run_of_them(ratio: float) -> None:
    screen = Screen()
    verdicts = [screen.judge_unknown(ratio) for _ in range(SHIFT_RUN)]
    assert verdicts == [Verdict(None)] * (SHIFT_RUN - 1) + [Verdict(ratio)]
    assert all(verdict.shift is None for verdict in verdicts)


def test_surprises_without_end_are_no_matter_of_kinds() -> None:
    screen = Screen()
    for _ in range(MAX_UNKNOWN_RUN):
        screen.judge_unknown(2.0)
    assert screen.is_among_unknown(2.0)
    screen.judge_unknown(2.0)
    assert not screen.is_among_unknown(2.0)
    shifts = [screen.judge(2.0).shift for _ in range(SHIFT_RUN)]
    assert any(shift is not None for shift in shifts)


def test_a_run_of_unknown_kinds_goes_through_a_snapshot_and_may_be_missing() -> None:
    screen = Screen()
    screen.judge_unknown(0.5)
    state = screen.state()
    assert Screen.restore(state, "screen").is_among_unknown(0.6)
    del state["num_unknown"]
    assert not Screen.restore(state, "screen").is_among_unknown(0.6)
    with pytest.raises(SnapshotError, match=r"screen\.num_unknown"):
        Screen.restore({**state, "num_unknown": 99}, "screen")
