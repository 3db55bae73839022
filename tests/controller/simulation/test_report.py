"""Reports: seeds become points, points become curves, curves become one page."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.simulation.hardware import A100_8B
from controller.simulation.html import render_html
from controller.simulation.measures import measure
from controller.simulation.report import Report, build_report, score
from controller.simulation.svg import NUM_COLOURS, Line, Mark, legend, line_chart, scatter_chart
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
    assert "change places" in page(report)


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


# The page


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def by_class(svg: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [each for each in svg.iter() if kind in each.get("class", "").split()]


def page(report: Report | None = None) -> str:
    return render_html(report or build_report(sweep(), ABOUT))


def test_the_page_needs_nothing_from_anywhere() -> None:
    text = page()
    for word in ("http://", "https://", "<script", "<link", "src=", "url("):
        assert word not in text
    assert text.startswith("<!doctype html>")


def test_names_are_escaped() -> None:
    text = page()
    assert "night &amp; day on &lt;fast&gt;" in text
    assert "<fast>" not in text


def test_the_page_draws_every_curve_and_names_every_crossover() -> None:
    drawn = svgs(page())
    assert len(by_class(drawn[0], "line")) == 2
    assert len(by_class(drawn[0], "band")) == 2
    titles = [title.text for svg in drawn for title in svg.iter("title")]
    assert "slo at 4.05: 75.0%" in titles
    assert "slo and edf-256 change places at 2.85/s" in page()
    for heading in ("Attainment", "Per class", "Per tenth", "Bursts and fairness", "First token"):
        assert heading in page()


def test_static_budgets_that_are_no_curves_are_points_all_the_same() -> None:
    text = page(build_report(sweep(), ABOUT, ["slo"]))
    drawn = svgs(text)
    assert len(by_class(drawn[0], "line")) == 1
    labels = [each.text for svg in drawn for each in svg.iter("text")]
    # One Pareto chart per load.
    assert labels.count("edf-256") == 2
    assert labels.count("slo") == 2


def test_a_page_of_one_point_is_drawn_too() -> None:
    text = page(build_report([row("slo", 1.0, 0, 10)], ABOUT))
    assert "No curve crosses" in text
    assert all(by_class(svg, "dot") for svg in svgs(text))


# Charts


def test_points_stand_where_their_values_are() -> None:
    chart = line_chart(
        "t", [Line("a", ((0.0, 0.0), (1.0, 0.5), (2.0, 1.0)))], "x", "y", is_share=True
    )
    (svg,) = svgs(chart)
    dots = [(float(d.get("cx", 0)), float(d.get("cy", 0))) for d in by_class(svg, "dot")]
    xs, ys = zip(*dots, strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    assert ys[0] > ys[2]
    labels = [each.text for each in svg.iter("text")]
    assert {"0%", "100%", "0", "1", "2", "x", "y"} <= set(labels)


def test_a_scatter_chart_is_logarithmic() -> None:
    marks = [Mark(str(x), x, x) for x in (0.01, 0.1, 1.0)]
    (svg,) = svgs(scatter_chart("t", marks, "x", "y"))
    xs = [float(d.get("cx", 0)) for d in by_class(svg, "dot")]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert "0.1" in [each.text for each in svg.iter("text")]


VALUES = st.floats(0.0, 1e9)
POSITIVE = st.floats(1e-6, 1e9)


def assert_within(chart: str) -> None:
    """Everything is in the picture, and the axes have a few ticks each."""
    (svg,) = svgs(chart)
    _, _, width, height = map(float, svg.get("viewBox", "").split())
    for dot in by_class(svg, "dot"):
        assert 0 <= float(dot.get("cx", -1)) <= width
        assert 0 <= float(dot.get("cy", -1)) <= height
    assert 2 <= len(by_class(svg, "grid")) <= 20


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=6), st.booleans())
def test_any_curve_can_be_drawn(values: list[tuple[float, float]], is_share: bool) -> None:
    assert_within(line_chart("t", [Line("a", tuple(values))], "x", "y", is_share=is_share))


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=6))
def test_any_points_can_be_drawn(values: list[tuple[float, float]]) -> None:
    assert_within(scatter_chart("t", [Mark("a", x, y) for x, y in values], "x", "y"))


def test_a_short_stretch_of_a_logarithmic_axis_has_ticks_too() -> None:
    (svg,) = svgs(scatter_chart("t", [Mark("a", 0.0312, 0.0312)], "x", "y"))
    assert "0.03" in [each.text for each in svg.iter("text")]


def test_a_chart_of_nothing_says_so() -> None:
    assert "nothing to show" in line_chart("t", [Line("a", ())], "x", "y")
    assert "nothing to show" in scatter_chart("t", [], "x", "y")


def test_colours_repeat_when_they_run_out() -> None:
    text = legend([f"p{i}" for i in range(NUM_COLOURS + 1)])
    assert text.count("k0") == 2


def test_a_span_too_small_for_ticks_is_widened() -> None:
    for x, y in ((5e-324, 1.0), (1.0, 1.0 + 2e-16), (1e-13, 1.0)):
        chart = line_chart("t", [Line("a", ((0.0, 1.0), (x, y)))], "x", "y", is_share=False)
        assert_within(chart)
