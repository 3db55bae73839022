"""Charts: marks stand where their values are, and nothing covers a label."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from controller.simulation.svg import (
    Axis,
    Level,
    Line,
    Mark,
    legend,
    letter,
    line_chart,
    scatter_chart,
)
from controller.simulation.svg_marks import NUM_COLOURS, Box, place_labels, text_box
from controller.simulation.svg_scale import Scale, spans_widely
from tests.controller.simulation.page_parts import assert_legible, by_class, place, svgs, texts

X, Y = Axis("offered requests per second"), Axis("seconds")
VALUES = st.floats(0.0, 1e9)
POSITIVE = st.floats(1e-6, 1e9)


def test_points_stand_where_their_values_are() -> None:
    chart = line_chart("t", [Line("a", ((0.0, 0.0), (1.0, 0.5), (2.0, 1.0)))], X, Y, is_share=True)
    (svg,) = svgs(chart)
    xs, ys = zip(*map(place, by_class(svg, "dot")), strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    assert ys[0] > ys[2]
    labels = [text for text, _ in texts(svg)]
    assert {"0%", "100%", "0", "1", "2", X.label, Y.label} <= set(labels)


def test_a_chart_says_what_it_shows() -> None:
    chart = line_chart("TTFT <P50>", [Line("a & b", ((1.0, 0.25), (2.0, 16.64)))], X, Y)
    (svg,) = svgs(chart)
    assert svg.findtext("title") == "TTFT <P50>"
    assert svg.findtext("desc") == (
        "seconds against offered requests per second. a & b: 0.250 at 1.00, 16.6 at 2.00."
    )
    assert [each.findtext("title") for each in by_class(svg, "dot")] == [
        "a & b at 1.00: 0.250",
        "a & b at 2.00: 16.6",
    ]


def test_a_scatter_chart_is_logarithmic() -> None:
    marks = [Mark(str(x), x, x) for x in (0.01, 0.1, 1.0)]
    (svg,) = svgs(scatter_chart("t", marks, X, Y))
    # Marks are drawn last first, so that the first one is on top.
    xs = [place(dot)[0] for dot in by_class(svg, "dot")][::-1]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert "0.1" in [text for text, _ in texts(svg)]
    assert f"{X.label}, log scale" in [text for text, _ in texts(svg)]


def test_a_wide_span_may_be_logarithmic() -> None:
    line = [Line("a", ((1.0, 0.2), (2.0, 90.0)))]
    straight, logarithmic = (line_chart("t", line, X, Y, may_be_log=may) for may in (False, True))
    assert "log scale" not in straight
    assert "seconds, log scale" in logarithmic
    assert "log scale" not in line_chart("t", [Line("a", ((1.0, 0.0),))], X, Y, may_be_log=True)
    assert spans_widely([1.0, 31.0])
    assert not spans_widely([1.0, 29.0])
    assert not spans_widely([])


def test_a_level_is_drawn_where_it_is_near() -> None:
    line = [Line("a", ((1.0, 1.0), (2.0, 3.0)))]
    near, far = (line_chart("t", line, X, Y, levels=[Level(v, "target")]) for v in (5.0, 60.0))
    assert "target" in near
    assert len(by_class(svgs(near)[0], "level")) == 1
    assert "target" not in far
    # A level on top of the picture keeps clear of the axis' own label.
    wide = line_chart("t", line, X, Axis("a very long label of an axis, up to the right edge"),
                      levels=[Level(4.0, "target 4 s")])  # fmt: skip
    assert_legible(svgs(wide)[0])


def test_crossings_have_letters() -> None:
    line = [Line("a", ((1.0, 0.2), (2.0, 0.9)))]
    chart = line_chart("t", line, X, Y, is_share=True, crossings=[(1.5, 0.55), (1.9, 0.8)])
    (svg,) = svgs(chart)
    assert len(by_class(svg, "crossing")) == 2
    assert {"A", "B"} <= {text for text, _ in texts(svg)}
    assert [letter(index) for index in (0, 25, 26, 52)] == ["A", "Z", "AA", "BA"]


def test_every_chart_reaches_as_far_as_it_is_told() -> None:
    line = [Line("a", ((4.0, 1.0),))]
    (svg,) = svgs(line_chart("t", line, Axis("x", reach=(2.0, 10.0)), Y))
    assert {"2", "10"} <= {text for text, _ in texts(svg)}


def test_names_of_an_axis_that_would_touch_are_left_out() -> None:
    names = tuple(f"{i} tokens or so" for i in range(10))
    line = [Line("a", tuple((float(i), 0.5) for i in range(1, 11)))]
    (svg,) = svgs(line_chart("t", line, Axis("x", names), Y, is_share=True))
    assert_legible(svg)
    shown = [text for text, _ in texts(svg) if text in names]
    assert shown[0] == names[0]
    assert 2 <= len(shown) < 10


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=6), st.booleans(), st.booleans())
def test_any_curve_can_be_drawn(
    values: list[tuple[float, float]], is_share: bool, may_be_log: bool
) -> None:
    chart = line_chart(
        "t", [Line("a", tuple(values))], X, Y, is_share=is_share, may_be_log=may_be_log
    )
    assert_legible(svgs(chart)[0])


@example([(6004110.0, 918105619.0), (51243.0, 460786134.0), (1.0, 3750001.0)])
@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=16))
def test_any_points_can_be_drawn(values: list[tuple[float, float]]) -> None:
    marks = [Mark(f"edf-{2**i}", x, y, i % 3 or None) for i, (x, y) in enumerate(values)]
    (svg,) = svgs(scatter_chart("t", marks, X, Y, targets=(1.0, None)))
    assert_legible(svg)


def test_labels_in_a_crowd_get_leaders_and_cover_nothing() -> None:
    marks = [Mark(f"edf-{2**i}", 1.0 + i * 0.002, 50.0, None) for i in range(6)]
    (svg,) = svgs(scatter_chart("t", [*marks, Mark("slo", 3.0, 20.0, 0)], X, Y))
    assert_legible(svg)
    assert {mark.name for mark in marks} <= {text for text, _ in texts(svg)}
    assert by_class(svg, "leader")


def test_a_label_without_a_place_is_left_out() -> None:
    area = Box(0.0, 0.0, 40.0, 20.0)
    assert place_labels(["much too long for this"], [(20.0, 10.0)], area) == [None]
    assert text_box("iii", 0.0, 0.0).right < text_box("mmm", 0.0, 0.0).right


def test_families_are_joined_and_targets_drawn() -> None:
    marks = [Mark("edf-64", 2.0, 20.0, None, "64"), Mark("edf-256", 1.0, 40.0, None, "256")]
    chart = scatter_chart("t", marks, X, Y, chains=[[(2.0, 20.0), (1.0, 40.0)]],
                          targets=(1.0, 50.0))  # fmt: skip
    (svg,) = svgs(chart)
    assert len(by_class(svg, "chain")) == 1
    assert len(by_class(svg, "level")) == 2
    assert {"64", "256"} <= {text for text, _ in texts(svg)}


def test_a_short_stretch_of_a_logarithmic_axis_has_ticks_too() -> None:
    (svg,) = svgs(scatter_chart("t", [Mark("a", 0.0312, 0.0312)], X, Y))
    assert "0.03" in [text for text, _ in texts(svg)]


@given(POSITIVE, POSITIVE)
def test_a_logarithmic_axis_has_a_few_ticks(one: float, other: float) -> None:
    assert 2 <= len(Scale.around([one, other], is_log=True).ticks()) <= 8


def test_a_chart_of_nothing_says_why() -> None:
    assert "Nobody came." in line_chart("t", [Line("a", ())], X, Y, nothing="Nobody came.")
    assert "Nothing to show." in scatter_chart("t", [], X, Y)


def test_shapes_and_dashes_tell_policies_apart_too() -> None:
    text = legend([f"p{i}" for i in range(NUM_COLOURS + 1)])
    keys = text.split("<li>")[1:]
    shapes = {key.split("<")[3] for key in keys[:NUM_COLOURS]}
    assert len(shapes) == NUM_COLOURS
    # The ninth has the first one's colour and shape, hollow.
    assert text.count("hollow") == 1
    assert "hollow" in keys[-1]


def test_a_span_too_small_for_ticks_is_widened() -> None:
    for x, y in ((5e-324, 1.0), (1.0, 1.0 + 2e-16), (1e-13, 1.0)):
        chart = line_chart("t", [Line("a", ((0.0, 1.0), (x, y)))], X, Y)
        assert_legible(svgs(chart)[0])
