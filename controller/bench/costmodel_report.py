"""What the cost models are worth: a terminal table, notes on what was missed, JSON.

Owns how it looks. Must not measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from controller.bench.costmodel import CostModelNumbers, Recovery, averages, misses

GOALS = (
    "Goals: G4 MAPE ≤ 5 % after 500 steps and coverage 87–93 % (each regime with ≥ 200 steps too);"
    " G5 error under 8 % within 200 steps of a change of speed."
)


def render_table(rows: Sequence[CostModelNumbers]) -> Table:
    """Return one row per series and learner; errors and coverage in percent."""
    table = Table(title="Cost models, each from nothing, each step predicted before it is shown")
    table.add_column("series")
    table.add_column("learner")
    for name in ("steps", "MAPE", "P90", "covered", "decode / mixed / prefill: MAPE (covered)"):
        table.add_column(name, justify="right")
    for name in ("×1.5", "×2", "refits", "predict 16", "update"):
        table.add_column(name, justify="right")
    for row in rows:
        by_name = {regime.regime: regime for regime in row.regimes}
        parts = []
        for name in ("decode_only", "mixed", "prefill_only"):
            regime = by_name.get(name)
            parts.append("–" if regime is None else f"{regime.mape:.1%} ({regime.coverage:.0%})")
        table.add_row(
            row.series,
            row.learner,
            str(row.num_steps),
            f"{row.mape:.1%}",
            f"{row.p90_error:.1%}",
            f"{row.coverage:.1%}",
            " / ".join(parts),
            *(_steps(recovery) for recovery in row.recoveries),
            f"{row.num_adopted} of {row.num_refits}" if row.num_refits else "–",
            f"{row.predict_s * 1e6:.0f} µs",
            f"{row.observe_s * 1e6:.0f} µs",
        )
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
