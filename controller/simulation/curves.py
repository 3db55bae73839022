"""Curves: the runs of one policy as points over load, seeds become one.

Owns how rows of several seeds become a point, and the goodput of a curve. Must not compare
policies, draw or print.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from controller.simulation.causes import mean_shares, miss_shares
from controller.simulation.goodput import Goodput, LoadPoint, goodput
from controller.simulation.sweep import SweepRow

LEVELS: Final = (0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over seeds: mean, smallest and largest."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Times:
    """TTFT and TPOT of a group, in seconds: means over seeds of each percentile.

    They count whoever has such a number: the refused have none. None where nobody has.
    """

    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None
    tpot_p99_s: float | None


@dataclass(frozen=True, slots=True)
class Point:
    """One policy at one load, over `num_seeds` seeds.

    `rate` is the offered rate, the same for all policies. Seconds are means over seeds of that
    percentile; `classes` and `deciles` are attainment by class, and by tenth of prompt length from
    the shortest, `class_offered` requests per seed and `class_times` the times by class,
    `decile_tokens` the longest prompt of each tenth. `longest_wait_s` and `largest_slowdown` are
    the worst of any seed. None where no request has such a number. `num_bursts` seeds had a burst:
    `burst_recovery_s` is the mean of those that overcame it, `num_unrecovered` counts the others.
    `misses` are shares of the offered requests by the cause of the miss, `binding_steps` and
    `binding_time` shares of steps and of the time within them by the constraint that bound them;
    None where the runs are older than that. `planner_us` is real time per call, `planner_share`
    what it is of the mean step; `prediction_mape` and `coverage` are the cost model's.
    """

    load: float
    rate: float
    num_seeds: int
    attainment: Spread
    classes: dict[str, float]
    class_offered: dict[str, float]
    class_times: dict[str, Times]
    deciles: tuple[float, ...]
    decile_tokens: tuple[int, ...]
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
    num_bursts: int
    burst_recovery_s: float | None
    num_unrecovered: int
    useful_tokens_per_s: float
    planner_us: float
    planner_share: float
    prediction_mape: float
    coverage: float
    misses: dict[str, float] | None
    binding_steps: dict[str, float] | None
    binding_time: dict[str, float] | None


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


def policy_report(name: str, rows: Sequence[SweepRow], rate_at: dict[float, float]) -> PolicyReport:
    """Sum up the rows of one policy; `rate_at` is the offered rate by load, for all the same."""
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
    times: dict[str, list[Mapping[str, Any]]] = {}
    for each in measures:
        for group in each["classes"]:
            times.setdefault(group["name"], []).append(group)
    num_deciles = min(len(each["deciles"]) for each in measures)
    of_all = _times(overall)
    recoveries = [each["burst_recovery_s"] for each in measures if each["has_burst"]]
    return Point(
        load=load,
        rate=rate,
        num_seeds=len(rows),
        attainment=Spread(statistics.fmean(attainments), min(attainments), max(attainments)),
        classes={name: statistics.fmean(values) for name, values in sorted(classes.items())},
        class_offered={
            name: sum(group["num_offered"] for group in groups) / len(rows)
            for name, groups in sorted(times.items())
        },
        class_times={name: _times(groups) for name, groups in sorted(times.items())},
        deciles=tuple(
            statistics.fmean(each["deciles"][i]["attainment"] for each in measures)
            for i in range(num_deciles)
        ),
        decile_tokens=tuple(
            round(statistics.fmean(_longest_prompt(each["deciles"][i]) for each in measures))
            for i in range(num_deciles)
        ),
        refused=statistics.fmean(each["num_refused"] / each["num_offered"] for each in overall),
        **asdict(of_all),
        gap_p99_s=_percentile(overall, "gap_s", "p99"),
        longest_gap_s=_worst(each["gap_s"]["max"] for each in overall if each["gap_s"]),
        longest_wait_s=max(each["longest_wait_s"] for each in overall),
        largest_slowdown=_worst(
            each["largest_slowdown"] for each in measures if each["largest_slowdown"] is not None
        ),
        jain_index=statistics.fmean(each["jain_index"] for each in measures),
        num_bursts=len(recoveries),
        burst_recovery_s=_mean(value for value in recoveries if value is not None),
        num_unrecovered=recoveries.count(None),
        useful_tokens_per_s=statistics.fmean(each["useful_tokens_per_s"] for each in measures),
        planner_us=statistics.fmean(each["planner_us_mean"] for each in measures),
        planner_share=statistics.fmean(
            each["planner_us_mean"] * 1e-6 / max(each["mean_step_s"], 1e-9) for each in measures
        ),
        prediction_mape=statistics.fmean(each["prediction_mape"] for each in measures),
        coverage=statistics.fmean(each["coverage"] for each in measures),
        misses=mean_shares([miss_shares(each) for each in overall]),
        binding_steps=mean_shares([each.get("binding_steps") for each in measures]),
        binding_time=mean_shares([each.get("binding_time") for each in measures]),
    )


def _times(groups: Sequence[Mapping[str, Any]]) -> Times:
    return Times(
        *(
            _percentile(groups, kind, name)
            for kind in ("ttft_s", "tpot_s")
            for name in ("p50", "p90", "p99")
        )
    )


def _percentile(groups: Iterable[Mapping[str, Any]], kind: str, name: str) -> float | None:
    return _mean(group[kind][name] for group in groups if group[kind] is not None)


def _longest_prompt(decile: Mapping[str, Any]) -> int:
    """Its name is the span of its prompts, `100-300`."""
    return int(decile["name"].rpartition("-")[2])


def _mean(values: Iterable[float]) -> float | None:
    return _of(values, statistics.fmean)


def _worst(values: Iterable[float]) -> float | None:
    return _of(values, max)


def _of(values: Iterable[float], function: Callable[[list[float]], float]) -> float | None:
    known = list(values)
    return function(known) if known else None
