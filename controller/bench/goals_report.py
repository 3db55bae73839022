"""The study of the goals as text: verdicts for a terminal, a page of Markdown.

Owns tables and sentences. Must not judge: verdicts are those of the checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table

from controller.bench.goals import Study
from controller.bench.goals_binding import BINDING_SEEDS, OURS_ORACLE, oracle_gain
from controller.bench.goals_cases import Case, targets_of
from controller.bench.goals_report_tables import (
    binding_table,
    calm_table,
    curve_tables,
    goodput_table,
    overload_table,
    table,
    workloads_table,
)
from controller.bench.goals_verdicts import Check, Verdict, percent, shown, wanted_text

_TITLES = {
    "G1": "Goodput on mixed classes",
    "G1b": "Goodput against the best static budget with our admission",
    "G2": "Calm streams: one class at 60 to 80 % load",
    "G3": "Overload",
    "G6": "Bounds",
}
_WORDS = {
    Verdict.MET: "met",
    Verdict.MISSED: "**missed**",
    Verdict.OPEN: "open",
    Verdict.MISSING: "not measured",
    Verdict.REPORTED: "no goal",
}
_COLORS = {
    Verdict.MET: "green",
    Verdict.MISSED: "red",
    Verdict.OPEN: "yellow",
    Verdict.MISSING: "dim",
    Verdict.REPORTED: "dim",
}

# A backlog takes in that much work before it shows in attainment.
_LEAST_WAITS = 3


def verdict_of(checks: Iterable[Check]) -> Verdict:
    """Return the verdict of a goal: the worst of its checks, a missed one first of all."""
    found = {check.verdict for check in checks} - {Verdict.REPORTED}
    order = (Verdict.MISSED, Verdict.MISSING, Verdict.OPEN)
    if not found:
        return Verdict.MISSING
    return next((each for each in order if each in found), Verdict.MET)


def render_verdicts(study: Study) -> Table:
    """Return the verdict table for a terminal."""
    title = "Goals in the simulator" + ("" if study.is_complete else " (so far)")
    found = Table(title=title)
    for column in ("goal", "what", "case", "wanted", "measured", "verdict", "note"):
        found.add_column(column)
    for check in study.checks:
        color = _COLORS[check.verdict]
        found.add_row(
            check.goal,
            check.claim,
            check.case,
            wanted_text(check),
            shown(check.measured, check.unit),
            f"[{color}]{check.verdict.value}[/{color}]",
            check.note,
        )
    return found


def render_markdown(study: Study, commands: Sequence[str]) -> str:
    """Return the page: what was measured, a paragraph and tables per goal, the commands."""
    parts = [_introduction(study)]
    for goal, title in _TITLES.items():
        checks = [check for check in study.checks if check.goal == goal]
        if goal.lower() not in study.goals:
            continue
        parts.append(f"## {goal}: {title}\n\n{paragraph(checks)}")
        if checks:
            parts.append(_checks_table(checks))
        parts += _details(goal, study)
    if study.curve is not None:
        parts += ["## Load", *curve_tables(study.curve)]
    if "binds" in study.goals:
        parts += ["## What binds", *_bindings(study)]
    parts += ["## Workloads", workloads_table(_cases(study), _lasts(study)), _short(study)]
    parts.append(_method())
    code = "\n".join(commands)
    parts.append(f"## Commands\n\n```sh\n{code}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def paragraph(checks: Sequence[Check]) -> str:
    """Return one paragraph on a goal: its verdict, in how many cases, and by how much it failed."""
    if not checks:
        return "Not measured."
    verdict = verdict_of(checks)
    sentences = [f"Verdict: **{verdict.value}**."]
    sentences += [
        _sentence([check for check in checks if check.claim == claim])
        for claim in dict.fromkeys(check.claim for check in checks)
    ]
    return " ".join(sentences)


def _sentence(checks: Sequence[Check]) -> str:
    """Say of one claim in how many cases it holds, and where it is furthest from the goal."""
    if checks[0].wanted is None:
        return _report(checks)
    met = sum(check.verdict is Verdict.MET for check in checks)
    known = [check for check in checks if check.margin is not None]
    first = checks[0]
    text = f"{first.claim[0].upper()}{first.claim[1:]}, wanted {wanted_text(first)}:"
    text += f" met in {met} of {len(checks)} {'case' if len(checks) == 1 else 'cases'}"
    if not known:
        return f"{text}, {first.verdict.value} ({first.note})."
    worst = min(known, key=_distance)
    found = shown(worst.measured, worst.unit)
    if worst.verdict is Verdict.MET:
        return f"{text}, at worst {found} ({worst.case})."
    margin = worst.margin or 0.0
    if margin >= 0.0 and worst.verdict is Verdict.MISSED:
        return f"{text}; {found} at {worst.case}, but at unequal attainment ({worst.note})."
    amount = f"{percent(abs(margin))} {'short of' if first.is_least else 'above'} the goal"
    if not first.is_least and margin < -1.0:
        amount = f"{1.0 - margin:.1f} times the goal"
    if first.wanted == 0.0:
        amount = f"{-margin:g} above the goal"
    if worst.verdict is Verdict.OPEN:
        amount = "a bound that does not tell"
    return f"{text}; furthest away {worst.case} with {found}, {amount}."


def _report(checks: Sequence[Check]) -> str:
    """Say what a number is that no goal speaks of."""
    claim = checks[0].claim
    found = "; ".join(f"{shown(each.measured, each.unit)} ({each.case})" for each in checks)
    return f"{claim[0].upper()}{claim[1:]} (no goal): {found}."


def _distance(check: Check) -> tuple[int, float]:
    order = (Verdict.MISSED, Verdict.OPEN, Verdict.MET, Verdict.MISSING, Verdict.REPORTED)
    margin = check.margin
    return order.index(check.verdict), 0.0 if margin is None else margin


def _introduction(study: Study) -> str:
    tally = {each: sum(c.verdict is each for c in study.checks) for each in Verdict}
    counts = ", ".join(f"{number} {each.value}" for each, number in tally.items() if number)
    lines = [
        "# Results",
        "What the controller keeps of its promises on recorded traffic, in the simulator: the"
        " production loop, planner and cost model on virtual time ([simulation.md](simulation.md))."
        f" {len(study.seeds)} seeds over the same arrivals, {study.num_runs} simulations. Numbers"
        " in the checks are medians over seeds, with the least and the greatest in brackets; rates"
        " are offered requests per second, and whoever is refused counts as missed.",
    ]
    absent = [
        name
        for name, path in (
            ("Azure code", study.inputs.azure_code),
            ("Azure conversations", study.inputs.azure_conv),
            ("Mooncake conversations", study.inputs.mooncake),
        )
        if path is None
    ]
    if absent:
        lines.append(f"Left out for want of the trace: {', '.join(absent)}.")
    if not study.is_complete:
        lines.append("**The study is not complete.**")
    if study.checks:
        lines.append(f"Of {len(study.checks)} numbers: {counts}.")
    rows = [
        [goal, title, _WORDS[verdict_of(checks)], _count(checks)]
        for goal, title in _TITLES.items()
        if goal.lower() in study.goals
        for checks in [[check for check in study.checks if check.goal == goal]]
    ]
    lines.append(table(("goal", "what", "verdict", "checks met"), rows))
    return "\n\n".join(line for line in lines if line)


def _count(checks: Sequence[Check]) -> str:
    judged = [check for check in checks if check.wanted is not None]
    return f"{sum(check.verdict is Verdict.MET for check in judged)} of {len(judged)}"


def _checks_table(checks: Sequence[Check]) -> str:
    rows = [
        [
            check.claim,
            check.case,
            wanted_text(check),
            shown(check.measured, check.unit),
            _WORDS[check.verdict],
            check.note,
        ]
        for check in checks
    ]
    return table(("what", "case", "wanted", "measured", "verdict", "note"), rows)


def _details(goal: str, study: Study) -> Iterator[str]:
    if goal == "G1" and study.steady:
        yield "Goodput in requests per second, each baseline at its best setting:"
        yield goodput_table(study.steady)
    if goal == "G1b" and study.changing:
        yield "Goodput in requests per second on traffic that changes:"
        yield goodput_table(study.changing)
    if goal == "G2" and study.calm:
        yield calm_table(study.calm)
    if goal == "G3" and study.overload:
        yield (
            "From our 90 % goodput on 20 % chat, 30 % code and 50 % batch, with weights 1000, 30"
            " and 1, to twice as much, means over seeds (the first alone but at 1.5×); then"
            " 50/30/20 with equal weights, at 1.5 times our goodput on that. Weights stand against"
            " prompt lengths: ratios beyond those of the lengths are priorities, and these are."
            " Arrivals last at least 240 s at every rate, and misses are those of the requests"
            " that arrived between a quarter and three quarters of that time. FCFS has the static"
            " budget that misses least at 1.5×:"
        )
        yield overload_table(study.overload)


def _bindings(study: Study) -> Iterator[str]:
    if not study.bindings:
        yield "Not measured."
        return
    yield (
        f"Our planner, the same with an oracle that knows the machine's formula (`{OURS_ORACLE}`:"
        " what prediction can gain at most), and the static budget with our admission that has the"
        f" best 90 % goodput on the case; means over {BINDING_SEEDS} seeds at most. A miss counts"
        " once, by its first cause; by class, of the class's own requests. What bound a step set"
        " the number of its prompt tokens ([control.md](control.md#what-is-recorded)); idle is"
        " nothing: no more was waiting, or wanted."
    )
    titles = (
        "On the first rung above our 90 % goodput, where promises begin to be missed",
        "At 1.5 times our goodput on the mix of G3 with its weights, misses of the middle of a run",
    )
    for is_overload, title in enumerate(titles):
        chosen = [each for each in study.bindings if each.is_overload == bool(is_overload)]
        if not chosen:
            continue
        gain = oracle_gain(chosen)
        text = ""
        if gain is not None:
            mean, least, most = map(_points, gain)
            text = f" An oracle keeps {mean} points more ({least} to {most})."
        yield f"{title}.{text}"
        yield binding_table(chosen)


def _points(share: float) -> str:
    """Return a difference of shares in points, with its sign; none of nothing."""
    points = round(100.0 * share, 1)
    return f"{points:+.1f}" if points else "0.0"


def _cases(study: Study) -> list[Case]:
    return [
        *(each.case for each in (*study.steady, *study.changing)),
        *(case for case, _ in study.calm),
    ]


def _lasts(study: Study) -> dict[str, float]:
    """Return how many seconds the arrivals of a case last at our 90 % goodput, by its name."""
    return {
        each.case.name: each.case.num_requests / each.knee
        for each in study.steady
        if each.knee is not None
    }


def _short(study: Study) -> str:
    """Name the cases whose arrivals at our goodput last less than `_LEAST_WAITS` times the longest
    wait that is promised.
    """
    lasts_s = _lasts(study)
    short = [
        each.case.name
        for each in study.steady
        if lasts_s.get(each.case.name, math.inf)
        < _LEAST_WAITS * max(ttft for _, ttft, _ in targets_of(each.case))
    ]
    if not short:
        return ""
    return (
        f"Too short to tell under G1 and G1b: {'; '.join(short)}. There the arrivals last less than"
        f" {_LEAST_WAITS} times the longest TTFT target, an overload hides in the backlog, and the"
        " goodputs, of all policies, are more than a longer run would show (`--requests`)."
    )


def _method() -> str:
    return (
        "Targets in the table are TTFT / TPOT. Rates are changed by stretching time, so every rate"
        " has the same requests in the same pattern; of traffic that changes, a higher rate draws"
        " more of them. Rates are tried on a ladder whose rungs are 15 % apart, by all policies of"
        " all cases alike: the first seed finds the rungs between which attainment falls below a"
        " level, then all seeds run there, and the goodput is interpolated. Static budgets (128 to"
        " 8192 tokens, then half-way to the neighbours of the best) and the numbers of slack-greedy"
        " (1.2, 1 or 0.8 times the slack, 8 or 0.1 ms per remaining token) and smallest-feasible"
        " are chosen per case and level with the first seed (three of them above 95 %) by the rate"
        " at which they first fail; edf is the better of one whose started prompts go on first and"
        " of edf-merged, where a new prompt may pass them; one that comes within a point is run"
        " with all seeds too, and the better one counts. slack-greedy is as published, its slack"
        " counted before token deadlines that begin at T; slack-greedy-even counts it from the"
        " first token, as promises are judged."
        " Seeds draw classes and the machine's noise; where classes go by length, they do with a"
        " correlation of 0.8. Misses count as equal up to 1.25 times as many, or 0.2 points more."
        " Useful tokens are those computed between the first quarter of the arrivals and the last"
        " for requests that met every target in the end."
    )
