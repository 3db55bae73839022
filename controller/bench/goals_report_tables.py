"""The tables of the goals' page, as Markdown.

Owns rows and columns. Must not judge or simulate.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from controller.bench.goals_binding import Binding, bound
from controller.bench.goals_calm import CALM_LOADS, Calm
from controller.bench.goals_cases import TOP_CLASS, Case, targets_of
from controller.bench.goals_goodput import OURS, Best, CaseGoodput
from controller.bench.goals_ladder import Curve
from controller.bench.goals_overload import Overload
from controller.bench.goals_promises import (
    CURVE_LOADS,
    Loads,
    Point,
    extra,
    missed_of,
    overall,
    settled,
    settled_of,
    useful,
)
from controller.bench.goals_runs import Missing
from controller.bench.goals_verdicts import percent
from controller.simulation.causes import CAUSE_WORDS, binding_word
from controller.simulation.goodput import shown
from controller.simulation.records import MissCause

# Here nobody has a target beside these two, and everybody has both.
_CAUSES: Final = (MissCause.REFUSED, MissCause.LATE, MissCause.SLOW)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; empty without a row."""
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def goodput_table(cases: Sequence[CaseGoodput]) -> str:
    """Return the goodput of every policy, by case."""
    levels = sorted({level for each in cases for level in each.levels})
    rows = []
    for each in cases:
        name = each.case.name
        ours = each.ours
        rows.append(
            [
                name,
                OURS,
                *(str(ours) if isinstance(ours, Missing) else _at(ours, v) for v in levels),
            ]
        )
        for family in dict.fromkeys(family for family, _ in each.baselines):
            cells = []
            for level in levels:
                best = each.baselines.get((family, level))
                if isinstance(best, Best):
                    cells.append(f"{_at(best.curve, level)} `{best.curve.policy}`")
                else:
                    cells.append("–" if best is None else str(best))
            rows.append([name, family, *cells])
    return table(("case", "policy", *(f"{percent(level)} kept" for level in levels)), rows)


def calm_table(cases: Sequence[tuple[Case, Calm | Missing]]) -> str:
    """Return attainment, TPOT and gaps of one class at moderate loads."""
    rows = []
    for case, found in cases:
        if isinstance(found, Missing):
            continue
        calmest = [found.calmest(factor) for factor in CALM_LOADS]
        rows += [
            [
                case.name,
                f"{percent(point.factor)} ({point.rate:.2f}/s)",
                point.policy,
                f"{point.attainment:.2%}",
                _ms(point.mean(overall("tpot_s", "p50"))),
                _ms(point.mean(overall("tpot_s", "p90"))),
                _ms(point.mean(overall("ttft_s", "p90"))),
                f"{point.mean(extra('gap_share_p99')):.2f}×",
                f"{max(point.by_seed(extra('gap_share_max')), default=0.0):.2f}×",
            ]
            for point in (*found.loads.points, *calmest)
            if point is not None
        ]
    head = ("case", "load", "policy", "kept", "TPOT P50", "TPOT P90", "TTFT P90")
    return table((*head, "longest gaps / target, P99", "worst"), rows)


def overload_table(cases: Sequence[tuple[Case, Overload | Missing]]) -> str:
    """Return what is missed, by class, and what is useful at and beyond the knee."""
    rows = []
    for case, found in cases:
        if isinstance(found, Missing):
            continue
        classes = [name for name, *_ in targets_of(case)]
        rows += [
            [
                case.name,
                mix,
                f"{point.factor:g}× ({point.rate:.2f}/s)",
                point.policy,
                f"{point.mean(settled):.1%}",
                " / ".join(f"{point.mean(settled_of(name)):.1%}" for name in classes),
                f"{point.mean(useful):,.0f}",
            ]
            for loads, mix in ((found.weighted, "20/30/50"), (found.even, "50/30/20, equal"))
            if loads is not None
            for point in loads.points
        ]
    head = (
        "case",
        "shares",
        "load",
        "policy",
        "missed",
        f"by class, {TOP_CLASS} first",
        "useful tokens/s",
    )
    return table(head, rows)


