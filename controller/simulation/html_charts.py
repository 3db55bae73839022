"""The report's charts: which number of which policy is drawn against what, with its unit and words.

Owns the choice of charts. Must not compute: every number is the report's; `svg` draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from controller.simulation.curves import Point, PolicyReport
from controller.simulation.digits import plain, short
from controller.simulation.leaders import Crossover, budget_of
from controller.simulation.report import LEVELS, Report
from controller.simulation.svg import Axis, Level, Line, Mark, line_chart, scatter_chart

MAX_CLASSES: Final = 6
"""Classes that get charts of their own at first sight."""

_Value = Callable[[Point], float | None]


def drawn_crossovers(report: Report) -> list[Crossover]:
    """Return the crossovers whose two curves are drawn, in the order of their letters."""
    return [each for each in report.crossovers if each.second in report.shown]


def slo_of(report: Report, class_name: str) -> dict[str, Any]:
    """Return the targets of a class in seconds, by name; empty where they are not known."""
    classes = report.about.get("classes", ())
    return next((dict(each["slo"]) for each in classes if each["name"] == class_name), {})


def has_curves(report: Report) -> bool:
    """Whether there is more than one load, so that there is a curve to draw."""
    return len({point.load for policy in report.curves for point in policy.points}) > 1


def class_names(report: Report) -> list[str]:
    """Return the classes that were offered, those with the tightest first token first."""
    return sorted(
        _offered(report), key=lambda name: (slo_of(report, name).get("ttft_s") or 1e9, name)
    )


def main_classes(report: Report) -> list[str]:
    """Return the `MAX_CLASSES` classes with the most requests, tightest first token first.

    A stored run has a class for every set of targets that anybody asked for.
    """
    offered = _offered(report)
    most = sorted(offered, key=lambda name: -offered[name])[:MAX_CLASSES]
    return [name for name in class_names(report) if name in most]


def tightest_class(report: Report) -> str:
    """Return the class with the tightest first token, of those with a tenth of the requests.

    Where none has so many it is the largest one.
    """
    offered = _offered(report)
    least = 0.1 * sum(offered.values())
    large = [name for name in class_names(report) if offered[name] >= least]
    return large[0] if large else max(offered, key=lambda name: offered[name])


def _offered(report: Report) -> dict[str, float]:
    """Requests per seed of each class, at the load where they are most."""
    found: dict[str, float] = {}
    for policy in report.policies:
        for point in policy.points:
            for name, num in point.class_offered.items():
                found[name] = max(num, found.get(name, 0.0))
    return found


def attainment_chart(report: Report) -> str:
    """Draw attainment against load, with the range of the seeds and the crossovers."""
    has_seeds = any(p.num_seeds > 1 for policy in report.curves for p in policy.points)
    lines = [
        Line(
            policy.policy,
            tuple((point.rate, point.attainment.mean) for point in policy.points),
            tuple(point.attainment.low for point in policy.points) if has_seeds else (),
            tuple(point.attainment.high for point in policy.points) if has_seeds else (),
            group,
        )
        for group, policy in enumerate(report.curves)
    ]
    return line_chart(
        "Attainment",
        lines,
        _rate_axis(report),
        Axis("share of offered requests"),
        is_share=True,
        levels=[Level(LEVELS[0], f"{LEVELS[0]:.0%}")],
        crossings=[(each.rate, each.attainment) for each in drawn_crossovers(report)],
    )


def load_charts(report: Report) -> list[str]:
    """Draw what the machine was used for, and who was refused."""
    return [
        _over_rate(
            report,
            "Goodput",
            "requests/s in time",
            lambda point: point.rate * point.attainment.mean,
        ),
        _over_rate(
            report,
            "Useful throughput",
            "tokens/s of requests in time",
            lambda point: point.useful_tokens_per_s,
        ),
        _over_rate(
            report,
            "Refused",
            "share of offered requests",
            lambda point: point.refused,
            is_share=True,
        ),
    ]


def time_charts(report: Report) -> list[str]:
    """Draw the percentiles of TTFT, TPOT and the longest gap over load."""
    seconds, millis = "seconds", "milliseconds"
    kinds: tuple[tuple[str, str, _Value], ...] = (
        ("TTFT P50", seconds, lambda point: point.ttft_p50_s),
        ("TTFT P90", seconds, lambda point: point.ttft_p90_s),
        ("TTFT P99", seconds, lambda point: point.ttft_p99_s),
        ("TPOT P50", millis, lambda point: _ms(point.tpot_p50_s)),
        ("TPOT P90", millis, lambda point: _ms(point.tpot_p90_s)),
        ("TPOT P99", millis, lambda point: _ms(point.tpot_p99_s)),
        ("Longest gap of a request, P99", millis, lambda point: _ms(point.gap_p99_s)),
    )
    return [_over_rate(report, name, unit, value, may_be_log=True) for name, unit, value in kinds]


def class_charts(report: Report, name: str) -> list[str]:
    """Draw one class over load: its attainment, and its P90s with the targets."""
    slo = slo_of(report, name)
    return [
        _over_rate(
            report,
            f"{name}: attainment",
            "share of offered requests",
            lambda point: point.classes.get(name),
            is_share=True,
        ),
        _over_rate(
            report,
            f"{name}: TTFT P90",
            "seconds",
            lambda p: p.class_times[name].ttft_p90_s if name in p.class_times else None,
            may_be_log=True,
            levels=_levels(slo.get("ttft_s"), 1.0, "s"),
        ),
        _over_rate(
            report,
            f"{name}: TPOT P90",
            "milliseconds",
            lambda p: _ms(p.class_times[name].tpot_p90_s) if name in p.class_times else None,
            may_be_log=True,
            levels=_levels(slo.get("tpot_s"), 1e3, "ms"),
        ),
    ]


def decile_charts(report: Report) -> list[str]:
    """Draw attainment by tenth of prompt length, one chart per load."""
    charts = []
    for load, points in _by_load(report.curves):
        names = max((point.decile_tokens for _, _, point in points), key=len)
        charts.append(
            line_chart(
                _at(load, points),
                [
                    Line(
                        policy.policy,
                        tuple((float(i), y) for i, y in enumerate(point.deciles, 1)),
                        group=group,
                    )
                    for group, policy, point in points
                ],
                Axis("prompts up to so many tokens", tuple(short(each) for each in names)),
                Axis("share of offered requests"),
                is_share=True,
            )
        )
    return charts


def pareto_charts(report: Report, class_name: str) -> list[str]:
    """Draw TTFT against TPOT, both P90, one chart per load; every policy is a point.

    Policies that are no curves are small; budgets of one family are joined in their order.
    """
    slo = slo_of(report, class_name)
    groups = {name: group for group, name in enumerate(report.shown)}
    others = {
        found[0]
        for p in report.policies
        if p.policy not in groups and (found := budget_of(p.policy))
    }
    charts = []
    for load, points in _by_load(report.policies):
        marks = []
        families: dict[str, list[tuple[int, float, float]]] = {}
        for _, policy, point in points:
            times = point.class_times.get(class_name)
            if times is None or not times.ttft_p90_s or not times.tpot_p90_s:
                continue
            x, y = times.ttft_p90_s, times.tpot_p90_s * 1e3
            group, found = groups.get(policy.policy), budget_of(policy.policy)
            # Of one family the number says enough.
            is_short = group is None and found is not None and len(others) == 1
            label = str(found[1]) if is_short and found is not None else policy.policy
            marks.append(Mark(policy.policy, x, y, group, label))
            if found is not None:
                families.setdefault(found[0], []).append((found[1], x, y))
        # Whoever is a curve is labelled first.
        marks.sort(key=lambda mark: (mark.group is None, mark.group or 0))
        charts.append(
            scatter_chart(
                _at(load, points),
                marks,
                Axis("TTFT P90 in seconds"),
                Axis("TPOT P90 in milliseconds"),
                chains=[
                    [(x, y) for _, x, y in sorted(members)]
                    for members in families.values()
                    if len(members) > 1
                ],
                targets=(slo.get("ttft_s"), _ms(slo.get("tpot_s"))),
                nothing="Nobody was served.",
            )
        )
    return charts


def fairness_charts(report: Report) -> list[str]:
    """Draw the worst that happened to anybody, how equal it was, and how a burst was overcome."""
    points = [point for policy in report.curves for point in policy.points]
    has_burst = any(point.num_bursts for point in points)
    return [
        _over_rate(
            report,
            "Recovery after the largest burst",
            "seconds",
            lambda point: point.burst_recovery_s,
            nothing=(
                "Nobody recovered before the last arrival."
                if has_burst
                else "No burst: no ten seconds demand twice the mean."
            ),
        ),
        _over_rate(
            report, "Longest wait", "seconds", lambda point: point.longest_wait_s, may_be_log=True
        ),
        _over_rate(
            report,
            "Largest slowdown",
            "times as long as alone",
            lambda point: point.largest_slowdown,
            may_be_log=True,
        ),
        _over_rate(
            report,
            "Jain's index",
            "1 = everybody equally well off",
            lambda point: point.jain_index,
            levels=[Level(1.0, "equal")],
        ),
    ]


def _over_rate(
    report: Report,
    title: str,
    y_label: str,
    value: _Value,
    *,
    is_share: bool = False,
    may_be_log: bool = False,
    levels: Sequence[Level] = (),
    nothing: str = "Nobody was served.",
) -> str:
    """Return a chart of one number of each point against the offered rate."""
    lines = [
        Line(
            policy.policy,
            tuple((p.rate, found) for p in policy.points if (found := value(p)) is not None),
            group=group,
        )
        for group, policy in enumerate(report.curves)
    ]
    return line_chart(
        title,
        lines,
        _rate_axis(report),
        Axis(y_label),
        is_share=is_share,
        may_be_log=may_be_log,
        levels=levels,
        nothing=nothing,
    )


def _rate_axis(report: Report) -> Axis:
    """The same stretch in every chart, whoever has a number where."""
    rates = {point.rate for policy in report.curves for point in policy.points}
    return Axis("offered requests per second", reach=tuple(sorted(rates)))


_Indexed = tuple[int, PolicyReport, Point]


def _by_load(policies: Sequence[PolicyReport]) -> Iterable[tuple[float, list[_Indexed]]]:
    """Yield the points of each load, with the policy and its index."""
    for load in sorted({point.load for policy in policies for point in policy.points}):
        yield (
            load,
            [
                (index, policy, point)
                for index, policy in enumerate(policies)
                for point in policy.points
                if point.load == load
            ],
        )


def _at(load: float, points: Sequence[_Indexed]) -> str:
    return f"At load {load:.3g}: {plain(points[0][2].rate)}/s"


def _levels(target: float | None, unit: float, name: str) -> list[Level]:
    if target is None:
        return []
    return [Level(target * unit, f"target {target * unit:g} {name}")]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
