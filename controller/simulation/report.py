"""`Report`: a sweep in the numbers that a reader compares: curves per policy, goodput, crossovers.

Owns how rows of several seeds become one point. Must not draw, print or run a simulation.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from controller.simulation.goodput import Goodput, LoadPoint, crossovers, goodput
from controller.simulation.sweep import SweepRow

LEVELS: Final = (0.9, 0.99)
REPORT_FORMAT: Final = 1
# Two policies that both keep nearly everybody change places by luck.
_LEAST_LEAD: Final = 0.01


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over seeds: mean, smallest and largest."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Point:
    """One policy at one load, over `num_seeds` seeds.

    `rate` is the offered rate, the same for all policies. Seconds are means over seeds of that
    percentile; `classes` and `deciles` are attainment by class, and by tenth of prompt length from
    the shortest. `longest_wait_s` and `largest_slowdown` are the worst of any seed. None where no
    request has such a number. `burst_recovery_s` is the mean of the seeds whose burst was overcome,
    `num_unrecovered` counts the others. `planner_us` is real time per call, `planner_share` what it
    is of the mean step; `prediction_mape` and `coverage` are the cost model's.
    """

    load: float
    rate: float
    num_seeds: int
    attainment: Spread
    classes: dict[str, float]
    deciles: tuple[float, ...]
    refused: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None
    tpot_p99_s: float | None
    gap_p99_s: float | None
    longest_gap_s: float | None
    longest_wait_s: float
    largest_slowdown: float | None
    jain_index: float
    burst_recovery_s: float | None
    num_unrecovered: int
    useful_tokens_per_s: float
    planner_us: float
    planner_share: float
    prediction_mape: float
    coverage: float


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """One policy over all loads, and the goodput of that curve at each of `LEVELS`.

    `goodput_by_seed` holds the same for the curve of each seed alone, lowest seed first.
    """

    policy: str
    points: tuple[Point, ...]
    goodput: tuple[Goodput, ...]
    goodput_by_seed: tuple[tuple[Goodput, ...], ...]

    @property
    def curve(self) -> list[LoadPoint]:
        """Mean attainment by offered rate."""
        return [LoadPoint(point.rate, point.attainment.mean) for point in self.points]


@dataclass(frozen=True, slots=True)
class Crossover:
    """The offered rate at which the attainment of two policies changes places."""

    first: str
    second: str
    rate: float


@dataclass(frozen=True, slots=True)
class Report:
    """A sweep, policies in the order in which they were asked for.

    `about` says what was simulated, as JSON values. `shown` names the policies to draw as curves;
    the others (budgets that a search tried) are points and rows.
    """

    about: dict[str, Any]
    policies: tuple[PolicyReport, ...]
    shown: tuple[str, ...]
    crossovers: tuple[Crossover, ...]

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
        _policy(name, [row for row in rows if row.task.policy == name], rate_at)
        for name in dict.fromkeys(row.task.policy for row in rows)
    )
    names = tuple(policy.policy for policy in policies)
    return Report(
        about,
        policies,
        names if shown is None else tuple(name for name in names if name in shown),
        tuple(_crossovers(policies)),
    )


def score(rows: Iterable[SweepRow], level: float) -> tuple[float, ...]:
    """Return what a budget is chosen by: goodput at `level` first, then mean attainment."""
    points = [LoadPoint(row.task.load, row.attainment) for row in rows]
    found = goodput(points, level)
    mean = statistics.fmean(point.attainment for point in points)
    return (0.0 if found.rate is None else found.rate, mean)


def _policy(name: str, rows: Sequence[SweepRow], rate_at: dict[float, float]) -> PolicyReport:
    by_load: dict[float, list[SweepRow]] = {}
    for row in rows:
        by_load.setdefault(row.task.load, []).append(row)
    points = tuple(_point(load, rate_at[load], group) for load, group in sorted(by_load.items()))
    curve = [LoadPoint(point.rate, point.attainment.mean) for point in points]
    by_seed: dict[int, list[LoadPoint]] = {}
    for row in rows:
        point = LoadPoint(rate_at[row.task.load], row.attainment)
        by_seed.setdefault(row.task.seed, []).append(point)
    return PolicyReport(
        name, points, _goodputs(curve), tuple(_goodputs(by_seed[seed]) for seed in sorted(by_seed))
    )


def _goodputs(curve: Sequence[LoadPoint]) -> tuple[Goodput, ...]:
    return tuple(goodput(curve, level) for level in LEVELS)


def _point(load: float, rate: float, rows: Sequence[SweepRow]) -> Point:
    measures = [row.measures for row in rows]
    overall = [each["overall"] for each in measures]
    attainments = [float(each["attainment"]) for each in overall]
    classes: dict[str, list[float]] = {}
    for each in measures:
        for group in each["classes"]:
            classes.setdefault(group["name"], []).append(group["attainment"])
    num_deciles = min(len(each["deciles"]) for each in measures)

    def percentile(kind: str, name: str) -> float | None:
        return _mean(group[kind][name] for group in overall if group[kind] is not None)

    recoveries = [each["burst_recovery_s"] for each in measures if each["has_burst"]]
    return Point(
        load=load,
        rate=rate,
        num_seeds=len(rows),
        attainment=Spread(statistics.fmean(attainments), min(attainments), max(attainments)),
        classes={name: statistics.fmean(values) for name, values in sorted(classes.items())},
        deciles=tuple(
            statistics.fmean(each["deciles"][i]["attainment"] for each in measures)
            for i in range(num_deciles)
        ),
        refused=statistics.fmean(each["num_refused"] / each["num_offered"] for each in overall),
        ttft_p50_s=percentile("ttft_s", "p50"),
        ttft_p90_s=percentile("ttft_s", "p90"),
        ttft_p99_s=percentile("ttft_s", "p99"),
        tpot_p50_s=percentile("tpot_s", "p50"),
        tpot_p90_s=percentile("tpot_s", "p90"),
        tpot_p99_s=percentile("tpot_s", "p99"),
        gap_p99_s=percentile("gap_s", "p99"),
        longest_gap_s=_worst(each["gap_s"]["max"] for each in overall if each["gap_s"]),
        longest_wait_s=max(each["longest_wait_s"] for each in overall),
        largest_slowdown=_worst(
            each["largest_slowdown"] for each in measures if each["largest_slowdown"] is not None
        ),
        jain_index=statistics.fmean(each["jain_index"] for each in measures),
        burst_recovery_s=_mean(value for value in recoveries if value is not None),
        num_unrecovered=recoveries.count(None),
        useful_tokens_per_s=statistics.fmean(each["useful_tokens_per_s"] for each in measures),
        planner_us=statistics.fmean(each["planner_us_mean"] for each in measures),
        planner_share=statistics.fmean(
            each["planner_us_mean"] * 1e-6 / max(each["mean_step_s"], 1e-9) for each in measures
        ),
        prediction_mape=statistics.fmean(each["prediction_mape"] for each in measures),
        coverage=statistics.fmean(each["coverage"] for each in measures),
    )


def _mean(values: Iterable[float]) -> float | None:
    return _of(values, statistics.fmean)


def _worst(values: Iterable[float]) -> float | None:
    return _of(values, max)


def _of(values: Iterable[float], function: Callable[[list[float]], float]) -> float | None:
    known = list(values)
    return function(known) if known else None


def _crossovers(policies: Sequence[PolicyReport]) -> Iterable[Crossover]:
    """Every pair in which one of the two is the first policy: the one that is being judged."""
    for other in policies[1:]:
        for rate in crossovers(policies[0].curve, other.curve, _LEAST_LEAD):
            yield Crossover(policies[0].policy, other.policy, rate)
