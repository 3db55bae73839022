"""The report as one HTML page that needs nothing else: no script, no font, no network.

Owns the page's order and words. Must not compute: every number is the report's; `svg` draws.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Sequence

from controller.simulation.goodput import shown
from controller.simulation.report import LEVELS, Point, PolicyReport, Report
from controller.simulation.svg import NUM_COLOURS, Line, Mark, legend, line_chart, scatter_chart

_STYLE = """
:root { color-scheme: light dark; --fg: #1c1e21; --bg: #ffffff; --grid: #d8dade; }
@media (prefers-color-scheme: dark) { :root { --fg: #e4e6ea; --bg: #16181c; --grid: #3a3d44; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--fg); background: var(--bg);
  max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--fg); }
.mid { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--grid); stroke-width: 1; }
.level { stroke: var(--fg); stroke-dasharray: 5 4; }
.line { fill: none; stroke-width: 2; } .band { stroke: none; opacity: 0.15; } .dot { stroke: none; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; } .wide { overflow-x: auto; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; padding: 0; }
.key { display: inline-block; width: 0.9em; height: 0.9em; margin-right: 0.4em;
  vertical-align: -0.1em; } pre { overflow-x: auto; font-size: 12px; }
"""
_COLOURS = (
    "#3569c8", "#c8501e", "#2a8f5b", "#8a49b8", "#b3830a", "#c2346d", "#1f8fa3", "#6b6f76",
)  # fmt: skip


def render_html(report: Report) -> str:
    """Return the page as text."""
    about = report.about
    title = f"{about['workload']} on {about['hardware']['name']}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{about['num_requests']} requests, {about['rate']:.2f}/s at load 1,"
        f" {len(about['seeds'])} seed(s), {html.escape(about['learner'])} costs."
        " Attainment is over offered requests: whoever is refused was not served in time.</p>",
        legend(report.shown),
        *_section("Attainment and goodput", [_attainment(report), _useful(report)]),
        _goodput_table(report),
        _crossover_list(report),
        *_section("Times", _times(report)),
        *_section("First token against next tokens", _paretos(report)),
        *_section("Per class", _classes(report)),
        *_section("Per tenth of prompt length, shortest first", _deciles(report)),
        *_section("Bursts and fairness", _fairness(report)),
        "<h2>All points</h2>",
        _point_table(report.policies),
        "<h2>What was simulated</h2>",
        f"<pre>{html.escape(json.dumps(about, indent=1))}</pre>",
    ]
    colours = "".join(
        f"polyline.c{i} {{ stroke: {colour}; }}"
        f" .band.c{i}, .dot.c{i} {{ fill: {colour}; }} .k{i} {{ background: {colour}; }}\n"
        for i, colour in enumerate(_COLOURS)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}{colours}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _section(title: str, charts: Iterable[str]) -> list[str]:
    return [f"<h2>{html.escape(title)}</h2>", f'<div class="charts">{"".join(charts)}</div>']


def _over_rate(
    report: Report, title: str, y_label: str, value: Callable[[Point], float | None]
) -> str:
    """A chart of one number of each point against the offered rate."""
    lines = [
        Line(
            policy.policy,
            tuple(
                (point.rate, found)
                for point in policy.points
                if (found := value(point)) is not None
            ),
        )
        for policy in report.curves
    ]
    return line_chart(title, lines, "offered requests per second", y_label)


def _attainment(report: Report) -> str:
    lines = [
        Line(
            policy.policy,
            tuple((point.rate, point.attainment.mean) for point in policy.points),
            tuple(point.attainment.low for point in policy.points),
            tuple(point.attainment.high for point in policy.points),
        )
        for policy in report.curves
    ]
    return line_chart(
        "Attainment against load (bands: seeds)",
        lines,
        "offered requests per second",
        "share of offered requests",
        is_share=True,
        level=LEVELS[0],
    )


def _useful(report: Report) -> str:
    return _over_rate(
        report,
        "Useful throughput against load",
        "tokens per second of kept requests",
        lambda point: point.useful_tokens_per_s,
    )


def _times(report: Report) -> list[str]:
    kinds: tuple[tuple[str, Callable[[Point], float | None]], ...] = (
        ("TTFT P50", lambda point: point.ttft_p50_s),
        ("TTFT P90", lambda point: point.ttft_p90_s),
        ("TTFT P99", lambda point: point.ttft_p99_s),
        ("TPOT P50", lambda point: point.tpot_p50_s),
        ("TPOT P90", lambda point: point.tpot_p90_s),
        ("TPOT P99", lambda point: point.tpot_p99_s),
        ("Longest gap, P99 of requests", lambda point: point.gap_p99_s),
    )
    return [_over_rate(report, name, "seconds", value) for name, value in kinds]


def _paretos(report: Report) -> list[str]:
    """One chart per load: P90 of TTFT and TPOT, every policy a point, static budgets among them."""
    loads = sorted({point.load for policy in report.policies for point in policy.points})
    groups = {name: index for index, name in enumerate(report.shown)}
    charts = []
    for load in loads:
        marks = [
            Mark(
                policy.policy,
                point.ttft_p90_s,
                point.tpot_p90_s,
                groups.get(policy.policy, NUM_COLOURS - 1),
            )
            for policy in report.policies
            for point in policy.points
            if point.load == load and point.ttft_p90_s and point.tpot_p90_s
        ]
        charts.append(
            scatter_chart(
                f"At load {load:.3g}", marks, "TTFT P90 in seconds", "TPOT P90 in seconds"
            )
        )
    return charts


def _classes(report: Report) -> list[str]:
    names = sorted(
        {n for policy in report.curves for point in policy.points for n in point.classes}
    )
    return [
        line_chart(
            name,
            [
                Line(
                    policy.policy,
                    tuple((p.rate, p.classes[name]) for p in policy.points if name in p.classes),
                )
                for policy in report.curves
            ],
            "offered requests per second",
            "attainment",
            is_share=True,
        )
        for name in names
    ]


def _deciles(report: Report) -> list[str]:
    loads = sorted({point.load for policy in report.curves for point in policy.points})
    return [
        line_chart(
            f"At load {load:.3g}",
            [
                Line(policy.policy, tuple((float(i), y) for i, y in enumerate(point.deciles, 1)))
                for policy in report.curves
                for point in policy.points
                if point.load == load
            ],
            "tenth of prompt length",
            "attainment",
            is_share=True,
        )
        for load in loads
    ]


def _fairness(report: Report) -> list[str]:
    return [
        _over_rate(
            report,
            "Recovery after the largest burst (none drawn: no burst, or never)",
            "seconds",
            lambda point: point.burst_recovery_s,
        ),
        _over_rate(report, "Longest wait", "seconds", lambda point: point.longest_wait_s),
        _over_rate(report, "Largest slowdown", "times alone", lambda point: point.largest_slowdown),
        _over_rate(report, "Jain's index", "1 = equal", lambda point: point.jain_index),
    ]


def _goodput_table(report: Report) -> str:
    head = ["policy", *(f"goodput at {level:.0%}, per second" for level in LEVELS)]
    rows = []
    for policy in report.policies:
        by_level = zip(*policy.goodput_by_seed, strict=True)
        cells = (shown(*pair) for pair in zip(policy.goodput, by_level, strict=True))
        rows.append([policy.policy, *cells])
    return _table(head, rows)


def _crossover_list(report: Report) -> str:
    if not report.crossovers:
        return "<p>No curve crosses the first policy's.</p>"
    items = "".join(
        f"<li>{html.escape(each.first)} and {html.escape(each.second)} change places at"
        f" {each.rate:.2f}/s</li>"
        for each in report.crossovers
    )
    return f"<ul>{items}</ul>"


def _point_table(policies: Sequence[PolicyReport]) -> str:
    head = [
        "policy", "load", "rate/s", "met", "refused", "TTFT P50", "P90", "P99", "TPOT P50", "P90",
        "P99", "gap P99", "wait max", "slowdown max", "Jain", "planner µs", "of a step", "MAPE",
        "coverage",
    ]  # fmt: skip
    rows = [
        [
            policy.policy, f"{point.load:.3g}", f"{point.rate:.2f}", f"{point.attainment.mean:.1%}",
            f"{point.refused:.1%}", _s(point.ttft_p50_s), _s(point.ttft_p90_s),
            _s(point.ttft_p99_s), _s(point.tpot_p50_s), _s(point.tpot_p90_s), _s(point.tpot_p99_s),
            _s(point.gap_p99_s), _s(point.longest_wait_s), _plain(point.largest_slowdown),
            f"{point.jain_index:.3f}", f"{point.planner_us:.0f}", f"{point.planner_share:.1%}",
            f"{point.prediction_mape:.1%}", f"{point.coverage:.1%}",
        ]
        for policy in policies
        for point in policy.points
    ]  # fmt: skip
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _s(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.3f}"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
