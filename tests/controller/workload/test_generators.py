"""Generators: the rates that were asked for, monotone times, and what they refuse."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.workload import generators
from controller.workload.arrivals import Arrival, Workload
from controller.workload.generators import Phase, gamma, poisson, square_wave
from controller.workload.lengths import (
    FixedLengths,
    LengthSource,
    LognormalLengths,
    TraceLengths,
)

SHORT = FixedLengths(10, 5)
AZURE_LIKE = LognormalLengths(1020, 4142, 129, 601)
PAIRS = Workload("pairs", tuple(Arrival(0.0, number, 1000 - number) for number in (1, 20, 300)))
SOURCES: list[LengthSource] = [SHORT, AZURE_LIKE, TraceLengths(PAIRS)]


def gaps_of(workload: Workload) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.diff([arrival.at_s for arrival in workload.arrivals])


def test_poisson_has_its_rate_and_the_gaps_of_one() -> None:
    workload = poisson(20.0, 1000.0, SHORT, seed=1)
    # Five standard deviations of a Poisson count.
    assert workload.num_requests == pytest.approx(20_000, abs=5 * math.sqrt(20_000))
    gaps = gaps_of(workload)
    assert gaps.mean() == pytest.approx(0.05, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.04)
    # Exponential: the share above the mean is 1/e.
    assert (gaps > 0.05).mean() == pytest.approx(math.exp(-1), abs=0.02)
    counts = np.bincount([int(a.at_s) for a in workload.arrivals], minlength=1000)
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("burstiness", [0.1, 0.5, 2.0, 8.0])
def test_burstiness_is_the_squared_variation_of_the_gaps(burstiness: float) -> None:
    workload = gamma(20.0, 2000.0, SHORT, seed=2, burstiness=burstiness)
    gaps = gaps_of(workload)
    assert gaps.mean() == pytest.approx(0.05, rel=0.1)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(burstiness, rel=0.2)


def test_no_burstiness_is_evenly_spaced() -> None:
    for burstiness in (0.0, 5e-324):
        workload = gamma(4.0, 10.0, SHORT, seed=3, burstiness=burstiness)
        assert workload.num_requests == 40
        assert gaps_of(workload) == pytest.approx(0.25)
        assert 0 <= workload.arrivals[0].at_s < 0.25
    starts = {gamma(4.0, 10.0, SHORT, seed, burstiness=0.0).arrivals[0].at_s for seed in range(9)}
    assert len(starts) == 9


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 9.0])
def test_short_bursty_runs_have_their_rate_too(burstiness: float) -> None:
    # A stream that began with an arrival would hold (cv² - 1)/2 requests too many: 4 of 10 here.
    counts = [
        gamma(1.0, 10.0, SHORT, seed, burstiness=burstiness).num_requests for seed in range(2000)
    ]
    assert np.mean(counts) == pytest.approx(10.0, abs=0.06 * math.sqrt(10 * max(1.0, burstiness)))


def test_a_faster_run_is_the_same_run_compressed() -> None:
    slow = poisson(2.0, 100.0, AZURE_LIKE, seed=4)
    fast = poisson(8.0, 25.0, AZURE_LIKE, seed=4)
    assert [a.at_s for a in fast.arrivals] == pytest.approx([a.at_s / 4 for a in slow.arrivals])
    assert [a.num_prompt_tokens for a in fast.arrivals] == [
        a.num_prompt_tokens for a in slow.arrivals
    ]


@pytest.mark.parametrize("source", SOURCES)
def test_a_longer_run_begins_like_a_shorter_one(source: LengthSource) -> None:
    short = gamma(50.0, 20.0, source, seed=5, burstiness=3.0)
    long = gamma(50.0, 400.0, source, seed=5, burstiness=3.0)
    assert long.num_requests > 4096 > short.num_requests > 100
    assert long.arrivals[: short.num_requests] == short.arrivals


def test_seeds_differ_and_times_do_not_follow_from_lengths() -> None:
    assert poisson(5.0, 100.0, SHORT, seed=1) != poisson(5.0, 100.0, SHORT, seed=2)
    workload = poisson(50.0, 200.0, AZURE_LIKE, seed=6)
    gaps = gaps_of(workload)
    lengths = [math.log(a.num_prompt_tokens) for a in workload.arrivals]
    for shifted in (lengths[1:], lengths[:-1]):
        assert abs(np.corrcoef(gaps, shifted)[0, 1]) < 0.05


@settings(max_examples=80)
@given(
    rate=st.floats(1e-3, 50.0),
    duration_s=st.floats(1e-3, 50.0),
    burstiness=st.sampled_from([0.0, 0.01, 0.3, 1.0, 4.0, 50.0]),
    seed=st.integers(0, 2**64),
    source=st.sampled_from(SOURCES),
)
def test_whatever_is_asked_times_ascend_within_the_duration(
    rate: float, duration_s: float, burstiness: float, seed: int, source: LengthSource
) -> None:
    workload = gamma(rate, duration_s, source, seed, burstiness=burstiness)
    times = [a.at_s for a in workload.arrivals]
    assert all(a <= b for a, b in itertools.pairwise(times))
    assert all(0.0 <= at_s < duration_s for at_s in times)
    assert workload == gamma(rate, duration_s, source, seed, burstiness=burstiness)


# Phases


CHAT = Phase(40.0, 5.0, FixedLengths(100, 50), {"chat": 1.0})
BULK = Phase(
    40.0,
    20.0,
    FixedLengths(2000, 20),
    {"code": 75, "batch": 25},
    {"batch": FixedLengths(8000, 400)},
)


def test_a_square_wave_alternates_rate_mix_and_lengths() -> None:
    workload = square_wave([CHAT, BULK], 4000.0, seed=7)
    in_chat = [a for a in workload.arrivals if int(a.at_s / 40) % 2 == 0]
    in_bulk = [a for a in workload.arrivals if int(a.at_s / 40) % 2 == 1]
    assert len(in_chat) / 2000 == pytest.approx(5.0, rel=0.05)
    assert len(in_bulk) / 2000 == pytest.approx(20.0, rel=0.05)
    kinds = {(a.slo_class, a.num_prompt_tokens, a.num_output_tokens) for a in in_chat}
    assert kinds == {("chat", 100, 50)}
    kinds = {(a.slo_class, a.num_prompt_tokens, a.num_output_tokens) for a in in_bulk}
    assert kinds == {("code", 2000, 20), ("batch", 8000, 400)}
    share = sum(a.slo_class == "batch" for a in in_bulk) / len(in_bulk)
    assert share == pytest.approx(0.25, abs=0.02)


def test_every_turn_of_a_phase_is_another_draw() -> None:
    workload = square_wave([Phase(10.0, 5.0, SHORT)], 30.0, seed=8)
    turns = [
        [a.at_s - 10 * turn for a in workload.arrivals if turn == int(a.at_s / 10)]
        for turn in range(3)
    ]
    assert all(turns)
    assert turns[0][0] != pytest.approx(turns[1][0])
    assert turns[1][0] != pytest.approx(turns[2][0])


def test_silence_and_a_last_turn_that_is_cut() -> None:
    workload = square_wave([Phase(3.0, 50.0, SHORT), Phase(7.0, 0.0, SHORT)], 11.5, seed=9)
    assert {int(a.at_s) for a in workload.arrivals} == {0, 1, 2, 10, 11}
    assert workload.duration_s < 11.5
    assert {a.slo_class for a in workload.arrivals} == {None}


def test_a_share_of_nothing_never_comes() -> None:
    phase = Phase(100.0, 10.0, SHORT, {"never": 0.0, "always": 2.0})
    assert square_wave([phase], 100.0, seed=10).class_counts.keys() == {"always"}


# Lengths


def test_lognormal_lengths_have_their_percentiles() -> None:
    prompts, outputs = AZURE_LIKE.draw(np.random.default_rng(1), 200_000)
    assert np.median(prompts) == pytest.approx(1020, rel=0.01)
    assert np.percentile(prompts, 99) == pytest.approx(4142, rel=0.02)
    assert np.median(outputs) == pytest.approx(129, rel=0.01)
    assert np.percentile(outputs, 99) == pytest.approx(601, rel=0.02)
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.01


def test_lognormal_lengths_are_cut_at_both_ends() -> None:
    source = LognormalLengths(1.0, 50.0, 100.0, 1e300, max_prompt_tokens=40, max_output_tokens=300)
    prompts, outputs = source.draw(np.random.default_rng(2), 10_000)
    assert (prompts.min(), prompts.max()) == (1, 40)
    assert (outputs.min(), outputs.max()) == (1, 300)


def test_lengths_of_a_trace_stay_in_pairs() -> None:
    prompts, outputs = TraceLengths(PAIRS).draw(np.random.default_rng(3), 3000)
    assert set((prompts + outputs).tolist()) == {1000}
    for number in (1, 20, 300):
        assert (prompts == number).sum() == pytest.approx(1000, abs=150)


@pytest.mark.parametrize("num_requests", [0, 1])
@pytest.mark.parametrize("source", SOURCES)
def test_few_lengths_or_none(source: LengthSource, num_requests: int) -> None:
    prompts, outputs = source.draw(np.random.default_rng(4), num_requests)
    assert len(prompts) == len(outputs) == num_requests


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 0.0}, "rate"),
        ({"rate": -1.0}, "rate"),
        ({"rate": math.nan}, "rate"),
        ({"rate": "5"}, "rate"),
        ({"duration_s": math.inf}, "duration_s"),
        ({"duration_s": 0}, "duration_s"),
        ({"rate": 1e9}, "rate · duration_s must be at most"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"burstiness": -0.1}, "burstiness"),
        ({"burstiness": math.nan}, "burstiness"),
        ({"burstiness": 1e5}, "burstiness must be at most"),
    ],
)
def test_gamma_names_a_wrong_argument(change: dict[str, Any], message: str) -> None:
    fine: dict[str, Any] = {
        "rate": 1.0,
        "duration_s": 10.0,
        "lengths": SHORT,
        "seed": 0,
        "burstiness": 1.0,
    }
    assert gamma(**fine).num_requests > 0
    with pytest.raises(ValueError, match=message):
        gamma(**fine | change)


def test_a_burst_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "MAX_REQUESTS", 20_000)
    with pytest.raises(ValueError, match="a burst's requests must be at most 20000"):
        gamma(100.0, 199.0, SHORT, 1, burstiness=1.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Phase(0.0, 1.0, SHORT), "duration_s"),
        (lambda: Phase(1.0, -1.0, SHORT), "rate"),
        (lambda: Phase(1.0, 1.0, SHORT, {"chat": -1.0}), r"mix\['chat'\]"),
        (lambda: Phase(1.0, 1.0, SHORT, {"chat": 0.0}), "mix must have a share above 0"),
        (lambda: Phase(1.0, 1.0, SHORT, {"a": 1}, {"b": SHORT}), "lengths_by_class names 'b'"),
        (lambda: square_wave([], 10.0, 0), "phases"),
        (lambda: square_wave([CHAT], 0.0, 0), "duration_s"),
        (lambda: square_wave([CHAT], 1e9, 0), "rate · duration_s"),
        (lambda: square_wave([Phase(1e-6, 0.0, SHORT)], 1e3, 0), "number of phases"),
        (lambda: square_wave([CHAT], 10.0, -1), "seed"),
        (lambda: FixedLengths(0, 1), "num_prompt_tokens"),
        (lambda: FixedLengths(1, 0), "num_output_tokens"),
        (lambda: LognormalLengths(0, 1, 1, 1), "prompt_p50"),
        (lambda: LognormalLengths(1, math.inf, 1, 1), "prompt_p99"),
        (lambda: LognormalLengths(1, 1, 5, 4), "output_p99 must not be below output_p50"),
        (lambda: LognormalLengths(1, 1, 1, 1, max_output_tokens=0), "max_output_tokens"),
        (lambda: LognormalLengths(9, 9, 1, 1, max_prompt_tokens=8), "prompt_p50 must not exceed 8"),
        (lambda: TraceLengths(Workload("none", ())), "'none' holds no request"),
    ],
)
def test_phases_and_lengths_name_a_wrong_argument(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
