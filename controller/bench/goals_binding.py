"""What binds: which constraint sets the steps where promises begin to be missed and in an overload,
who misses what for which cause, and what an oracle would keep.

Owns which runs are looked at and which numbers are taken of them. Must not know how a run is made
or a report looks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from controller.bench.goals_cases import Case, targets_of
from controller.bench.goals_goodput import OURS, CaseGoodput
from controller.bench.goals_ladder import rate_of, rung_above
from controller.bench.goals_overload import JUDGED_OVERLOAD, overloaded
from controller.bench.goals_promises import NOT_REACHED, Loads, Point, run_loads
from controller.bench.goals_runs import Missing, NotMeasuredError, Runs
from controller.bench.goals_scene import ALL, EXTRA, ORACLE
from controller.simulation.causes import mean_shares, miss_shares

OURS_ORACLE: Final = OURS + ORACLE
BINDING_SEEDS: Final = 3
BINDING_FAMILY: Final = "edf-shed"
_NEEDED: Final = ("binding_steps",)
_NEEDED_IN_OVERLOAD: Final = (*_NEEDED, f"{EXTRA}.settled.groups")
_NUM_CONSTRAINTS: Final = 3


@dataclass(frozen=True, slots=True)
class Binding:
    """Our planner, the same with an oracle, and the best static budget with our admission, at one
    rate of a case (`loads` has one factor).

    `is_overload`: misses are those of the middle of a run, as in G3; otherwise those of all.
    """

    case: Case
    is_overload: bool
    loads: Loads | Missing

    @property
    def points(self) -> tuple[Point, ...]:
        """The policies, ours first; none where nothing was measured."""
        return () if isinstance(self.loads, Missing) else self.loads.points

    def misses(self, point: Point, name: str = ALL) -> dict[str, float] | None:
        """Return what share of the offered requests missed a target, by cause, of all or a class;
        the mean over the seeds that know, None if none does or nobody of the class was there.
        """
        groups = [self._group(row.measures, name) for row in point.rows]
        return mean_shares([None if each is None else miss_shares(each) for each in groups])

    def kept(self, point: Point) -> float | None:
        """Return the share of the offered requests that met every target; None if unknown."""
        misses = self.misses(point)
        return None if misses is None else 1.0 - sum(misses.values())

    @property
    def oracle_gain(self) -> float | None:
        """What an oracle keeps more, as a share of the offered requests; None unmeasured."""
        by_policy = {point.policy: self.kept(point) for point in self.points}
        ours, oracle = by_policy.get(OURS), by_policy.get(OURS_ORACLE)
        return None if ours is None or oracle is None else oracle - ours

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        head = {"case": self.case.name, "is_overload": self.is_overload}
        if isinstance(self.loads, Missing):
            return head | {"missing": self.loads}
        names = (ALL, *(name for name, *_ in targets_of(self.case)))
        return head | {
            "points": [
                {
                    "policy": point.policy,
                    "rate": point.rate,
                    "seeds": [row.task.seed for row in point.rows],
                    "kept": self.kept(point),
                    "misses": {name: self.misses(point, name) for name in names},
                    "bound": [
                        {"constraint": name, "steps": steps, "time": time}
                        for name, steps, time in bound(point)
                    ],
                }
                for point in self.points
            ],
        }

    def _group(self, measures: dict[str, Any], name: str) -> Mapping[str, Any] | None:
        if self.is_overload:
            # Rows of before do not have them.
            found: Mapping[str, Any] = measures[EXTRA]["settled"].get("groups", {})
            return found.get(name)
        if name == ALL:
            return dict(measures["overall"])
        return next((each for each in measures["classes"] if each["name"] == name), None)


def bound(point: Point) -> list[tuple[str, float, float]]:
    """Return the three constraints that bound most steps: name, share of the steps, share of the
    virtual time within them; means over seeds.
    """
    steps = mean_shares([row.measures["binding_steps"] for row in point.rows]) or {}
    times = mean_shares([row.measures["binding_time"] for row in point.rows]) or {}
    ranked = sorted(steps, key=lambda name: steps[name], reverse=True)
    return [(name, steps[name], times.get(name, 0.0)) for name in ranked[:_NUM_CONSTRAINTS]]


def oracle_gain(bindings: Sequence[Binding]) -> tuple[float, float, float] | None:
    """Return what an oracle keeps more: mean, least and most of the cases; None unmeasured."""
    gains = [each.oracle_gain for each in bindings]
    known = [gain for gain in gains if gain is not None]
    return (statistics.fmean(known), min(known), max(known)) if known else None


def measure_bindings(
    steady: Sequence[CaseGoodput],
    changing: Sequence[CaseGoodput],
    runs: Runs,
    seeds: Sequence[int],
) -> list[Binding]:
    """Return every case on the first rung above our 90 % goodput, then the steady ones at 1.5 times
    our goodput on the overload's mix, with the first three seeds.

    The static budget is that of the best 90 % goodput on the case, in an overload too.
    """
    seeds = tuple(seeds)
    jobs = [partial(_at_the_fall, found, runs, seeds) for found in (*steady, *changing)]
    jobs += [partial(_in_an_overload, found, runs, seeds) for found in steady]
    cases = [found.case for found in (*steady, *changing, *steady)]
    num_falls = len(steady) + len(changing)
    return [
        Binding(case, index >= num_falls, loads)
        for index, (case, loads) in enumerate(zip(cases, runs.together(jobs), strict=True))
    ]


def _at_the_fall(found: CaseGoodput, runs: Runs, seeds: Sequence[int]) -> Loads:
    if found.knee is None:
        raise NotMeasuredError(NOT_REACHED)
    rate = rate_of(rung_above(found.knee))
    return _run(found, found.case, runs, rate, 1.0, seeds, _NEEDED)


def _in_an_overload(found: CaseGoodput, runs: Runs, seeds: Sequence[int]) -> Loads:
    case, knee = overloaded(found, runs, seeds)
    return _run(found, case, runs, knee, JUDGED_OVERLOAD, seeds, _NEEDED_IN_OVERLOAD)


def _run(
    found: CaseGoodput,
    case: Case,
    runs: Runs,
    knee: float,
    factor: float,
    seeds: Sequence[int],
    needed: Sequence[str],
) -> Loads:
    best = found.best(BINDING_FAMILY)
    policies = [OURS, OURS_ORACLE] + ([] if best is None else [best.curve.policy])
    return run_loads(case, runs, policies, knee, (factor,), seeds[:BINDING_SEEDS], needed=needed)
