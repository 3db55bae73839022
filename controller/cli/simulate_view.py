"""How a simulation looks in a terminal: tables by load, class and goodput, and what crosses where.

Owns tables. Must not compute: every number is the report's.
"""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from controller.cli.output import wide_console
from controller.simulation.goodput import shown
from controller.simulation.report import LEVELS, Point, Report


def print_report(report: Report) -> None:
    """Print what was simulated, the tables and the crossovers."""
    console = wide_console()
    about = report.about
    console.print(
        f"{about['workload']}: {about['num_requests']} requests at {about['rate']:.2f}/s on"
        f" {about['hardware']['name']}, {len(about['seeds'])} seed(s), {about['learner']} costs",
        markup=False,
        soft_wrap=True,
    )
    if about["hardware"]["source"]:
        console.print(about["hardware"]["source"], markup=False, soft_wrap=True)
    console.print(_by_load(report))
    if any(len(point.classes) > 1 for policy in report.curves for point in policy.points):
        console.print(_by_class(report))
    console.print(_goodputs(report))
    for search in about["best_static"]:
        tried = ", ".join(search["scores"])
        console.print(
            f"best static budget of {search['family']} at {search['level']:.0%}:"
            f" {search['policy']} (of {tried})",
            markup=False,
            soft_wrap=True,
        )
    for each in report.crossovers:
        if each.second not in report.shown:
            continue
        console.print(
            f"{each.first} and {each.second} change places at {each.rate:.2f}/s",
            markup=False,
            soft_wrap=True,
        )


def _by_load(report: Report) -> Table:
    table = Table(title="Attainment of offered requests, and times in ms", box=SIMPLE_HEAD)
    for name in ("load", "rate/s", "policy"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    last_load = None
    for point, policy in _points(report):
        if last_load not in (None, point.load):
            table.add_section()
        last_load = point.load
        table.add_row(f"{point.load:.3g}", f"{point.rate:.2f}", policy, *_cells(point))
    return table


_COLUMNS = (
    "met", "refused", "TTFT P50", "P90", "P99", "TPOT P50", "P90", "gap P99", "wait", "slowdown",
    "Jain", "tok/s", "plan µs",
)  # fmt: skip


def _points(report: Report) -> list[tuple[Point, str]]:
    rows = [(point, policy.policy) for policy in report.curves for point in policy.points]
    return sorted(rows, key=lambda row: row[0].load)


def _by_class(report: Report) -> Table:
    names = sorted({name for point, _ in _points(report) for name in point.classes})
    table = Table(title="Attainment by class", box=SIMPLE_HEAD)
    for name in ("load", "policy", *names):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for point, policy in _points(report):
        shares = (f"{point.classes[n]:.1%}" if n in point.classes else "–" for n in names)
        table.add_row(f"{point.load:.3g}", policy, *shares)
    return table


def _cells(point: Point) -> list[str]:
    met = f"{point.attainment.mean:.1%}"
    if point.num_seeds > 1:
        met += f" ({point.attainment.low:.1%}–{point.attainment.high:.1%})"
    slowdown = "–" if point.largest_slowdown is None else f"{point.largest_slowdown:.1f}×"
    return [
        met,
        f"{point.refused:.1%}",
        _ms(point.ttft_p50_s),
        _ms(point.ttft_p90_s),
        _ms(point.ttft_p99_s),
        _ms(point.tpot_p50_s),
        _ms(point.tpot_p90_s),
        _ms(point.gap_p99_s),
        _ms(point.longest_wait_s),
        slowdown,
        f"{point.jain_index:.2f}",
        f"{point.useful_tokens_per_s:.0f}",
        f"{point.planner_us:.0f}",
    ]


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    ms = seconds * 1000
    return f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def _goodputs(report: Report) -> Table:
    table = Table(title="Goodput: offered requests/s up to which so many are kept", box=SIMPLE_HEAD)
    table.add_column("policy")
    for level in LEVELS:
        table.add_column(f"{level:.0%}", justify="right")
    for policy in report.policies:
        by_level = zip(*policy.goodput_by_seed, strict=True)
        cells = (shown(*pair) for pair in zip(policy.goodput, by_level, strict=True))
        table.add_row(policy.policy, *cells)
    return table
