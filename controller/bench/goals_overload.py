"""G3, overload: what is kept beyond the goodput, and by whom.

Owns the rate that an overload is a multiple of, and what is counted of it. Must not know how a run
is made or a report looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from controller.bench.goals_cases import OVERLOAD_S, TOP_CLASS, Case
from controller.bench.goals_goodput import BUDGETS, KNEE, OURS, CaseGoodput, attain_on
from controller.bench.goals_ladder import Span, rung_near, walk
from controller.bench.goals_promises import (
    NOT_REACHED,
    Loads,
    Point,
    extra,
    missed,
    run_loads,
    settled,
    settled_of,
    useful,
)
from controller.bench.goals_runs import Missing, NotMeasuredError, Runs
from controller.bench.goals_verdicts import Check, Measured
from controller.simulation.sweep import SweepRow, SweepTask, search_budget

OVERLOADS: Final = (1.0, 1.25, 1.5, 2.0)
JUDGED_OVERLOAD: Final = 1.5
# A run of 240 s holds thousands of requests, whose spread within it is small beside what is asked.
_FEW_SEEDS: Final = 1
# A rate counts as long enough if the arrivals last so much of what was wanted.
_LONG_ENOUGH: Final = 0.99
_CLAIMS: Final = (
    (f"{TOP_CLASS} missed at 1.5×", 0.01, False, "%"),
    ("all missed at 1.5×, over FCFS at its best", 0.3, False, "×"),
    ("useful tokens/s at 1.5× over their peak", 0.95, True, "×"),
)
_EVEN_CLAIM: Final = "all missed at 1.5×, over FCFS at its best, 50/30/20 with equal weights"


@dataclass(frozen=True, slots=True)
class Overload:
    """Ours and FCFS at its best (`policy` names) at multiples of our goodput: `weighted` on the
    overload's own mix, where FCFS is run at the judged load alone; `even` on the mix of G1 with
    equal weights at the judged load of that mix, None where somebody has no goodput on it.
    """

    weighted: Loads
    even: Loads | None

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        even = None if self.even is None else self.even.to_json()
        return self.weighted.to_json() | {"even": even}


def measure_overload(found: CaseGoodput, runs: Runs, seeds: Sequence[int]) -> Overload:
    """Return our planner, with weights, at multiples of its goodput on the overload's mix, and FCFS
    with the budget that misses least there; then both on the mix of G1.

    All seeds at the load that is judged, the first one elsewhere. NotMeasuredError if no rate
    holds 90 %.
    """
    few = seeds[:_FEW_SEEDS]
    case, knee = overloaded(found, runs, seeds)
    points: list[Point] = []
    for factor in OVERLOADS:
        chosen = seeds if factor == JUDGED_OVERLOAD else few
        points += run_loads(case, runs, (OURS,), knee, (factor,), chosen).points
    rival = _least_missed(case, runs, JUDGED_OVERLOAD * knee, seeds[0])
    points += run_loads(case, runs, (rival,), knee, (JUDGED_OVERLOAD,), seeds).points
    return Overload(Loads(case, knee, tuple(points)), _even(found, runs, knee, few))


def overloaded(found: CaseGoodput, runs: Runs, seeds: Sequence[int]) -> tuple[Case, float]:
    """Return the case with the overload's mix and weights, and our 90 % goodput on it.

    NotMeasuredError if no rate holds that.
    """
    case = found.case.weighted()
    knee = _knee(case, runs, found.knee or case.start_rate, seeds[:_FEW_SEEDS])
    if knee is None:
        raise NotMeasuredError(NOT_REACHED)
    return case, knee


def _even(found: CaseGoodput, runs: Runs, guess: float, seeds: Sequence[int]) -> Loads | None:
    best, case = found.best("fcfs"), found.case.lasting()
    knee = None if best is None else _knee(case, runs, guess, seeds)
    if best is None or knee is None:
        return None
    return run_loads(case, runs, (OURS, best.curve.policy), knee, (JUDGED_OVERLOAD,), seeds)


def _knee(case: Case, runs: Runs, guess: float, seeds: Sequence[int]) -> float | None:
    """Return our 90 % goodput in the middle of the runs of a case; `guess` is where to begin."""
    attain = attain_on(case, runs, _settled_attainment)
    span = Span.around(rung_near(case.start_rate))
    return walk(attain, OURS, (KNEE,), seeds, rung_near(guess), span).goodput(KNEE).rate


def _settled_attainment(row: SweepRow) -> float:
    return 1.0 - settled(row.measures)


def _least_missed(case: Case, runs: Runs, rate: float, seed: int) -> str:
    """Return the policy: FCFS with the static budget that misses least at that rate."""

    def score(policies: Sequence[str]) -> list[tuple[float, ...]]:
        tasks = [SweepTask(policy, case.load(rate), seed) for policy in policies]
        rows = runs.rows(case.scene, tasks, f"{case.name}: fcfs in an overload")
        return [(-settled(row.measures), -missed(row.measures)) for row in rows]

    return search_budget("fcfs", score, coarse=BUDGETS, rounds=1).policy


def g3_checks(cases: Sequence[tuple[Case, Overload | Missing]]) -> list[Check]:
    """Return the checks of G3 at 1.5 times the goodput, and what no goal speaks of."""
    checks = []
    for case, found in cases:
        if isinstance(found, Missing):
            checks += [
                Check("G3", claim, case.name, wanted, is_least, unit, None, str(found))
                for claim, wanted, is_least, unit in _CLAIMS
            ]
            continue
        loads = found.weighted
        ours, theirs = (loads.at(name, JUDGED_OVERLOAD) for name in loads.policies)
        peak = max(loads.at(OURS, factor).mean(useful) for factor in OVERLOADS)
        top = settled_of(TOP_CLASS)
        lasts = _lasts(ours)
        numbers = (
            (ours.measured(top), f"{theirs.policy}: {theirs.mean(top):.1%}; {lasts}"),
            _over(ours, theirs),
            (
                Measured.of([value / peak for value in ours.by_seed(useful)]) if peak else None,
                f"{ours.mean(useful):,.0f} of {peak:,.0f}",
            ),
        )
        checks += [
            Check("G3", claim, case.name, wanted, is_least, unit, *number)
            for (claim, wanted, is_least, unit), number in zip(_CLAIMS, numbers, strict=True)
        ]
        if found.even is not None:
            both = [found.even.at(name, JUDGED_OVERLOAD) for name in found.even.policies]
            ratio, note = _over(*both)
            note += "".join(f"; {each.policy}: {TOP_CLASS} {each.mean(top):.1%}" for each in both)
            checks.append(Check("G3", _EVEN_CLAIM, case.name, None, False, "×", ratio, note))
    return checks


def _over(ours: Point, theirs: Point) -> tuple[Measured | None, str]:
    pairs = zip(ours.by_seed(settled), theirs.by_seed(settled), strict=True)
    ratio = Measured.of([mine / max(his, 1e-9) for mine, his in pairs])
    return ratio, f"{ours.mean(settled):.1%} against {theirs.mean(settled):.1%} ({theirs.policy})"


def _lasts(point: Point) -> str:
    seconds = min(point.by_seed(extra("arrivals_s")))
    is_short = seconds < _LONG_ENOUGH * OVERLOAD_S
    return f"arrivals of {seconds:.0f} s" + (", where the trace ends" if is_short else "")
