"""How a simulation looks in a terminal: tables by load, class and goodput, and what crosses where.

Owns tables, none wider than 80 columns with usual names. Must not compute: every number is the
report's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from controller.cli.output import wide_console
from controller.simulation.causes import (
    CAUSE_WORDS,
    binding_names,
    binding_word,
    miss_names,
)
from controller.simulation.digits import MISSING, millis, plain, share, share_range, whole_millis
from controller.simulation.goodput import shown
from controller.simulation.html_tables import by_name, recovery
from controller.simulation.report import LEVELS, Point, PolicyReport, Report

_NUM_NARROW_COLUMNS = 4
_Cells = Callable[[Point], Sequence[str]]


def print_report(report: Report) -> None:
    """Print what was simulated, the tables and the crossovers."""
    console = wide_console()
    about = report.about
    num_seeds = len(about["seeds"])
    _say(
        console,
        f"{about['workload']}: {about['num_requests']} requests at {about['rate']:.2f}/s on"
        f" {about['hardware']['name']}, {num_seeds} seed{'s' if num_seeds > 1 else ''},"
        f" {about['learner']} costs",
    )
    if about["hardware"]["source"]:
        _say(console, about["hardware"]["source"])
    _show(console, _promises(report))
    class_names = sorted({name for point, _ in _points(report) for name in point.classes})
    if len(class_names) > 1:
        _show(console, _classes(report, class_names))
    tables = [_times(report), _misses(report), _fairness(report), _goodputs(report)]
    bound = binding_names(point.binding_steps for point, _ in _points(report))
    if bound:
        tables.insert(2, _bound(report, bound))
    for table in tables:
        _show(console, table)
    for search in about["best_static"]:
        tried = ", ".join(search["scores"])
        _say(
            console,
            f"best static budget of {search['family']} at {search['level']:.0%}:"
            f" {search['policy']} (of {tried})",
        )
    for each in report.crossovers:
        if each.second in report.shown:
            _say(
                console,
                f"{each.first} and {each.second} change places at {each.rate:.2f}/s,"
                f" where both keep {share(each.attainment)}",
            )


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _show(console: Console, table: Table) -> None:
    """Print the title on a line of its own: it may be wider than the table."""
    title, table.title = str(table.title), None
    _say(console, f"\n{title}")
    console.print(table)


def _promises(report: Report) -> Table:
    has_seeds = len(report.about["seeds"]) > 1
    columns = ("in time", "seeds", "refused", "useful tok/s")

    def cells(point: Point) -> Sequence[str]:
        met = point.attainment
        found = [share(met.mean)]
        if has_seeds:
            found.append(share_range(met.low, met.high) if point.num_seeds > 1 else MISSING)
        return [*found, share(point.refused), plain(point.useful_tokens_per_s)]

    kept = columns if has_seeds else (columns[0], *columns[2:])
    return _by_load(report, "Offered requests that met every target", kept, cells)


def _classes(report: Report, names: Sequence[str]) -> Table:
    if len(names) > _NUM_NARROW_COLUMNS:
        return _many_classes(report, names)
    return _by_load(
        report,
        "Attainment by class",
        names,
        lambda point: [share(point.classes.get(name)) for name in names],
    )


def _many_classes(report: Report, names: Sequence[str]) -> Table:
    """A line per class: a stored run has one for every set of targets that anybody asked for."""
    table = _table("Attainment by class")
    table.add_column("rate/s", justify="right")
    table.add_column("class", no_wrap=True)
    for policy in report.curves:
        table.add_column(policy.policy, justify="right")
    for load in sorted({point.load for point, _ in _points(report)}):
        points = [
            next((p for p in policy.points if p.load == load), None) for policy in report.curves
        ]
        rate = plain(next(point.rate for point in points if point is not None))
        for index, name in enumerate(names):
            shares = (MISSING if p is None else share(p.classes.get(name)) for p in points)
            table.add_row("" if index else rate, name, *shares)
        table.add_section()
    return table


def _times(report: Report) -> Table:
    columns = (
        "TTFT s\nP50", "\nP90", "\nP99", "TPOT ms\nP50", "\nP90", "\nP99", "gap ms\nP99",
    )  # fmt: skip
    return _by_load(
        report,
        "Times of whoever got so far",
        columns,
        lambda p: [
            *(whole_millis(each) for each in (p.ttft_p50_s, p.ttft_p90_s, p.ttft_p99_s)),
            *(millis(each) for each in (p.tpot_p50_s, p.tpot_p90_s, p.tpot_p99_s)),
            millis(p.gap_p99_s),
        ],
    )


def _misses(report: Report) -> Table:
    causes = miss_names(point.misses for point, _ in _points(report))

    def cells(point: Point) -> Sequence[str]:
        misses = point.misses
        if misses is None:
            return [MISSING] * len(causes)
        return [share(misses.get(cause, 0.0)) for cause in causes]

    heads = [CAUSE_WORDS[cause].replace(" ", "\n", 1) for cause in causes]
    return _by_load(
        report, "Offered requests that missed a target, by the first cause", heads, cells
    )


def _bound(report: Report, names: Sequence[str]) -> Table:
    def cells(point: Point) -> Sequence[str]:
        shares = point.binding_steps
        if not shares:
            return [MISSING] * len(names)
        return [share(shares.get(name, 0.0)) for name in names]

    heads = [binding_word(name).replace(" ", "\n", 1) for name in names]
    return _by_load(report, "What bound steps, share of the steps", heads, cells)


def _fairness(report: Report) -> Table:
    has_burst = any(point.num_bursts for point, _ in _points(report))
    columns = ["worst\nwait s", "worst\nslowdown", "Jain's\nindex", "plan\nµs", "% of\na step"]
    if has_burst:
        columns.append("burst over\nafter s")
    return _by_load(
        report,
        "Fairness, bursts and planning",
        columns,
        lambda p: [
            whole_millis(p.longest_wait_s),
            MISSING if p.largest_slowdown is None else f"{plain(p.largest_slowdown)}×",
            f"{p.jain_index:.2f}",
            plain(p.planner_us),
            f"{100 * p.planner_share:.1f}",
            *([recovery(p)] if has_burst else []),
        ],
    )


def _by_load(report: Report, title: str, columns: Sequence[str], cells: _Cells) -> Table:
    table = _table(title)
    # What fills the line leaves out the load: the rate says as much.
    is_wide = len(columns) > _NUM_NARROW_COLUMNS
    for name in ("load", "rate/s", "policy")[is_wide:]:
        # On the last line, where the names of two lines have their second one.
        head = "\n" * any("\n" in each for each in columns) + name
        table.add_column(head, justify="left" if name == "policy" else "right", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    last_load = None
    for point, policy in _points(report):
        is_first = point.load != last_load
        if is_first and last_load is not None:
            table.add_section()
        last_load = point.load
        where = (f"{point.load:.3g}", plain(point.rate)) if is_first else ("", "")
        table.add_row(*where[is_wide:], policy, *cells(point))
    return table


def _points(report: Report) -> list[tuple[Point, str]]:
    rows = [(point, policy.policy) for policy in report.curves for point in policy.points]
    return sorted(rows, key=lambda row: row[0].load)


def _goodputs(report: Report) -> Table:
    table = _table("Goodput: offered requests/s up to which so many are in time")
    table.add_column("policy")
    for level in LEVELS:
        table.add_column(f"{level:.0%}", justify="right")
    others = [policy for policy in report.policies if policy.policy not in report.shown]
    for group in (report.curves, by_name(others)):
        for policy in group:
            table.add_row(policy.policy, *_goodput_cells(policy))
        table.add_section()
    return table


def _goodput_cells(policy: PolicyReport) -> list[str]:
    by_level = zip(*policy.goodput_by_seed, strict=True)
    return [shown(*pair) for pair in zip(policy.goodput, by_level, strict=True)]


def _table(title: str) -> Table:
    return Table(
        title=title,
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
