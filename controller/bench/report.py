"""What the spikes say: rows with median and spread, as a terminal table, Markdown or JSON.

Owns aggregation over rounds and every word that a person reads. Must not measure or hide: a run
with a violation gives no number and is named with its reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from controller.bench.record import SpikeNumbers
from controller.bench.rounds import SpikeResult, SpikeSession
from controller.bench.servers import REFERENCE_CONFIG

Measure = Callable[[SpikeNumbers], float]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of one quantity over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the spread; None of nothing."""
        return cls(statistics.median(values), min(values), max(values)) if values else None


@dataclass(frozen=True, slots=True)
class Row:
    """One policy over all rounds. Seconds, tokens per second, and ratios taken within a round.

    `…_vs_reference` compare with the reference policy of the same round, before the median is
    taken; None where it was not measured. `num_held` counts rounds whose largest gap stayed within
    the target, `num_held_nearly` those beyond it by at most one normal gap: one step's noise. Both
    are None for a policy without a target.
    """

    key: str
    label: str
    num_rounds: int
    num_valid: int
    largest_gap_s: Spread | None
    normal_gap_s: Spread | None
    gap_ratio: Spread | None
    long_ttft_s: Spread | None
    tokens_per_second: Spread | None
    gap_vs_reference: Spread | None
    ttft_vs_reference: Spread | None
    speed_vs_reference: Spread | None
    target_ratio: Spread | None
    num_held: int | None
    num_held_nearly: int | None
    num_merged_reads: int


def rows_of(session: SpikeSession, reference: str = REFERENCE_CONFIG) -> list[Row]:
    """Return one row per policy, in the order in which they were first measured."""
    keys = dict.fromkeys(result.key for result in session.results)
    by_round = {
        result.round_no: result.numbers
        for result in session.results
        if result.key == reference and result.numbers is not None
    }
    return [
        _row([result for result in session.results if result.key == key], by_round) for key in keys
    ]


def _row(results: Sequence[SpikeResult], reference: dict[int, SpikeNumbers]) -> Row:
    """Aggregate one policy's results."""
    valid = [(r.round_no, r.numbers) for r in results if r.numbers is not None]
    numbers = [n for _, n in valid]

    def spread(measure: Measure) -> Spread | None:
        return Spread.of([measure(n) for n in numbers])

    def versus(measure: Measure) -> Spread | None:
        return Spread.of(
            [
                measure(n) / measure(reference[round_no])
                for round_no, n in valid
                if round_no in reference
            ]
        )

    targeted = [(n, n.target_gap_s) for n in numbers if n.target_gap_s is not None]
    held = sum(n.largest_gap_s <= target for n, target in targeted)
    near = sum(target < n.largest_gap_s <= target + n.normal_gap_s for n, target in targeted)
    return Row(
        key=results[0].key,
        label=results[0].label,
        num_rounds=len(results),
        num_valid=len(valid),
        largest_gap_s=spread(lambda n: n.largest_gap_s),
        normal_gap_s=spread(lambda n: n.normal_gap_s),
        gap_ratio=spread(lambda n: n.gap_ratio),
        long_ttft_s=spread(lambda n: n.long_ttft_s),
        tokens_per_second=spread(lambda n: n.tokens_per_second),
        gap_vs_reference=versus(lambda n: n.largest_gap_s),
        ttft_vs_reference=versus(lambda n: n.long_ttft_s),
        speed_vs_reference=versus(lambda n: n.tokens_per_second),
        target_ratio=Spread.of([target / n.normal_gap_s for n, target in targeted]),
        num_held=held if targeted else None,
        num_held_nearly=near if targeted else None,
        num_merged_reads=sum(n.num_merged_reads for n in numbers),
    )


def format_spread(
    spread: Spread | None, scale: float = 1.0, digits: int = 2, unit: str = ""
) -> str:
    """Format median and spread; the spread only where several rounds differ."""
    if spread is None:
        return "–"
    median, low, high = (
        f"{value * scale:.{digits}f}" for value in (spread.median, spread.low, spread.high)
    )
    return f"{median}{unit}" if low == high else f"{median}{unit} ({low}–{high})"


def _label(row: Row) -> str:
    """Return the label, with the number of invalid rounds if there are any."""
    invalid = row.num_rounds - row.num_valid
    return row.label if not invalid else f"{row.label} (INVALID: {invalid} of {row.num_rounds})"


def render_table(rows: Sequence[Row], title: str, reference: str = "static 128") -> Table:
    """Return the table for a terminal; gaps and TTFT in milliseconds.

    Comparisons with the reference policy, named `reference`, appear where it was measured.
    """
    has_reference = any(row.gap_vs_reference is not None for row in rows)
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    headings = [
        "largest gap, ms",
        "normal gap, ms",
        "largest / normal",
        "long TTFT, ms",
        "tokens/s",
    ]
    if has_reference:
        headings += [f"gap vs {reference}", f"TTFT vs {reference}"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [
            _label(row),
            format_spread(row.largest_gap_s, 1000, 0),
            format_spread(row.normal_gap_s, 1000, 0),
            format_spread(row.gap_ratio, 1, 1, "×"),
            format_spread(row.long_ttft_s, 1000, 0),
            format_spread(row.tokens_per_second, 1, 1),
        ]
        if has_reference:
            cells += [
                format_spread(row.gap_vs_reference, 1, 2, "×"),
                format_spread(row.ttft_vs_reference, 1, 2, "×"),
            ]
        table.add_row(*cells)
    return table


def render_markdown(rows: Iterable[Row], reference: str = "static 128") -> str:
    """Return a Markdown table of ratios only: absolute times of a shared machine are not quoted."""
    lines = [
        f"| policy | largest gap / normal gap | largest gap vs {reference}"
        f" | long TTFT vs {reference} | tokens/s vs {reference} |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            _label(row),
            format_spread(row.gap_ratio, 1, 1, "×"),
            format_spread(row.gap_vs_reference, 1, 2, "×"),
            format_spread(row.ttft_vs_reference, 1, 2, "×"),
            format_spread(row.speed_vs_reference, 1, 2, "×"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def render_notes(session: SpikeSession, rows: Iterable[Row]) -> list[str]:
    """Return what the table cannot say: promises held or not, invalid runs, merged reads."""
    notes = []
    for row in rows:
        if row.num_held is not None:
            notes.append(
                f"{row.label}: target {format_spread(row.target_ratio, 1, 2, '×')} the normal gap;"
                f" the largest gap kept it in {row.num_held} of {row.num_valid} rounds, missed it"
                f" by at most one normal gap in {row.num_held_nearly}"
            )
        if row.num_merged_reads:
            notes.append(
                f"{row.label}: {row.num_merged_reads} reads held several tokens of a stream; each"
                " counts as one instant"
            )
    for result in session.results:
        notes += [
            f"INVALID {result.label}, round {result.round_no + 1}: {violation.message}"
            for violation in result.violations
        ]
    return notes


def to_json(session: SpikeSession, rows: Iterable[Row], about: dict[str, Any]) -> dict[str, Any]:
    """Return everything as JSON values: `about`, rows, and each run with all its token times."""
    return {
        "benchmark": "spike",
        **about,
        "scenario": asdict(session.scenario),
        "num_rounds": session.num_rounds,
        "rows": [asdict(row) for row in rows],
        "results": [asdict(result) for result in session.results],
    }
