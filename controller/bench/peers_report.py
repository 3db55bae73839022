"""What closed loops say: rows with median and spread, as a terminal table, Markdown or JSON.

Owns aggregation over rounds and every word that a person reads. Must not measure or hide: a run
with a violation gives no number and is named with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from controller.bench.closed import ClosedNumbers
from controller.bench.peers import Agreement, ClosedResult, ClosedSession
from controller.bench.report import Spread, format_spread


@dataclass(frozen=True, slots=True)
class ClosedRow:
    """One contestant over all rounds: tokens per second, seconds, and a ratio within a round.

    `times_as_fast` is how many times the reference's tokens per second are this one's: taken within
    a round, before the median; None where the reference was not measured.
    """

    key: str
    label: str
    num_rounds: int
    num_valid: int
    tokens_per_second: Spread | None
    times_as_fast: Spread | None
    ttft_p50_s: Spread | None
    ttft_p99_s: Spread | None
    gap_p50_s: Spread | None
    gap_p90_s: Spread | None
    gap_p99_s: Spread | None
    num_merged_reads: int


def closed_rows(session: ClosedSession, reference: str) -> list[ClosedRow]:
    """Return one row per contestant, in the order in which they were first measured."""
    by_round = {
        result.round_no: result.numbers
        for result in session.results
        if result.key == reference and result.numbers is not None
    }
    keys = dict.fromkeys(result.key for result in session.results)
    return [
        _row([result for result in session.results if result.key == key], by_round) for key in keys
    ]


def _row(results: Sequence[ClosedResult], reference: dict[int, ClosedNumbers]) -> ClosedRow:
    valid = [(r.round_no, r.numbers) for r in results if r.numbers is not None]

    def spread(measure: Callable[[ClosedNumbers], float]) -> Spread | None:
        return Spread.of([measure(numbers) for _, numbers in valid])

    return ClosedRow(
        key=results[0].key,
        label=results[0].label,
        num_rounds=len(results),
        num_valid=len(valid),
        tokens_per_second=spread(lambda n: n.tokens_per_second),
        times_as_fast=Spread.of(
            [
                reference[round_no].tokens_per_second / numbers.tokens_per_second
                for round_no, numbers in valid
                if round_no in reference
            ]
        ),
        ttft_p50_s=spread(lambda n: n.ttft_s.p50),
        ttft_p99_s=spread(lambda n: n.ttft_s.p99),
        gap_p50_s=spread(lambda n: n.gap_s.p50),
        gap_p90_s=spread(lambda n: n.gap_s.p90),
        gap_p99_s=spread(lambda n: n.gap_s.p99),
        num_merged_reads=sum(numbers.num_merged_reads for _, numbers in valid),
    )


def _label(row: ClosedRow) -> str:
    invalid = row.num_rounds - row.num_valid
    return row.label if not invalid else f"{row.label} (INVALID: {invalid} of {row.num_rounds})"


def closed_title(session: ClosedSession, model: str) -> str:
    """Return the line above the table."""
    scenario = session.scenario
    return (
        f"Closed loop on {model}: {scenario.concurrency} at once, {scenario.prompt_tokens} tokens"
        f" in, {scenario.output_tokens} out, {scenario.num_requests} requests,"
        f" {session.num_rounds} rounds"
    )


def render_closed_table(rows: Sequence[ClosedRow], title: str, reference: str) -> Table:
    """Return the table for a terminal; times in milliseconds, `reference` is a label."""
    table = Table(title=title, title_justify="left")
    table.add_column("contestant", no_wrap=True)
    for heading in (
        "tokens/s",
        f"{reference} is …× as fast",
        "TTFT p50, ms",
        "TTFT p99, ms",
        "gap p50, ms",
        "gap p90, ms",
        "gap p99, ms",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            _label(row),
            format_spread(row.tokens_per_second, 1, 1),
            format_spread(row.times_as_fast, 1, 2, "×"),
            *(
                format_spread(spread, 1000, 0)
                for spread in (
                    row.ttft_p50_s,
                    row.ttft_p99_s,
                    row.gap_p50_s,
                    row.gap_p90_s,
                    row.gap_p99_s,
                )
            ),
        )
    return table


def render_closed_markdown(rows: Iterable[ClosedRow], reference: str) -> str:
    """Return a Markdown table of ratios only: absolute times of a shared machine are not quoted."""
    lines = [f"| contestant | {reference} is …× as fast | rounds |", "|---|---|---|"]
    lines += [
        f"| {_label(row)} | {format_spread(row.times_as_fast, 1, 2, '×')} | {row.num_valid} |"
        for row in rows
    ]
    return "\n".join(lines)


def render_closed_notes(
    session: ClosedSession, rows: Iterable[ClosedRow], agreements: Iterable[Agreement]
) -> list[str]:
    """Return what the table cannot say: agreement, merged reads, invalid runs."""
    notes = []
    for agreement in agreements:
        if agreement.common_share is None:
            notes.append(f"{agreement.label}: no text to compare")
            continue
        notes.append(
            f"{agreement.label}: {agreement.num_equal} of {agreement.num_compared} greedy texts"
            f" are the same; the common beginning is {agreement.common_share:.0%} of a text"
        )
    notes += [
        f"{row.label}: {row.num_merged_reads} reads held several tokens of a stream; each counts as"
        " one instant"
        for row in rows
        if row.num_merged_reads
    ]
    for result in session.results:
        # One reason per run: 32 requests that fail alike would say it 32 times.
        if result.violations:
            more = len(result.violations) - 1
            notes.append(
                f"INVALID {result.label}, round {result.round_no + 1}:"
                f" {result.violations[0].message}" + (f" (and {more} more)" if more else "")
            )
    return notes


def closed_to_json(
    session: ClosedSession, rows: Iterable[ClosedRow], agreements: Iterable[Agreement]
) -> dict[str, Any]:
    """Return rows, agreement and each run with all its token times, as JSON values."""
    return {
        "scenario": asdict(session.scenario),
        "num_rounds": session.num_rounds,
        "rows": [asdict(row) for row in rows],
        "agreement": [asdict(agreement) for agreement in agreements],
        "results": [asdict(result) for result in session.results],
    }
