"""Workloads from workloads: what changes, what stays, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.workload.arrivals import Arrival, Workload, sorted_workload
from controller.workload.generators import poisson
from controller.workload.lengths import LognormalLengths
from controller.workload.transforms import (
    assign_classes,
    assign_classes_by_length,
    classes_by_prompt,
    clip_lengths,
    drop_too_long,
    jitter,
    merge,
    scale_lengths,
    scale_rate,
    take,
    window,
    with_rate,
)

FOUR = Workload(
    "four",
    (
        Arrival(0.0, 100, 10, "chat", (1,), 512),
        Arrival(1.0, 2000, 20, None, (1, 2, 3, 4), 512),
        Arrival(1.0, 300, 30, "code"),
        Arrival(4.0, 4000, 4000, None, (1, 2, 3, 4, 5, 6, 7, 8), 512),
    ),
)
MANY = poisson(20.0, 100.0, LognormalLengths(500, 4000, 100, 300), seed=1)
MIX = {"chat": 0.5, "code": 0.3, "batch": 0.2}


def test_scaling_the_rate_compresses_time() -> None:
    fast = scale_rate(FOUR, 4.0)
    assert [a.at_s for a in fast.arrivals] == [0.0, 0.25, 0.25, 1.0]
    assert fast.rate == pytest.approx(4 * FOUR.rate)
    assert [a.num_prompt_tokens for a in fast.arrivals] == [100, 2000, 300, 4000]
    assert fast.name == "four"
    assert with_rate(FOUR, 10.0).rate == pytest.approx(10.0)


def test_a_window_counts_from_its_start() -> None:
    part = window(FOUR, 1.0, 4.0)
    assert [(a.at_s, a.num_prompt_tokens) for a in part.arrivals] == [(0.0, 2000), (0.0, 300)]
    assert [a.at_s for a in window(FOUR, 0.5).arrivals] == [0.5, 0.5, 3.5]
    assert window(FOUR, 5.0, 6.0).arrivals == ()


def test_taking_the_first() -> None:
    assert take(FOUR, 2).arrivals == FOUR.arrivals[:2]
    assert take(FOUR, 9) == FOUR


def test_jitter_moves_forward_within_the_quantum() -> None:
    ticks = Workload(
        "ticks", tuple(Arrival(number // 10 * 0.5, number, 1) for number in range(1, 4000))
    )
    moved = jitter(ticks, 0.5, seed=2)
    moved_s = [a.at_s - a.num_prompt_tokens // 10 * 0.5 for a in moved.arrivals]
    assert all(0.0 <= by_s < 0.5 for by_s in moved_s)
    assert np.mean(moved_s) == pytest.approx(0.25, abs=0.02)
    assert np.std(moved_s) == pytest.approx(0.5 / math.sqrt(12), abs=0.01)
    assert jitter(ticks, 0.0, seed=2) == ticks


# Classes


def test_classes_are_drawn_by_their_shares() -> None:
    mixed = assign_classes(MANY, {"chat": 50, "code": 30, "batch": 20}, seed=3)
    for name, share in MIX.items():
        assert mixed.class_counts[name] / MANY.num_requests == pytest.approx(share, abs=0.04)
    assert assign_classes(MANY, MIX, seed=3) == mixed
    assert assign_classes(MANY, MIX, seed=4) != mixed
    assert [a.at_s for a in mixed.arrivals] == [a.at_s for a in MANY.arrivals]


def test_classes_do_not_follow_from_arrivals_of_the_same_seed() -> None:
    # One stream for both would give the long gaps to one class.
    mixed = assign_classes(MANY, {"a": 1, "b": 1}, seed=1)
    gaps = np.diff([0.0, *(a.at_s for a in mixed.arrivals)])
    is_a = np.array([a.slo_class == "a" for a in mixed.arrivals])
    assert gaps[is_a].mean() == pytest.approx(gaps[~is_a].mean(), rel=0.15)


def mean_prompt(workload: Workload, name: str) -> float:
    lengths = [a.num_prompt_tokens for a in workload.arrivals if a.slo_class == name]
    return float(np.mean(lengths))


def test_classes_by_length_give_the_shortest_to_the_first() -> None:
    mixed = assign_classes_by_length(MANY, MIX, seed=5)
    for name, share in MIX.items():
        assert mixed.class_counts[name] == pytest.approx(share * MANY.num_requests, abs=1)
    longest = max(a.num_prompt_tokens for a in mixed.arrivals if a.slo_class == "chat")
    shortest = min(a.num_prompt_tokens for a in mixed.arrivals if a.slo_class == "batch")
    assert longest < shortest


def test_correlation_goes_from_none_to_full() -> None:
    means = [
        mean_prompt(assign_classes_by_length(MANY, MIX, seed=5, correlation=c), "batch")
        for c in (0.0, 0.3, 0.7, 1.0)
    ]
    assert means == sorted(means)
    overall = np.mean([a.num_prompt_tokens for a in MANY.arrivals])
    assert means[0] == pytest.approx(overall, rel=0.15)
    assert means[3] > 2 * overall
    uncorrelated = assign_classes_by_length(MANY, MIX, seed=5, correlation=0.0)
    assert uncorrelated.class_counts["chat"] == pytest.approx(MANY.num_requests / 2, abs=1)


@given(
    num_requests=st.integers(0, 30),
    weights=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4).filter(lambda w: sum(w) > 0.1),
    correlation=st.floats(0.0, 1.0),
)
def test_every_request_has_a_class_and_every_class_its_share(
    num_requests: int, weights: list[float], correlation: float
) -> None:
    alike = Workload("alike", tuple(Arrival(0.0, 7, 1) for _ in range(num_requests)))
    mix = {f"class {index}": weight for index, weight in enumerate(weights)}
    counts = assign_classes_by_length(alike, mix, 0, correlation=correlation).class_counts
    assert sum(counts.values()) == num_requests
    assert counts.keys() <= mix.keys()
    for name, weight in mix.items():
        share = weight / sum(weights)
        assert counts.get(name, 0) == pytest.approx(share * num_requests, abs=1.0 + 1e-6)


def test_classes_by_bounds() -> None:
    bounds = {"short": 100, "middle": 2000, "long": math.inf}
    named = classes_by_prompt(FOUR, bounds)
    assert [a.slo_class for a in named.arrivals] == ["short", "middle", "middle", "long"]


# Lengths


def test_scaling_lengths_keeps_what_is_shared() -> None:
    half = scale_lengths(FOUR, prompt=0.5, output=2.0)
    assert [a.num_prompt_tokens for a in half.arrivals] == [50, 1000, 150, 2000]
    assert [a.num_output_tokens for a in half.arrivals] == [20, 40, 60, 8000]
    assert half.arrivals[1].prefix_ids == (1, 2, 3, 4)
    assert half.arrivals[1].prefix_block_tokens == 256
    tiny = scale_lengths(FOUR, prompt=1e-9, output=1e-9)
    assert {(a.num_prompt_tokens, a.num_output_tokens) for a in tiny.arrivals} == {(1, 1)}


def test_clipping_cuts_only_what_does_not_fit() -> None:
    clipped = clip_lengths(FOUR, 1024)
    lengths = [(a.num_prompt_tokens, a.num_output_tokens) for a in clipped.arrivals]
    assert lengths == [(100, 10), (1004, 20), (300, 30), (512, 512)]
    assert [len(a.prefix_ids) for a in clipped.arrivals] == [1, 2, 0, 1]
    assert clip_lengths(FOUR, 8000) == FOUR


def test_a_short_prompt_leaves_more_than_half_to_the_answer() -> None:
    chatty = Workload("chatty", (Arrival(0.0, 10, 5000),))
    assert clip_lengths(chatty, 1000).arrivals[0] == Arrival(0.0, 10, 990)


@given(
    num_prompt=st.integers(1, 5000),
    num_output=st.integers(1, 5000),
    max_model_len=st.integers(2, 4000),
    block=st.integers(1, 700),
)
def test_whatever_is_clipped_fits_and_never_grows(
    num_prompt: int, num_output: int, max_model_len: int, block: int
) -> None:
    ids = tuple(range(-(-num_prompt // block)))
    before = Arrival(0.0, num_prompt, num_output, None, ids, block)
    (after,) = clip_lengths(Workload("one", (before,)), max_model_len).arrivals
    total = after.num_prompt_tokens + after.num_output_tokens
    assert total == min(max_model_len, num_prompt + num_output)
    assert after.num_prompt_tokens <= num_prompt
    assert after.num_output_tokens <= num_output
    assert after.prefix_ids == ids[: -(-after.num_prompt_tokens // block)]


def test_dropping_what_is_too_long() -> None:
    assert drop_too_long(FOUR, 2020).arrivals == FOUR.arrivals[:3]
    assert drop_too_long(FOUR, 2019).num_requests == 2


# Several as one


def test_merging_sorts_and_keeps_blocks_apart() -> None:
    other = Workload(
        "other", (Arrival(1.0, 5, 5, "x", (0, 1)[:1]), Arrival(9.0, 600, 5, "x", (1, 2)))
    )
    both = merge(FOUR, other)
    assert both.name == "four + other"
    assert [a.at_s for a in both.arrivals] == [0.0, 1.0, 1.0, 1.0, 4.0, 9.0]
    assert [a.slo_class for a in both.arrivals] == ["chat", None, "code", "x", None, "x"]
    assert both.arrivals[3].prefix_ids == (9,)
    assert both.arrivals[5].prefix_ids == (10, 11)
    assert both.arrivals[4].prefix_ids == FOUR.arrivals[3].prefix_ids
    shared = merge(FOUR, other, name="mine", is_prefix_shared=True)
    assert (shared.name, shared.arrivals[5].prefix_ids) == ("mine", (1, 2))


@given(st.lists(st.lists(st.floats(0, 100), max_size=5), min_size=1, max_size=4))
def test_merging_loses_nothing(times: list[list[float]]) -> None:
    parts = [
        sorted_workload(f"w{index}", [Arrival(at_s, 1, 1, f"w{index}") for at_s in part])
        for index, part in enumerate(times)
    ]
    both = merge(*parts)
    for part in parts:
        assert tuple(a for a in both.arrivals if a.slo_class == part.name) == part.arrivals


# Refusals


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: scale_rate(FOUR, 0.0), "factor"),
        (lambda: scale_rate(FOUR, math.inf), "factor"),
        (lambda: with_rate(FOUR, -1.0), "rate"),
        (lambda: with_rate(take(FOUR, 1), 1.0), "'four' has no rate"),
        (lambda: window(FOUR, -1.0, 2.0), "start_s"),
        (lambda: window(FOUR, 2.0, 2.0), "end_s"),
        (lambda: window(FOUR, 2.0, math.nan), "end_s"),
        (lambda: take(FOUR, 0), "num_requests"),
        (lambda: take(FOUR, 1.5), "num_requests"),  # type: ignore[arg-type]
        (lambda: jitter(FOUR, -1.0, 0), "quantum_s"),
        (lambda: jitter(FOUR, 1.0, -1), "seed"),
        (lambda: assign_classes(FOUR, {}, 0), "mix must name at least one class"),
        (lambda: assign_classes(FOUR, {"a": -1.0, "b": 2.0}, 0), r"mix\['a'\]"),
        (lambda: assign_classes(FOUR, {"a": math.nan}, 0), r"mix\['a'\]"),
        (lambda: assign_classes(FOUR, {"a": 0.0}, 0), "share above 0"),
        (lambda: assign_classes(FOUR, {"a": 1.7e308, "b": 1.7e308}, 0), "mix"),
        (lambda: assign_classes(FOUR, {" ": 1.0}, 0), "slo_class"),
        (lambda: assign_classes(FOUR, MIX, -5), "seed"),
        (lambda: assign_classes_by_length(FOUR, MIX, 0, correlation=1.1), "correlation"),
        (lambda: assign_classes_by_length(FOUR, MIX, 0, correlation=math.nan), "correlation"),
        (lambda: classes_by_prompt(FOUR, {}), "bounds must name"),
        (lambda: classes_by_prompt(FOUR, {"a": 10, "b": 10}), "bounds must ascend"),
        (lambda: classes_by_prompt(FOUR, {"a": 10, "b": 2000}), "4000 tokens exceeds the last"),
        (lambda: scale_lengths(FOUR, prompt=0.0), "prompt"),
        (lambda: scale_lengths(FOUR, output=math.nan), "output"),
        (lambda: scale_lengths(FOUR, output=1e9), "num_output_tokens"),
        (lambda: clip_lengths(FOUR, 1), "max_model_len"),
        (lambda: drop_too_long(FOUR, 1), "max_model_len"),
        (merge, "workloads must not be empty"),
    ],
)
def test_a_wrong_argument_is_named(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_nothing_changes_the_workload_it_is_given() -> None:
    before = tuple(FOUR.arrivals)
    changed = [
        scale_rate(FOUR, 2.0),
        assign_classes(FOUR, MIX, 0),
        scale_lengths(FOUR, prompt=3.0),
        merge(FOUR, FOUR),
    ]
    assert FOUR not in changed
    assert FOUR.arrivals == before
