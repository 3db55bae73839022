"""`Report`: a sweep in the numbers that a reader compares: curves per policy, goodput, crossovers.

Owns what a report holds. Must not sum up runs (`curves` does), draw, print or run a simulation.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from controller.simulation.curves import LEVELS, Point, PolicyReport, Spread, policy_report
from controller.simulation.goodput import LoadPoint, goodput
from controller.simulation.leaders import (
    BestBudget,
    Crossover,
    Front,
    all_crossovers,
    best_budgets,
    budget_crossovers,
    fronts,
)
from controller.simulation.sweep import SweepRow

__all__ = ["LEVELS", "Point", "PolicyReport", "Report", "Spread", "build_report", "score"]

REPORT_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Report:
    """A sweep, policies in the order in which they were asked for.

    `about` says what was simulated, as JSON values. `shown` names the policies to draw as curves;
    the others (budgets that a search tried) are points and rows. `crossovers` are those of the
    first policy with every other one; `best_budgets` those of families with more than one budget,
    and `budget_crossovers` where the best of them changes.
    """

    about: dict[str, Any]
    policies: tuple[PolicyReport, ...]
    shown: tuple[str, ...]
    crossovers: tuple[Crossover, ...]
    best_budgets: tuple[BestBudget, ...]
    budget_crossovers: tuple[Crossover, ...]
    fronts: tuple[Front, ...]

    @property
    def curves(self) -> tuple[PolicyReport, ...]:
        """The policies that are shown."""
        return tuple(policy for policy in self.policies if policy.policy in self.shown)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {"format": REPORT_FORMAT} | asdict(self)


def build_report(
    rows: Sequence[SweepRow], about: dict[str, Any], shown: Sequence[str] | None = None
) -> Report:
    """Sum up a sweep, `shown` None = everything; ValueError without a row."""
    if not rows:
        raise ValueError("rows must not be empty")
    rates: dict[float, list[float]] = {}
    for row in rows:
        rates.setdefault(row.task.load, []).append(row.rate)
    # A generator's rate differs a little from seed to seed; policies are compared at the same one.
    rate_at = {load: statistics.fmean(values) for load, values in rates.items()}
    policies = tuple(
        policy_report(name, [row for row in rows if row.task.policy == name], rate_at)
        for name in dict.fromkeys(row.task.policy for row in rows)
    )
    names = tuple(policy.policy for policy in policies)
    return Report(
        about,
        policies,
        names if shown is None else tuple(name for name in names if name in shown),
        tuple(all_crossovers(policies)),
        best := tuple(best_budgets(policies)),
        tuple(budget_crossovers(best, policies)),
        tuple(fronts(policies)),
    )


def score(rows: Iterable[SweepRow], level: float) -> tuple[float, ...]:
    """Return what a budget is chosen by: goodput at `level` first, then mean attainment."""
    points = [LoadPoint(row.task.load, row.attainment) for row in rows]
    found = goodput(points, level)
    mean = statistics.fmean(point.attainment for point in points)
    return (0.0 if found.rate is None else found.rate, mean)
