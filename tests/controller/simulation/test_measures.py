"""Measures: every definition on records that can be counted by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.simulation.goodput import (
    Goodput,
    LoadPoint,
    crossovers,
    goodput,
    mean_curve,
    shown,
)
from controller.simulation.hardware import A100_8B
from controller.simulation.measures import (
    GroupMeasures,
    Percentiles,
    alone_seconds,
    burst_recovery_s,
    by_prompt_length,
    jain_index,
    measure,
)
from controller.simulation.records import MissCause, SimulatedRequest, SimulationResult
from controller.simulation.run import SimulationConfig, simulate
from controller.workload.arrivals import Arrival, Workload
from costmodel.features import StepFeatures


def record(index: int = 0, **changes: Any) -> SimulatedRequest:
    values: dict[str, Any] = {
        "index": index, "slo_class": "chat", "arrived_at": float(index), "num_prompt_tokens": 100,
        "num_wanted_tokens": 10, "num_output_tokens": 10, "num_cached_tokens": 0,
        "decision": "admit", "reason": "admitted", "is_degraded": False, "finish_reason": "stop",
        "first_token_at": index + 0.5, "ended_at": index + 1.0, "wait_s": 0.1, "ttft_s": 0.5,
        "tpot_s": 0.05, "e2e_s": 1.0, "longest_gap_s": 0.06, "fluidity": 1.0,
        "num_preemptions": 0, "predicted_ttft_s": 0.4, "ttft_target_s": 1.0,
        "tpot_target_s": 0.05, "is_ttft_met": True, "is_tpot_met": True, "attained": True,
    }  # fmt: skip
    return SimulatedRequest(**(values | changes))


def refused(index: int = 0, **changes: Any) -> SimulatedRequest:
    gone: dict[str, Any] = {
        "finish_reason": "rejected", "decision": "reject", "reason": "overloaded",
        "num_output_tokens": 0, "ttft_s": None, "tpot_s": None, "e2e_s": None,
        "longest_gap_s": 0.0, "attained": False,
    }  # fmt: skip
    return record(index, **(gone | changes))


def test_attainment_counts_the_refused_and_the_late_as_missed() -> None:
    group = GroupMeasures.of("g", [record(), record(1, attained=False), refused(2), record(3)])
    assert group.attainment == 0.5
    assert (group.num_offered, group.num_served, group.num_refused) == (4, 3, 1)


def test_a_miss_counts_once_by_its_first_cause() -> None:
    late = record(3, attained=False, is_ttft_met=False, is_tpot_met=False)
    slow = record(4, attained=False, is_tpot_met=False)
    never = record(5, attained=None, finish_reason="error", is_ttft_met=None, is_tpot_met=None)
    group = GroupMeasures.of(
        "g", [record(), refused(1), refused(2, is_ttft_met=False), late, slow, never]
    )
    assert group.misses == {
        "refused": 2,
        "first_token_late": 1,
        "tokens_too_slow": 1,
        "other": 1,
    }
    assert list(group.misses) == list(MissCause)
    assert sum(group.misses.values()) == round(6 * (1 - group.attainment))
    assert GroupMeasures.of("g", [record()]).misses == {}


def test_steps_and_their_time_are_shared_out_by_what_bound_them() -> None:
    result = result_of(record())
    steps = replace(
        result.steps,
        bindings={"decode_slack": 3, "idle": 1},
        bound_s={"decode_slack": 1.0, "idle": 1.0},
    )
    measured = measure(replace(result, steps=steps), A100_8B)
    assert measured.binding_steps == {"decode_slack": 0.75, "idle": 0.25}
    assert measured.binding_time == {"decode_slack": 0.5, "idle": 0.5}
    without = replace(result, steps=replace(steps, bindings={}, bound_s={}))
    assert measure(without, A100_8B).binding_steps == {}


def test_best_effort_is_kept_when_it_is_served() -> None:
    served = record(attained=None, finish_reason="length")
    lost = record(1, attained=None, finish_reason="error")
    assert [served.is_kept, lost.is_kept] == [True, False]
    assert GroupMeasures.of("g", [served, lost]).attainment == 0.5


def test_percentiles_are_over_those_who_have_the_number() -> None:
    group = GroupMeasures.of(
        "g", [record(i, ttft_s=float(i), wait_s=float(i)) for i in range(101)] + [refused(200)]
    )
    assert group.ttft_s == Percentiles(101, 50.0, 90.0, 99.0, 100.0)
    assert group.longest_wait_s == 100.0
    assert Percentiles.of([None]) is None
    # One token has no gap.
    assert GroupMeasures.of("g", [record(num_output_tokens=1, longest_gap_s=0.0)]).gap_s is None


def test_an_empty_group_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'nobody' is empty"):
        GroupMeasures.of("nobody", [])


def test_deciles_are_tenths_by_prompt_length() -> None:
    requests = [record(i, num_prompt_tokens=1000 - i, attained=i < 50) for i in range(100)]
    deciles = by_prompt_length(requests)
    assert [each.num_offered for each in deciles] == [10] * 10
    assert deciles[0].name == "901-910"
    assert [each.attainment for each in deciles] == [0.0] * 5 + [1.0] * 5
    assert len(by_prompt_length(requests[:3])) == 3


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=20))
def test_jains_index_is_between_one_share_and_all(shares: list[float]) -> None:
    assert 1.0 / len(shares) - 1e-9 <= jain_index(shares) <= 1.0 + 1e-9


def test_jains_index_of_extremes() -> None:
    assert jain_index([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([0.0, 0.0]) == 1.0


def test_alone_a_request_takes_its_chunks_and_its_decodes() -> None:
    prefill = StepFeatures(1000.0, chunk_squared_tokens=1e6, num_chunks=1.0, num_prompt_logits=1.0)
    decode = StepFeatures(num_decode_requests=1.0, decode_context_tokens=1005.0)
    expected = A100_8B.seconds(prefill) + 9 * A100_8B.seconds(decode)
    assert alone_seconds(A100_8B, 1000, 10) == pytest.approx(expected)
    # A prompt beyond one step's tokens is cut, and pays for its past.
    pieces_s = alone_seconds(A100_8B, 8192, 1) + alone_seconds(A100_8B, 8192, 1)
    assert alone_seconds(A100_8B, 16_384, 1) > pieces_s


@pytest.mark.parametrize(
    ("kept_bins", "recovery_s"),
    [
        # The burst is in bin 3; bins of 10 s.
        ("1110111111", 0.0),
        ("1110001111", 20.0),
        ("1110010111", 30.0),
        ("1110000011", None),
        ("1110000000", None),
    ],
)
def test_recovery_counts_from_the_end_of_the_burst(
    kept_bins: str, recovery_s: float | None
) -> None:
    requests, demand_s = [], []
    for i, kept in enumerate(kept_bins):
        for _ in range(30 if i == 3 else 5):
            requests.append(record(i, arrived_at=10.0 * i + 1.0, attained=kept == "1"))
            demand_s.append(1.0)
    assert burst_recovery_s(requests, demand_s) == (True, recovery_s)


def test_steady_traffic_has_no_burst() -> None:
    requests = [record(i, arrived_at=10.0 * i, attained=False) for i in range(10)]
    assert burst_recovery_s(requests, [1.0] * 10) == (False, None)


def result_of(*requests: SimulatedRequest) -> SimulationResult:
    steps = simulate(Workload("w", (Arrival(0.0, 8, 2),)), "fcfs-64", A100_8B).steps
    return SimulationResult("w", "p", "a100-8b", 0, 1.0, requests, steps, "0", 0.0)


def test_a_simulation_in_numbers() -> None:
    alone_s = alone_seconds(A100_8B, 100, 10)
    measured = measure(
        result_of(
            record(0, arrived_at=0.0, ended_at=alone_s),
            record(1, arrived_at=1.0, ended_at=1.0 + 4 * alone_s, attained=False, slo_class="code"),
            refused(2, arrived_at=2.0, ended_at=2.0, num_wanted_tokens=10),
            record(3, arrived_at=8.0, ended_at=10.0),
        ),
        A100_8B,
    )
    assert measured.refusals == {"overloaded": 1}
    assert measured.overall.misses == {"refused": 1, "other": 1}
    assert [(each.name, each.num_offered) for each in measured.classes] == [
        ("chat", 3),
        ("code", 1),
    ]
    assert measured.largest_slowdown == pytest.approx(max(4.0, 2.0 / alone_s))
    speeds = [1.0, 0.25, 0.0, alone_s / 2.0]
    assert measured.jain_index == pytest.approx(jain_index(speeds))
    # Two requests of 110 tokens were kept, three of 10 output tokens were served, in 10 seconds.
    assert measured.useful_tokens_per_s == pytest.approx(22.0)
    assert measured.output_tokens_per_s == pytest.approx(3.0)
    assert json.loads(json.dumps(measured.to_json(), allow_nan=False))["refusals"]


def test_a_real_run_measures_up_to_its_records() -> None:
    arrivals = tuple(Arrival(0.05 * i, 700, 20) for i in range(100))
    result = simulate(Workload("steady", arrivals), "slo", A100_8B, SimulationConfig(seed=4))
    measured = measure(result, A100_8B)
    assert measured.overall.num_offered == 100
    assert measured.overall.attainment == 1.0
    assert measured.num_steps == result.steps.num_steps
    assert measured.mean_step_s == pytest.approx(result.steps.busy_s / measured.num_steps)
    assert sum(each.num_offered for each in measured.deciles) == 100
    assert measured.largest_slowdown is not None
    # Nobody is much faster than alone.
    assert measured.largest_slowdown > 0.9


# Goodput


def points(*pairs: tuple[float, float]) -> list[LoadPoint]:
    return [LoadPoint(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("curve", "rate", "is_bound"),
    [
        ([(1.0, 1.0), (2.0, 1.0), (3.0, 0.8)], 2.5, False),
        ([(3.0, 0.8), (1.0, 1.0), (2.0, 1.0)], 2.5, False),
        ([(1.0, 1.0), (2.0, 0.9), (3.0, 0.5)], 2.0, False),
        ([(1.0, 1.0), (2.0, 0.95)], 2.0, True),
        ([(1.0, 0.5), (2.0, 1.0)], None, False),
        # Holding again beyond a rate that does not is luck.
        ([(1.0, 1.0), (2.0, 0.8), (3.0, 1.0)], 1.5, False),
        # Seeds at one rate count by their mean.
        ([(1.0, 1.0), (2.0, 1.0), (2.0, 0.7)], 1.0 + 0.1 / 0.15, False),
    ],
)
def test_goodput_is_where_attainment_falls_below(
    curve: list[tuple[float, float]], rate: float | None, is_bound: bool
) -> None:
    found = goodput(points(*curve), 0.9)
    assert found == Goodput(0.9, found.rate, is_bound)
    assert found.rate == (None if rate is None else pytest.approx(rate))


@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(0.0, 1.0)), min_size=1, max_size=8),
    st.floats(0.05, 1.0),
)
def test_goodput_lies_within_the_sweep(curve: list[tuple[float, float]], level: float) -> None:
    found = goodput(points(*curve), level)
    rates = [rate for rate, _ in curve]
    if found.rate is not None:
        assert min(rates) <= found.rate <= max(rates)
    assert found.is_bound == all(p.attainment >= level for p in mean_curve(points(*curve)))


def test_a_goodput_is_shown_with_its_seeds() -> None:
    held, fell = Goodput(0.9, 2.0, True), Goodput(0.9, 1.5, False)
    assert shown(held) == "≥ 2.00"
    assert shown(fell, [fell]) == "1.50"
    assert shown(fell, [fell, held]) == "1.50 (1.50–2.00)"
    assert shown(fell, [fell, fell]) == "1.50"
    assert shown(fell, [fell, Goodput(0.9, None, False)]) == "1.50 (below all–1.50)"
    assert shown(Goodput(0.9, None, False), [held, held]) == "below all"


def test_wrong_questions_about_goodput_are_refused() -> None:
    with pytest.raises(ValueError, match="level"):
        goodput(points((1.0, 1.0)), 0.0)
    with pytest.raises(ValueError, match="points"):
        goodput([], 0.9)


def test_curves_cross_where_they_change_places() -> None:
    first = points((1.0, 1.0), (2.0, 0.9), (3.0, 0.8), (4.0, 0.7))
    second = points((1.0, 0.9), (2.0, 0.9), (3.0, 0.9), (4.0, 0.6))
    assert crossovers(first, second) == [pytest.approx(2.0), pytest.approx(3.5)]
    assert crossovers(first, first) == []
    # Ahead by ten points is no lead where it takes more than that: nobody leads at all.
    assert crossovers(first, second, least_lead=0.11) == []
    assert crossovers(first, points((1.0, 0.9), (9.0, 1.0))) == []
