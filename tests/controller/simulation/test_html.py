"""The page: whole, on its own, and legible for whoever reads it how."""

from __future__ import annotations

import dataclasses
import html
import re
from html.parser import HTMLParser

import pytest

from controller.simulation.hardware import A100_8B
from controller.simulation.html import render_html
from controller.simulation.html_style import (
    BACKGROUNDS,
    DARK,
    LIGHT,
    QUIET_TEXTS,
    TEXTS,
    style_sheet,
)
from controller.simulation.html_tables import recovery
from controller.simulation.measures import measure
from controller.simulation.report import Report, build_report
from controller.simulation.svg_marks import NUM_COLOURS
from controller.simulation.sweep import SweepRow, SweepTask
from tests.controller.simulation.page_parts import assert_legible, by_class, svgs, texts
from tests.controller.simulation.test_measures import record, refused, result_of
from tests.controller.simulation.test_report import ABOUT, bound, old, row, sweep

VOID = {"meta"}


def page(report: Report | None = None) -> str:
    return render_html(report or build_report(sweep(), ABOUT))


class Outline(HTMLParser):
    """Checks that every element is closed where it should be, and gathers some."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def test_the_page_needs_nothing_from_anywhere() -> None:
    text = page()
    for word in ("http://", "https://", "<script", "<link", "src=", "url(", "@import"):
        assert word not in text
    assert text.startswith("<!doctype html>")


def test_names_are_escaped() -> None:
    text = page()
    assert "night &amp; day on &lt;fast&gt;" in text
    assert "<fast>" not in text


def test_the_page_is_well_formed_and_can_be_walked_without_a_mouse() -> None:
    outline = Outline(page())
    assert outline.open == []
    ids = [attributes["id"] for _, attributes in outline.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [str(each["href"]) for each in outline.all("a")]
    assert len(links) == 9
    assert {link.removeprefix("#") for link in links} <= set(ids)
    # What scrolls sideways takes the focus, and has a name.
    for each in outline.all("div"):
        if each.get("role") == "region":
            assert each["tabindex"] == "0"
            assert each["aria-label"]
    assert all(each.get("scope") in ("col", "row", "colgroup") for each in outline.all("th"))
    assert len(outline.all("h1")) == 1


def test_every_chart_is_legible_and_says_what_it_shows() -> None:
    drawn = svgs(page())
    assert len(drawn) >= 18
    for svg in drawn:
        assert_legible(svg)
        assert svg.findtext("title")
        assert str(svg.findtext("desc")).startswith(tuple("abcdefghijklmnopqrstuvwxyzT1"))


def test_the_page_draws_every_curve_and_names_every_crossover() -> None:
    drawn = svgs(page())
    assert len(by_class(drawn[0], "line")) == 2
    assert len(by_class(drawn[0], "band")) == 2
    assert len(by_class(drawn[0], "crossing")) == 1
    assert "A" in [text for text, _ in texts(drawn[0])]
    titles = [title.text for svg in drawn for title in svg.iter("title")]
    assert "slo at 4.05: 75.0%" in titles
    assert "<b>A</b> slo and edf-256 change places at 2.85/s" in page()


@pytest.mark.parametrize(
    "title",
    [
        "Attainment", "Goodput", "Useful throughput", "Refused",
        "TTFT P50", "TTFT P90", "TTFT P99", "TPOT P50", "TPOT P90", "TPOT P99",
        "Longest gap of a request, P99", "chat: attainment", "chat: TTFT P90", "chat: TPOT P90",
        "At load 1: 2.05/s", "At load 2: 4.05/s", "Recovery after the largest burst",
        "Longest wait", "Largest slowdown", "Jain's index",
    ],
)  # fmt: skip
def test_nothing_that_is_asked_for_is_missing(title: str) -> None:
    assert f"<figcaption>{html.escape(title)}" in page()


def test_static_budgets_that_are_no_curves_are_points_all_the_same() -> None:
    text = page(build_report(sweep(), ABOUT, ["slo"]))
    drawn = svgs(text)
    assert len(by_class(drawn[0], "line")) == 1
    labels = [label for svg in drawn for label, _ in texts(svg)]
    # One Pareto chart per load; of one family the number is enough.
    assert labels.count("256") == 2
    assert labels.count("slo") == 2
    assert text.count("more budgets that the search tried") == 2


def test_a_page_of_one_point_is_drawn_too() -> None:
    text = page(build_report([row("slo", 1.0, 0, 10)], ABOUT))
    # There is no curve: tables instead, but tenths and the front are charts all the same.
    assert "One load only" in text
    assert "TTFT P50" not in text
    assert "Longest wait" not in text
    assert len(svgs(text)) == 2
    for svg in svgs(text):
        assert by_class(svg, "dot")
        assert_legible(svg)


def test_of_many_classes_the_largest_get_charts_at_first_sight() -> None:
    def many(load: float) -> SweepRow:
        # Class n has n + 1 requests.
        names = [f"class-{n}" for n in range(9) for _ in range(n + 1)]
        requests = [record(i, slo_class=name) for i, name in enumerate(names)]
        measures = measure(result_of(*requests), A100_8B).to_json()
        return SweepRow(SweepTask("slo", load, 0), load, measures, "hash", 0.1)

    classes = [
        {"name": f"class-{n}", "slo": {"ttft_s": 1.0 + n, "tpot_s": None, "e2e_s": None},
         "weight": 1.0, "on_infeasible": "reject"}
        for n in range(9)
    ]  # fmt: skip
    text = page(build_report([many(1.0), many(2.0)], ABOUT | {"classes": classes}))
    first, _, folded = text.partition("3 more classes with fewer requests")
    assert [n for n in range(9) if f"class-{n}: TTFT P90" in first] == [3, 4, 5, 6, 7, 8]
    assert [n for n in range(9) if f"class-{n}: TTFT P90" in folded] == [0, 1, 2]
    # The front is that of the tightest class with a tenth of the requests: 5 of 45.
    assert "P90 of class class-4;" in text


def test_every_row_has_a_cell_for_every_column() -> None:
    calm, seeds = build_report([row("slo", 1.0, 0, 10)], ABOUT), build_report(sweep(), ABOUT)
    for text in (page(calm), page(seeds), page(build_report(sweep(), ABOUT, ["slo"]))):
        for table in re.findall(r"<table>.*?</table>", text, re.DOTALL):
            head, body = table.split("<tbody>")
            widths = {row.count("<th") + row.count("<td") for row in body.split("</tr>")[:-1]}
            # The last line of the head names every column.
            assert widths == {head.split("<tr>")[-1].count("<th")}


def test_targets_are_drawn_and_said() -> None:
    slo = {"ttft_s": 1.0, "tpot_s": 0.05, "e2e_s": None}
    classes = [{"name": "chat", "slo": slo, "weight": 2.0, "on_infeasible": "degrade"}]
    about = ABOUT | {"classes": classes}
    text = page(build_report(sweep(), about))
    assert "target 1 s" in text
    assert "target 50 ms" in text
    assert "TTFT 1.00 s, TPOT 50.0 ms; weight 2; degrade what cannot be met" in text
    assert "Dashed: the targets." in text
    assert "Dashed: the targets." not in page()


def test_bursts_are_told_apart_from_calm() -> None:
    def bursty(policy: str, *, recovers: bool, load: float) -> SweepRow:
        # One request per ten seconds, thirty in the third ten; whether the next ones are kept.
        ats = [5.0, 15.0, *(20.0 + i * 0.3 for i in range(30)), 35.0, 45.0, 55.0, 65.0]
        requests = [
            record(i, arrived_at=at, ended_at=at + 1, attained=recovers or at < 20.0)
            for i, at in enumerate(ats)
        ]
        measures = measure(result_of(*requests), A100_8B).to_json()
        return SweepRow(SweepTask(policy, load, 0), 2.0 * load, measures, "hash", 0.1)

    recovered = [bursty("slo", recovers=True, load=load) for load in (1.0, 2.0)]
    never = [bursty("whole", recovers=False, load=load) for load in (1.0, 2.0)]
    text = page(build_report([*recovered, *never], ABOUT))
    assert "No burst" not in text
    assert "<li>whole at 2.00/s: 1 of 1 seeds</li>" in text
    assert "<li>slo at" not in text.split("Not recovered")[1].split("</ul>")[0]
    nobody = page(build_report(never, ABOUT))
    assert "Nobody recovered before the last arrival." in nobody
    assert "No burst: no ten seconds demand twice the mean." in page()


def test_recovery_in_words() -> None:
    (calm,) = build_report([row("slo", 1.0, 0, 10)], ABOUT).policies[0].points
    assert recovery(calm) == "–"
    some = dataclasses.replace(calm, num_bursts=3, burst_recovery_s=20.0, num_unrecovered=1)
    assert recovery(some) == "20.0 (1 never)"
    none = dataclasses.replace(some, burst_recovery_s=None, num_unrecovered=3)
    assert recovery(none) == "never"


def test_what_bound_steps_and_why_promises_were_missed_stand_in_tables() -> None:
    rows = [
        bound(row("slo", 1.0, 0, 7), decode_slack=0.75, idle=0.25),
        old(row("edf-256", 1.0, 0, 9)),
    ]
    section = (
        page(build_report(rows, ABOUT)).split('<section id="causes"')[1].split("</section>")[0]
    )
    assert '<th scope="col">tokens too slow</th>' in section
    heads = '<th scope="col">decode slack</th><th scope="col">idle</th>'
    assert heads + heads in section
    cells = "".join(f"<td>{share}</td>" for share in ("75.0%", "25.0%", "25.0%", "75.0%"))
    assert f"slo at 2.00/s</th>{cells}</tr>" in section
    assert f"edf-256 at 2.00/s</th>{'<td>–</td>' * 4}</tr>" in section
    unknown = page(build_report([old(row("slo", 1.0, 0, 9))], ABOUT))
    assert "What bound steps</caption>" not in unknown


def test_nobody_served_is_no_error() -> None:
    gone = measure(result_of(*(refused(i) for i in range(4))), A100_8B).to_json()
    report = build_report([SweepRow(SweepTask("slo", 1.0, 0), 2.0, gone, "hash", 0.1)], ABOUT)
    text = page(report)
    assert "Nobody was served." in text
    assert "nan" not in text
    assert "None" not in text


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_texts_and_curves_stand_out(mode: int) -> None:
    background = BACKGROUNDS[mode]
    for text in (TEXTS[mode], QUIET_TEXTS[mode]):
        assert contrast(text, background) >= 4.5
    colours = (LIGHT, DARK)[mode]
    assert len(set(colours)) == NUM_COLOURS
    # WCAG asks 3:1 of what is no text.
    assert min(contrast(colour, background) for colour in colours) >= 3.0


def test_the_style_has_a_rule_for_every_class_that_is_drawn() -> None:
    style, text = style_sheet(), page()
    assert "prefers-color-scheme: dark" in style
    assert "@media print" in style
    body = text.split("</style>")[1]
    used = {name for value in re.findall(r'class="([^"]*)"', body) for name in value.split()}
    assert not {name for name in used if f".{name}" not in style}
