"""What is kept at given loads: policies at multiples of a rate, G6 (bounds), and the load curve.

Owns which loads are run and which numbers are taken of them. Must not know how a run is made or a
report looks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from controller.bench.goals_cases import Case
from controller.bench.goals_goodput import KNEE, OURS, Best, CaseGoodput
from controller.bench.goals_runs import NotMeasuredError, Runs
from controller.bench.goals_scene import EXTRA
from controller.bench.goals_verdicts import Check, Measured
from controller.simulation.sweep import SweepRow, SweepTask

CURVE_LOADS: Final = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
CURVE_SEEDS: Final = 3
NOT_REACHED: Final = "no rate holds 90 %"


@dataclass(frozen=True, slots=True)
class Point:
    """One policy at one rate over seeds: the rows, in the order of the seeds."""

    policy: str
    factor: float
    rate: float
    rows: tuple[SweepRow, ...]

    def first(self, num_seeds: int) -> Point:
        """Return the same with the first seeds alone."""
        return replace(self, rows=self.rows[:num_seeds])

    def by_seed(self, number: Callable[[dict[str, Any]], float | None]) -> list[float]:
        """Return a number of each row's measures, without the rows that have none."""
        found = (number(row.measures) for row in self.rows)
        return [value for value in found if value is not None]

    def measured(self, number: Callable[[dict[str, Any]], float | None]) -> Measured | None:
        """Return a number over seeds; None if no row has it."""
        values = self.by_seed(number)
        return Measured.of(values) if values else None

    def mean(self, number: Callable[[dict[str, Any]], float | None]) -> float:
        """Return the mean over seeds; 0 if no row has such a number."""
        values = self.by_seed(number)
        return statistics.fmean(values) if values else 0.0

    @property
    def attainment(self) -> float:
        """Mean share of offered requests that met every target."""
        return statistics.fmean(row.attainment for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return what is shown, as JSON values by seed."""
        return {
            "policy": self.policy,
            "factor": self.factor,
            "rate": self.rate,
            "seeds": [row.task.seed for row in self.rows],
            "measures": [_compact(row.measures) for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class Loads:
    """Policies at multiples of a rate, on one case."""

    case: Case
    knee: float
    points: tuple[Point, ...]

    def at(self, policy: str, factor: float) -> Point:
        """Return one point; StopIteration if there is none."""
        return next(p for p in self.points if p.policy == policy and p.factor == factor)

    @property
    def policies(self) -> list[str]:
        """The policies, in the order in which they were run."""
        return list(dict.fromkeys(point.policy for point in self.points))

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        points = [point.to_json() for point in self.points]
        return {"case": self.case.name, "knee": self.knee, "points": points}


def overall(kind: str, name: str) -> Callable[[dict[str, Any]], float | None]:
    """Return what reads a percentile (`tpot_s`, `p90`) of all requests."""

    def number(measures: dict[str, Any]) -> float | None:
        group = measures["overall"][kind]
        return None if group is None else float(group[name])

    return number


def missed(measures: dict[str, Any]) -> float:
    """Return the share of offered requests that missed a target."""
    return 1.0 - float(measures["overall"]["attainment"])


def missed_of(name: str) -> Callable[[dict[str, Any]], float | None]:
    """Return what reads the share of a class that missed a target; None without the class."""

    def number(measures: dict[str, Any]) -> float | None:
        for group in measures["classes"]:
            if group["name"] == name:
                return 1.0 - float(group["attainment"])
        return None

    return number


def extra(name: str) -> Callable[[dict[str, Any]], float | None]:
    """Return what reads one of the goals' own measures."""

    def number(measures: dict[str, Any]) -> float | None:
        value = measures[EXTRA][name]
        return None if value is None else float(value)

    return number


def settled(measures: dict[str, Any]) -> float:
    """Return the share of the requests of the middle of a run that missed a target."""
    return float(measures[EXTRA]["settled"]["missed"])


def settled_of(name: str) -> Callable[[dict[str, Any]], float | None]:
    """Return what reads the share of a class in the middle of a run that missed a target."""

    def number(measures: dict[str, Any]) -> float | None:
        value = measures[EXTRA]["settled"]["classes"].get(name)
        return None if value is None else float(value)

    return number


useful = extra("useful_work_per_s")
"""Reads tokens per second computed for requests that met every target, while the load lasts."""


def _compact(measures: dict[str, Any]) -> dict[str, Any]:
    """Return what the page is made of: of tenths by length their attainment alone."""
    names = ("overall", "classes", EXTRA, "binding_steps", "binding_time")
    # Runs of before do not know what bound them.
    kept = {name: measures[name] for name in names if name in measures}
    return kept | {"deciles": [each["attainment"] for each in measures["deciles"]]}


def run_loads(
    case: Case,
    runs: Runs,
    policies: Iterable[str],
    knee: float,
    factors: Sequence[float],
    seeds: Sequence[int],
    *,
    needed: Sequence[str] = (),
) -> Loads:
    """Run policies at multiples of a rate; `needed` names measures that the rows must have."""
    wanted = [(policy, factor) for factor in factors for policy in policies]
    tasks = [
        SweepTask(policy, case.load(factor * knee), seed)
        for policy, factor in wanted
        for seed in seeds
    ]
    # All at once: no process idles while the last seed of a point is under way.
    rows = runs.rows(case.scene, tasks, f"{case.name}: at multiples of {knee:.2f}/s", needed=needed)
    points = [
        Point(policy, factor, factor * knee, tuple(rows[i * len(seeds) : (i + 1) * len(seeds)]))
        for i, (policy, factor) in enumerate(wanted)
    ]
    return Loads(case, knee, tuple(points))


def g6_checks(rows: Sequence[SweepRow], max_overtaken: int | None) -> list[Check]:
    """Return the checks of G6 over all runs of our planner: the worst of each bound."""
    claims: list[tuple[str, str, float]] = [
        ("longest wait over its bound, max(10·T, 30 s)", "wait_share", 1.0),
        ("most decodes in a row that a stream was left out of", "longest_skip", 0.0),
    ]
    if max_overtaken is not None:
        text = "most later arrivals of its class that started before a request"
        claims.append((text, "most_overtaken", float(max_overtaken)))
    checks = []
    for claim, name, wanted in claims:
        values = [float(row.measures[EXTRA][name]) for row in rows]
        worst = Measured(max(values), max(values), max(values)) if values else None
        unit = "×" if name == "wait_share" else ""
        note = f"worst of {len(values)} runs"
        checks.append(Check("G6", claim, "all cases", wanted, False, unit, worst, note))
    return checks


def measure_curve(found: CaseGoodput, runs: Runs, seeds: Sequence[int]) -> Loads:
    """Return every policy of a case at 0.5 to 2 times our goodput, with the first seeds.

    NotMeasuredError if we have none.
    """
    if found.knee is None:
        raise NotMeasuredError(NOT_REACHED)
    bests = [each for each in found.baselines.values() if isinstance(each, Best)]
    names = dict.fromkeys(each.curve.policy for each in bests if each.level == KNEE)
    seeds = seeds[:CURVE_SEEDS]
    return run_loads(found.case, runs, (OURS, *names), found.knee, CURVE_LOADS, seeds)
