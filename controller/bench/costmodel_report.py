"""What the cost models are worth: terminal tables, notes on what was missed, JSON.

Owns how it looks. Must not measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from controller.bench.costmodel import CostModelNumbers, Recovery, averages, misses

GOALS = (
    "Goals: G4 MAPE ≤ 5 % after 500 steps and coverage 87–93 % (each regime with ≥ 200 steps too);"
    " G5 error under 8 % within 200 steps of a change of speed, and from there on to step 200."
)


_REGIMES: Final = ("decode_only", "mixed", "prefill_only")
_MISSING: Final = "–"


def render_tables(rows: Sequence[CostModelNumbers]) -> list[Table]:
    """Return two tables of 80 columns, a line per series and one per learner below it.

    Errors and coverage in percent: over all steps, with recovery and times; and by regime.
    """
    overall = _table(
        "Each learner from nothing, each step predicted before it is shown",
        ("MAPE", "P90", "covered", "after\n×1.5", "\n×2", "predict\n16, µs", "update\nµs"),
    )
    regimes = _table(
        "By regime: MAPE (covered)", ("decode only", "mixed", "prefill only", "refits\ntaken")
    )
    for index, row in enumerate(rows):
        if index == 0 or row.series != rows[index - 1].series:
            for table in (overall, regimes):
                table.add_section()
                table.add_row(f"{row.series} ({row.num_steps:,})")
        overall.add_row(
            f"  {row.learner}",
            f"{row.mape:.1%}",
            f"{row.p90_error:.1%}",
            f"{row.coverage:.1%}",
            *(_steps(recovery) for recovery in row.recoveries),
            f"{row.predict_s * 1e6:.0f}",
            f"{row.observe_s * 1e6:.0f}",
        )
        by_name = {regime.regime: regime for regime in row.regimes}
        regimes.add_row(
            f"  {row.learner}",
            *(
                f"{found.mape:.1%} ({found.coverage:.0%})"
                if (found := by_name.get(name))
                else _MISSING
                for name in _REGIMES
            ),
            f"{row.num_adopted} of {row.num_refits}" if row.num_refits else _MISSING,
        )
    return [overall, regimes]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("series (steps)\n  learner")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _steps(recovery: Recovery) -> str:
    return "never" if recovery.num_steps is None else str(recovery.num_steps)


def render_notes(rows: Sequence[CostModelNumbers]) -> Iterator[str]:
    """Yield the goals, the average of each learner, and every goal that was missed."""
    yield GOALS
    means = (f"{name} {mape:.2%}" for name, mape in averages(rows).items())
    yield f"Mean MAPE over the series: {', '.join(means)}."
    left_out = {row.series: row.num_left_out for row in rows if row.num_left_out}
    for series, count in left_out.items():
        yield f"{series}: {count} steps left out that no model should learn from."
    is_any = False
    for row in rows:
        for miss in misses(row):
            is_any = True
            yield f"Missed: {row.series}, {row.learner}: {miss}."
    if not is_any:
        yield "No goal was missed."


def to_json(rows: Sequence[CostModelNumbers], about: dict[str, Any]) -> dict[str, Any]:
    """Return everything measured as JSON values."""
    return {
        "benchmark": "costmodel",
        **about,
        "goals": GOALS,
        "rows": [{**asdict(row), "regimes": [r._asdict() for r in row.regimes],
                  "missed": list(misses(row))} for row in rows],
    }  # fmt: skip
