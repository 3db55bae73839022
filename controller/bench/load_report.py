"""What mixed loads say: tables for a terminal, notes, JSON.

Owns every word that a person reads. Must not measure, aggregate or hide: an invalid run is named
with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from controller.bench.load_replay import GOAL_POINTS, Agreement, Replayed, StepTimes
from controller.bench.load_rounds import LoadSession
from controller.bench.load_rows import (
    ClassRow,
    LoadRow,
    Tail,
    everybody,
    goodputs,
    rows_of,
)
from controller.bench.report import Spread, format_spread
from controller.simulation.goodput import Goodput
from controller.simulation.measures import Percentiles

NOTHING = "–"


def render_attainment(session: LoadSession, rows: Sequence[LoadRow], title: str) -> Table:
    """Return the table of promises kept: shares of OFFERED requests in percent, per class."""
    names = [each.name for each in session.terms.traffic.classes]
    table = Table(title=title, title_justify="left")
    table.add_column("offered/s", justify="right")
    table.add_column("policy", no_wrap=True)
    headings = [
        "kept, %",
        *(f"{name}, %" for name in names),
        "goodput/s",
        "vs best static",
        "refused, %",
        "unserved, %",
    ]
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        total, by_name = everybody(row), {group.name: group for group in row.groups}
        table.add_row(
            f"{row.rate:.2f}",
            _label(row),
            _percent(None if total is None else total.attainment),
            *(_percent(by_name[n].attainment if n in by_name else None) for n in names),
            format_spread(row.goodput, 1, 2),
            NOTHING
            if row.key == row.best_static
            else format_spread(row.goodput_vs_static, 1, 2, "×"),
            _percent(None if total is None else total.refused),
            _percent(None if total is None else total.unserved),
            end_section=row.key == rows[-1].key,
        )
    return table


def render_latencies(rows: Iterable[LoadRow]) -> Table:
    """Return TTFT, TPOT and longest gap per class, P50 / P90 / P99 in milliseconds."""
    title = "P50 / P90 / P99 in ms (median over rounds)"
    table = Table(title=title, title_justify="left")
    table.add_column("offered/s", justify="right")
    table.add_column("policy", no_wrap=True)
    table.add_column("class", no_wrap=True)
    for heading in ("TTFT", "TPOT", "longest gap", "P90 TPOT vs best static"):
        table.add_column(heading, justify="right")
    for row in rows:
        for group in row.groups:
            table.add_row(
                f"{row.rate:.2f}",
                row.label,
                group.name,
                _tail(group.ttft_s),
                _tail(group.tpot_s),
                _tail(group.gap_s),
                format_spread(group.tpot_p90_vs_static, 1, 2, "×"),
                end_section=group is row.groups[-1],
            )
    return table


def render_deciles(rows: Sequence[LoadRow]) -> Table:
    """Return what was kept of each tenth of the requests by prompt length, in percent."""
    title = "Kept by prompt length, % (tenths, shortest first)"
    table = Table(title=title, title_justify="left")
    table.add_column("offered/s", justify="right")
    table.add_column("policy", no_wrap=True)
    # Every policy gets the same prompts: the tenths end at the same lengths, rate by rate.
    for number in range(max((len(row.deciles) for row in rows), default=0)):
        table.add_column(str(number + 1), justify="right")
    for row in rows:
        shares = [f"{100 * each.attainment:.0f}" for each in row.deciles]
        table.add_row(f"{row.rate:.2f}", row.label, *shares, end_section=row.key == rows[-1].key)
    return table


def render_notes(session: LoadSession, rows: Iterable[LoadRow]) -> list[str]:
    """Return what the tables cannot say: goodput, refusals, lateness, invalid runs."""
    notes = []
    labels = {each.key: each.label for each in session.results}
    for key, found in goodputs(session).items():
        rates = ", ".join(_goodput_line(each) for each in found)
        notes.append(f"{labels[key]}: goodput {rates}")
    for row in rows:
        notes += [
            _refusal_line(row, group)
            for group in row.groups
            if group.refusals and group is not everybody(row)
        ]
    late = [row.late_p99_s.high for row in rows if row.late_p99_s is not None]
    if late:
        notes.append(f"the client's own lateness: at most {max(late) * 1000:.0f} ms at P99")
    for result in session.results:
        where = f"{result.label} at {result.rate:.2f}/s, round {result.round_no + 1}"
        notes += [f"INVALID {where}: {violation.message}" for violation in result.violations]
    return notes


def render_agreement(replayed: Replayed) -> Table:
    """Return simulated beside real attainment, in percent and points."""
    title = f"Simulated against real, the same arrivals (goal: within {GOAL_POINTS:g} points)"
    table = Table(title=title, title_justify="left")
    table.add_column("offered/s", justify="right")
    table.add_column("policy", no_wrap=True)
    table.add_column("class", no_wrap=True)
    for heading in (
        "offered",
        "real, %",
        "server's records, %",
        "simulated, %",
        "at its speeds, %",
        "points",
        "",
    ):
        table.add_column(heading, justify="right")
    for each in replayed.agreements:
        table.add_row(
            f"{each.rate:.2f}",
            each.label,
            each.slo_class,
            str(each.num_offered),
            f"{100 * each.real:.1f}",
            NOTHING if each.recorded is None else f"{100 * each.recorded:.1f}",
            f"{100 * each.simulated:.1f}{_range(each)}",
            f"{100 * each.simulated_over_time:.1f}",
            f"{each.points:+.1f}",
            _verdict(each),
        )
    return table


def render_replay_notes(replayed: Replayed) -> list[str]:
    """Return both distributions of step times wherever attainment disagrees, and what failed."""
    notes = [f"not simulated: {problem}" for problem in replayed.problems]
    for cell in dict.fromkeys((each.key, each.rate) for each in replayed.misses):
        notes += [
            f"MISS {cell[0]} at {cell[1]:.2f}/s, {_times_line(times)}"
            for times in replayed.step_times
            if (times.key, times.rate) == cell
        ]
    if replayed.agreements and not replayed.misses:
        notes.append(f"every class agrees within {GOAL_POINTS:g} points")
    return notes


def to_json(
    session: LoadSession, replayed: Replayed | None, about: dict[str, Any]
) -> dict[str, Any]:
    """Return everything as JSON values: `about`, the terms, rows, and each request's outcome.

    `is_complete` says whether all that was asked for is there.
    """
    terms = session.terms
    return {
        "benchmark": "load",
        **about,
        "traffic": terms.traffic.to_json(),
        "rates": list(terms.rates),
        "num_rounds": terms.num_rounds,
        "duration_s": terms.duration_s,
        "drain_s": terms.drain_s,
        "seed": terms.seed,
        "calibration": asdict(session.calibration),
        "is_complete": session.is_complete,
        "rows": [asdict(row) for row in rows_of(session)],
        "goodput": {key: [asdict(g) for g in found] for key, found in goodputs(session).items()},
        "results": [asdict(result) for result in session.results],
        "simulated": None if replayed is None else _replayed_json(replayed),
    }


def _replayed_json(replayed: Replayed) -> dict[str, Any]:
    return {
        "goal_points": GOAL_POINTS,
        "agreements": [
            {
                **asdict(each),
                "points": each.points,
                "is_close": each.is_close,
                "is_within_draws": each.is_within_draws,
            }
            for each in replayed.agreements
        ],
        "step_times": [asdict(each) for each in replayed.step_times],
        "machines": replayed.machines,
        "problems": list(replayed.problems),
    }


def _label(row: LoadRow) -> str:
    invalid = row.num_rounds - row.num_valid
    label = f"{row.label} *" if row.key == row.best_static else row.label
    return label if not invalid else f"{label} (INVALID: {invalid} of {row.num_rounds})"


def _percent(spread: Spread | None) -> str:
    return format_spread(spread, 100, 0)


def _tail(tail: Tail | None) -> str:
    if tail is None:
        return NOTHING
    return " / ".join(f"{each.median * 1000:.0f}" for each in (tail.p50, tail.p90, tail.p99))


def _goodput_line(found: Goodput) -> str:
    at = f"at {found.level:.0%}"
    if found.rate is None:
        return f"{at} below every rate measured"
    return f"{at} {'at least ' if found.is_bound else ''}{found.rate:.2f}/s"


def _refusal_line(row: LoadRow, group: ClassRow) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in group.refusals.items())
    after = (
        ""
        if group.retry_after_s is None
        else f"; {group.num_retry_after} said when to come back,"
        f" median {format_spread(group.retry_after_s, 1, 1, ' s')}"
    )
    return (
        f"{row.label} at {row.rate:.2f}/s refused {sum(group.refusals.values())} of"
        f" {group.num_offered} {group.name}: {reasons}{after}"
    )


def _verdict(agreement: Agreement) -> str:
    if agreement.is_close:
        return "agrees"
    verdict = f"MISS by {agreement.num_apart} of {agreement.num_offered}"
    return f"{verdict}, within the draws" if agreement.is_within_draws else verdict


def _range(agreement: Agreement) -> str:
    """Return the least and the greatest draw in percent, where they differ."""
    ends = (agreement.simulated_low, agreement.simulated_high)
    low, high = (f"{100 * each:.0f}" for each in ends)
    return "" if low == high else f" ({low}–{high})"


def _times_line(times: StepTimes) -> str:
    return (
        f"{times.regime.value} steps: real {_ms(times.real_s)},"
        f" simulated {_ms(times.simulated_s)} (P50/P90/P99 ms)"
    )


def _ms(found: Percentiles | None) -> str:
    if found is None:
        return "none"
    return f"{found.num} of {found.p50 * 1e3:.0f}/{found.p90 * 1e3:.0f}/{found.p99 * 1e3:.0f}"