def curve_tables(loads: Loads | Missing) -> list[str]:
    """Return attainment of every policy by load, by class and by length."""
    if isinstance(loads, Missing):
        return [f"Not measured: {loads}."]
    head = ("policy", *(f"{factor:g}×" for factor in CURVE_LOADS))
    by_load = [
        [name, *(f"{loads.at(name, factor).attainment:.1%}" for factor in CURVE_LOADS)]
        for name in loads.policies
    ]
    by_class = [
        [name, *(_classes(loads, loads.at(name, factor)) for factor in CURVE_LOADS)]
        for name in loads.policies
    ]
    by_length = [
        [f"{name} at {factor:g}×", *_deciles(loads.at(name, factor))]
        for factor in CURVE_LOADS
        if factor >= 1.0
        for name in loads.policies
    ]
    classes = ", ".join(name for name, *_ in targets_of(loads.case))
    seeds = len(loads.points[0].rows)
    longest = max((len(row) for row in by_length), default=1)
    return [
        f"{loads.case.name}, multiples of {loads.knee:.2f} requests per second (the 90 % goodput of"
        f" `{OURS}`), means over {seeds} seeds. Share kept:",
        table(head, by_load),
        f"By class, in percent ({classes}):",
        table(head, by_class),
        "By length of the prompt, tenths from the shortest, in percent:",
        table(("policy", *(str(i) for i in range(1, longest))), by_length),
    ]


def binding_table(bindings: Sequence[Binding]) -> str:
    """Return who missed what, and what bound the steps, a row per case and policy."""
    rows = []
    for each in bindings:
        name = each.case.name
        if isinstance(each.loads, Missing):
            rows.append([name, "–", "–", "–", "–", "–", str(each.loads)])
            continue
        classes = [label for label, *_ in targets_of(each.case)]
        rows += [
            [
                name,
                f"{point.rate:.2f}/s",
                f"`{point.policy}`",
                _share(each.kept(point)),
                _causes(each.misses(point)),
                "; ".join(f"{label} {_causes(each.misses(point, label))}" for label in classes),
                ", ".join(
                    f"{binding_word(label)} {percent(steps)} ({percent(time)})"
                    for label, steps, time in bound(point)
                ),
            ]
            for point in each.points
        ]
    words = ", ".join(CAUSE_WORDS[cause] for cause in _CAUSES)
    head = ("case", "rate", "policy", "kept", f"missed, %: {words}", "by class")
    return table((*head, "bound most steps (share of their time)"), rows)


def workloads_table(cases: Sequence[Case], lasts_s: Mapping[str, float]) -> str:
    """Return what each case is made of; `lasts_s` is by case how long it lasts at our goodput."""
    rows = []
    for case in cases:
        source = case.scene.source
        promised = ", ".join(
            f"{name} {ttft_s:g} s / {tpot_s * 1000.0:g} ms"
            for name, ttft_s, tpot_s in targets_of(case)
        )
        total = sum(share for _, share in source.mix)
        mix = "/".join(f"{100.0 * share / total:.0f}" for _, share in source.mix)
        mix += " by length" if source.is_by_length else ""
        if source.trace is None:
            mix = "in turn, 40 s each: the first alone, then 60/40"
        rate = "–" if source.trace is None else f"{case.base_rate:.2f}/s"
        lasts = f"{lasts_s[case.name]:.0f} s" if case.name in lasts_s else "–"
        if source.trace is None:
            # A generator draws more requests in the same time.
            lasts = f"{case.scene.workload(1.0, 0).duration_s:.0f} s"
        rows.append([case.name, str(case.num_requests), rate, lasts, promised, mix])
    head = ("case", "requests", "own rate", "lasts, at our 90 % goodput", "promised")
    return table((*head, "shares of classes, %"), rows)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _causes(misses: Mapping[str, float] | None) -> str:
    if misses is None:
        return "–"
    return " / ".join(f"{100.0 * misses.get(cause, 0.0):.1f}" for cause in _CAUSES)


def _at(curve: Curve, level: float) -> str:
    return shown(curve.goodput(level), curve.goodput_by_seed(level))


def _classes(loads: Loads, point: Point) -> str:
    return " / ".join(
        f"{100.0 * (1.0 - point.mean(missed_of(name))):.0f}" for name, *_ in targets_of(loads.case)
    )


def _deciles(point: Point) -> list[str]:
    groups = [row.measures["deciles"] for row in point.rows]
    num = min(len(each) for each in groups)
    return [
        f"{100.0 * statistics.fmean(each[i]['attainment'] for each in groups):.0f}"
        for i in range(num)
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000.0:.0f} ms"
