"""Reports: seeds become points, points become curves, and curves are compared."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controller.simulation.causes import binding_names
from controller.simulation.hardware import A100_8B
from controller.simulation.leaders import attainment_at, budget_of
from controller.simulation.measures import measure
from controller.simulation.report import build_report, score
from controller.simulation.sweep import SweepRow, SweepTask
from tests.controller.simulation.test_measures import record, refused, result_of

ABOUT: dict[str, Any] = {
    "workload": "night & day", "num_requests": 4, "rate": 2.0, "seeds": [0, 1],
    "hardware": {"name": "<fast>"}, "learner": "learned",
}  # fmt: skip


def row(policy: str, load: float, seed: int, num_kept: int, rate: float | None = None) -> SweepRow:
    """A row of ten requests, of which so many were kept."""
    requests = [
        record(i, attained=i < num_kept, num_prompt_tokens=100 + i, tpot_s=0.01 * (i + 1))
        for i in range(9)
    ]
    gone = record(9, num_prompt_tokens=300) if num_kept == 10 else refused(9, num_prompt_tokens=300)
    measures = measure(result_of(*requests, gone), A100_8B).to_json()
    offered = 2.0 * load if rate is None else rate
    return SweepRow(SweepTask(policy, load, seed), offered, measures, "hash", 0.1)


def sweep() -> list[SweepRow]:
    kept = {("slo", 1.0): 10, ("slo", 2.0): 8, ("edf-256", 1.0): 9, ("edf-256", 2.0): 9}
    return [
        row(policy, load, seed, num - (seed if num < 9 else 0), 2.0 * load + 0.1 * seed)
        for (policy, load), num in kept.items()
        for seed in (0, 1)
    ]


def test_seeds_become_one_point_with_their_spread() -> None:
    report = build_report(sweep(), ABOUT)
    assert [policy.policy for policy in report.policies] == ["slo", "edf-256"]
    light, heavy = report.policies[0].points
    assert (light.load, heavy.load) == (1.0, 2.0)
    # Everybody is compared at the same rate, whatever a seed drew.
    assert light.rate == pytest.approx(2.05)
    assert report.policies[1].points[0].rate == light.rate
    assert light.attainment.mean == 1.0
    assert heavy.attainment.mean == pytest.approx(0.75)
    assert (heavy.attainment.low, heavy.attainment.high) == (0.7, 0.8)
    assert heavy.num_seeds == 2
    assert (light.refused, heavy.refused) == (0.0, 0.1)
    assert light.classes == {"chat": 1.0}
    assert len(light.deciles) == 10
    assert heavy.deciles[-1] == 0.0
    assert light.ttft_p50_s == 0.5
    assert light.tpot_p90_s is not None
    assert 0.0 < light.planner_share < 10.0


def old(found: SweepRow) -> SweepRow:
    """The row as it was recorded before causes were."""
    measures = {name: found.measures[name] for name in found.measures if "binding" not in name}
    for group in (measures["overall"], *measures["classes"], *measures["deciles"]):
        del group["misses"]
    return SweepRow(found.task, found.rate, measures, found.event_hash, found.wall_s)


def bound(found: SweepRow, **shares: float) -> SweepRow:
    """The row with other shares of steps, and of their time the other way round."""
    times = dict(zip(shares, reversed(shares.values()), strict=True))
    measures = found.measures | {"binding_steps": shares, "binding_time": times}
    return SweepRow(found.task, found.rate, measures, found.event_hash, found.wall_s)


def test_misses_and_constraints_are_means_over_the_seeds_that_know_them() -> None:
    rows = [
        bound(row("slo", 1.0, 0, 7), decode_slack=0.75, idle=0.25),
        bound(row("slo", 1.0, 1, 5), ttft_demand=1.0),
        old(row("slo", 1.0, 2, 0)),
        old(row("edf-64", 1.0, 0, 9)),
    ]
    report = build_report(rows, ABOUT)
    ours, theirs = (policy.points[0] for policy in report.policies)
    assert ours.misses == {"refused": 0.1, "other": pytest.approx(0.3)}
    assert ours.binding_steps == {"decode_slack": 0.375, "idle": 0.125, "ttft_demand": 0.5}
    assert ours.binding_time == {"decode_slack": 0.125, "idle": 0.375, "ttft_demand": 0.5}
    assert (theirs.misses, theirs.binding_steps, theirs.binding_time) == (None, None, None)
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert document["policies"][0]["points"][0]["binding_time"]["ttft_demand"] == 0.5
    assert binding_names([ours.binding_steps, None]) == ["decode_slack", "ttft_demand", "idle"]
    assert binding_names([{"of_tomorrow": 1.0, "idle": 0.0}]) == ["idle", "of_tomorrow"]


def test_goodput_and_crossovers_are_those_of_the_mean_curves() -> None:
    report = build_report(sweep(), ABOUT)
    ours, theirs = report.policies
    assert [found.level for found in ours.goodput] == [0.9, 0.99]
    # From 100 % at 2.05 to 75 % at 4.05.
    assert ours.goodput[0].rate == pytest.approx(2.05 + 2.0 * 0.1 / 0.25)
    assert theirs.goodput[0].is_bound
    assert theirs.goodput[1].rate is None
    # Seed 1 kept one more request of ten at the heavy load than the mean of both did, or one less.
    assert [found[0].rate for found in ours.goodput_by_seed] == [
        pytest.approx(2.05 + 2.0 * 0.1 / 0.2),
        pytest.approx(2.05 + 2.0 * 0.1 / 0.3),
    ]
    (crossing,) = report.crossovers
    assert (crossing.first, crossing.second) == ("slo", "edf-256")
    assert 2.05 < crossing.rate < 4.05
    # Where they cross, both keep the same.
    assert crossing.attainment == pytest.approx(attainment_at(theirs.curve, crossing.rate))


def test_a_budget_is_chosen_by_goodput_then_by_attainment() -> None:
    better = [row("a", 1.0, 0, 10), row("a", 2.0, 0, 8)]
    worse = [row("b", 1.0, 0, 8), row("b", 2.0, 0, 9)]
    even_worse = [row("c", 1.0, 0, 8), row("c", 2.0, 0, 8)]
    assert score(better, 0.9) > score(worse, 0.9) > score(even_worse, 0.9)


def test_an_empty_sweep_is_no_report() -> None:
    with pytest.raises(ValueError, match="rows"):
        build_report([], ABOUT)


def test_a_report_is_json() -> None:
    document = json.loads(json.dumps(build_report(sweep(), ABOUT).to_json(), allow_nan=False))
    assert document["format"] == 1
    assert document["policies"][0]["points"][0]["attainment"]["mean"] == 1.0
    assert document["shown"] == ["slo", "edf-256"]


def test_policies_that_are_not_shown_stay_in_the_numbers() -> None:
    report = build_report(sweep(), ABOUT, ["slo"])
    assert [policy.policy for policy in report.curves] == ["slo"]
    assert len(report.policies) == 2


def test_times_and_prompt_lengths_are_kept_by_class_and_tenth() -> None:
    (point, _) = build_report(sweep(), ABOUT).policies[0].points
    assert point.class_times["chat"].ttft_p90_s == point.ttft_p90_s
    assert point.class_times["chat"].tpot_p50_s == point.tpot_p50_s
    assert point.decile_tokens == (100, 101, 102, 103, 104, 105, 106, 107, 108, 300)


def test_the_best_budget_of_a_family_is_named_and_where_it_changes() -> None:
    kept = {"slo": (10, 10), "edf-64": (9, 5), "edf-256": (7, 7), "fcfs-512": (7, 7)}
    rows = [
        row(name, load, 0, num)
        for name, nums in kept.items()
        for load, num in zip((1.0, 2.0), nums, strict=True)
    ]
    report = build_report(rows, ABOUT)
    found = [(best.family, best.rate, best.policy) for best in report.best_budgets]
    # One budget is no choice.
    assert found == [("edf", 2.0, "edf-64"), ("edf", 4.0, "edf-256")]
    (change,) = report.budget_crossovers
    assert (change.first, change.second) == ("edf-64", "edf-256")
    # 90 % against 70 % at 2/s, 50 % against 70 % at 4/s.
    assert change.rate == pytest.approx(3.0)
    assert change.attainment == pytest.approx(0.7)


def test_a_best_budget_that_returns_is_two_changes() -> None:
    kept = {"edf-64": (9, 5, 9), "edf-256": (7, 7, 7)}
    rows = [
        row(name, load, 0, num)
        for name, nums in kept.items()
        for load, num in zip((1.0, 2.0, 3.0), nums, strict=True)
    ]
    found = build_report(rows, ABOUT).budget_crossovers
    assert [each.first for each in found] == ["edf-64", "edf-256"]
    assert [each.rate for each in found] == pytest.approx([3.0, 5.0])


def test_of_equal_budgets_the_smaller_one_is_best() -> None:
    rows = [row("edf-512", 1.0, 0, 9), row("edf-64", 1.0, 0, 9)]
    assert [best.policy for best in build_report(rows, ABOUT).best_budgets] == ["edf-64"]


def test_a_front_leaves_out_whoever_is_worse_in_both() -> None:
    def timed(policy: str, ttft_s: float, tpot_s: float) -> SweepRow:
        requests = [record(i, ttft_s=ttft_s, tpot_s=tpot_s) for i in range(10)]
        measures = measure(result_of(*requests), A100_8B).to_json()
        return SweepRow(SweepTask(policy, 1.0, 0), 2.0, measures, "hash", 0.1)

    rows = [timed("early", 0.1, 0.5), timed("worse", 0.4, 0.5), timed("fluent", 0.3, 0.1)]
    by_class = {front.slo_class: front for front in build_report(rows, ABOUT).fronts}
    assert set(by_class) == {"", "chat"}
    assert by_class["chat"].policies == ("early", "fluent")
    assert by_class[""].load == 1.0


def test_budgets_are_read_off_names() -> None:
    assert budget_of("edf-shed-384") == ("edf-shed", 384)
    assert budget_of("slack-greedy") is None


def test_nothing_is_known_beyond_a_curve() -> None:
    curve = build_report(sweep(), ABOUT).policies[0].curve
    with pytest.raises(ValueError, match="reach"):
        attainment_at(curve, 99.0)
