"""G2, calm streams: one class at moderate loads, against static budgets.

Owns which budgets are compared and what equal attainment is. Must not know how a run is made or a
report looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from controller.bench.goals_cases import Case
from controller.bench.goals_goodput import KNEE, OURS, best_of
from controller.bench.goals_promises import (
    NOT_REACHED,
    Loads,
    Point,
    extra,
    missed,
    overall,
    run_loads,
)
from controller.bench.goals_runs import Missing, NotMeasuredError, Runs
from controller.bench.goals_verdicts import Check, Measured, percent

CALM_LOADS: Final = (0.6, 0.7, 0.8)
CALM_BUDGETS: Final = tuple(f"edf-shed-{tokens}" for tokens in range(128, 513, 64))
CALM_SEEDS: Final = 2
# Misses that count as equal: so many times as many, or so much more of all requests.
_EQUAL_RATIO: Final = 1.25
_EQUAL_SHARE: Final = 0.002
_TPOT: Final = overall("tpot_s", "p90")


@dataclass(frozen=True, slots=True)
class Calm:
    """Our planner and the static budget of the best goodput at moderate loads (`loads`, ours
    first), and small static budgets there with the first seeds (`statics`).
    """

    loads: Loads
    statics: Loads

    def calmest(self, factor: float) -> Point | None:
        """Return the small budget of the lowest P90 TPOT of those that miss no more than we do
        with the same seeds; None if all miss more.
        """
        few = len(self.statics.points[0].rows)
        limit = self.loads.at(OURS, factor).first(few).mean(missed)
        points = [point for point in self.statics.points if point.factor == factor]
        able = [point for point in points if point.mean(missed) <= limit + 1e-12]
        return min(able, key=lambda point: point.mean(_TPOT), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return self.loads.to_json() | {"statics": self.statics.to_json()}


def is_equal(ours: float, theirs: float) -> bool:
    """Whether a share of misses is as good as theirs: at most 1.25 times it, or 0.2 points more."""
    return ours <= max(_EQUAL_RATIO * theirs, theirs + _EQUAL_SHARE)


def measure_calm(case: Case, runs: Runs, seeds: Sequence[int]) -> Calm:
    """Return our planner and the better static budget of `edf` and `edf-shed` at 60–80 % of the
    latter's goodput, and small budgets beside them. NotMeasuredError if no rate holds 90 %.
    """
    found = [best_of(case, runs, seeds, family, KNEE) for family in ("edf", "edf-shed")]
    best = max(found, key=lambda each: each.curve.goodput(KNEE).rate or 0.0).curve
    knee = best.goodput(KNEE).rate
    if knee is None:
        raise NotMeasuredError(NOT_REACHED)
    loads = run_loads(case, runs, (OURS, best.policy), knee, CALM_LOADS, seeds)
    statics = run_loads(case, runs, CALM_BUDGETS, knee, CALM_LOADS, seeds[:CALM_SEEDS])
    return Calm(loads, statics)


def g2_checks(cases: Sequence[tuple[Case, Calm | Missing]]) -> list[Check]:
    """Return the checks of G2: P90 TPOT against the best static budget's, and the longest gap; and
    P90 TPOT against the calmest budget, which no goal speaks of.
    """
    return [
        check
        for case, found in cases
        for factor in CALM_LOADS
        for check in _at(case, found, factor)
    ]


def _at(case: Case, found: Calm | Missing, factor: float) -> list[Check]:
    load = percent(factor)
    claim = f"P90 TPOT over the best static budget's at {load} of its goodput"
    other_claim = f"P90 TPOT over the calmest static budget's that misses no more, at {load}"
    gap_claim = f"longest gap over the target at {load}"
    if isinstance(found, Missing):
        return [
            Check("G2", claim, case.name, 0.75, False, "×", None, str(found)),
            Check("G2", other_claim, case.name, None, False, "×", None, str(found)),
            Check("G2", gap_claim, case.name, 1.1, False, "×", None, str(found)),
        ]
    ours, theirs = (found.loads.at(policy, factor) for policy in found.loads.policies)
    is_fair = is_equal(ours.mean(missed), theirs.mean(missed))
    p99, other_gap = ours.mean(extra("gap_share_p99")), theirs.mean(extra("gap_share_max"))
    gap = ours.measured(extra("gap_share_max"))
    worst = None if gap is None else Measured(gap.high, gap.low, gap.high)
    note = f"P99 {p99:.2f}×; {theirs.policy} {other_gap:.2f}×"
    return [
        Check(
            "G2",
            claim,
            case.name,
            0.75,
            False,
            "×",
            *_tpot_ratio(ours, theirs),
            holds_beside=is_fair,
        ),
        _beside_the_calmest(case, other_claim, found, factor),
        Check("G2", gap_claim, case.name, 1.1, False, "×", worst, note),
    ]


def _beside_the_calmest(case: Case, claim: str, found: Calm, factor: float) -> Check:
    calmest = found.calmest(factor)
    measured, note = None, "edf-shed-128 to 512 all miss more than ours"
    if calmest is not None:
        ours = found.loads.at(OURS, factor).first(len(calmest.rows))
        measured, note = _tpot_ratio(ours, calmest)
    return Check("G2", claim, case.name, None, False, "×", measured, note)


def _tpot_ratio(ours: Point, theirs: Point) -> tuple[Measured | None, str]:
    """Return our P90 TPOT over theirs seed by seed, and who it is and what both missed."""
    pairs = [
        (mine, other)
        for mine, other in zip(ours.by_seed(_TPOT), theirs.by_seed(_TPOT), strict=True)
        if other > 0.0
    ]
    ratio = Measured.of([mine / other for mine, other in pairs]) if pairs else None
    note = f"{theirs.policy}; missed {ours.mean(missed):.2%} against {theirs.mean(missed):.2%}"
    return ratio, note
