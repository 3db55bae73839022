"""Goodput of every policy on a case: G1 and G1b.

Owns who is compared with whom, at which levels, and which setting is each one's best. Must not know
how a run is made or a report looks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from controller.bench.goals_cases import Case
from controller.bench.goals_ladder import Attain, Curve, Race, Span, rate_of, rung_near, walk
from controller.bench.goals_runs import Missing, Runs
from controller.bench.goals_verdicts import Check, goodput_ratio, percent
from controller.simulation.sweep import SweepRow, SweepTask, search_budget

OURS: Final = "slo"
A_DEFAULT: Final = "fcfs-512"
STATIC_FAMILIES: Final = ("fcfs", "edf", "edf-shed")
# Baselines with a number of their own: published or default, and some around it.
# Of slack-greedy the share of the slack, and milliseconds per remaining token in a prompt's key.
_SLACK_NUMBERS: Final = tuple(f"{share}:{ms}" for share in ("1.2", "1", "0.8") for ms in (8, 0.1))
VARIANTS: Final = {
    "slack-greedy": tuple(f"slack-greedy:{each}" for each in _SLACK_NUMBERS),
    "slack-greedy-even": tuple(f"slack-greedy-even:{each}" for each in _SLACK_NUMBERS),
    "smallest-feasible": (
        "smallest-feasible:64",
        "smallest-feasible:256",
        "smallest-feasible:1024",
    ),
}
BUDGETS: Final = (128, 256, 512, 1024, 2048, 4096, 8192)
# Two of a kind, of which the better one counts: started prompts can be passed, or not.
_KINDS: Final = {"edf": ("edf", "edf-merged")}
KNEE: Final = 0.9
STEADY_LEVELS: Final = (0.9, 0.99)
CHANGING_LEVELS: Final = (0.9, 0.98)
# Two budgets that fail at the same rung within so much: the seeds decide.
_NEAR: Final = 0.01
# Where a search begins, as a share of our own goodput: nobody else sheds load.
_START: Final = {"edf-shed": 1.0}
_START_OTHERS: Final = 0.6
# Where one seed in a hundred requests decides, a setting is chosen with more of them.
_STRICT_LEVEL: Final = 0.95
_STRICT_SEEDS: Final = 3
# No goal speaks of the others beyond the first level.
_EVERY_LEVEL: Final = ("edf", "edf-shed")
_G1: Final = {
    0.9: (("edf", 1.6), ("slack-greedy", 1.8), ("slack-greedy-even", 1.8), ("fcfs", 1.9)),
    0.99: (("edf", 1.3),),
}
_G1B: Final = "edf-shed"
# Baselines that a goal names.
_NAMED: Final = {family for goals in _G1.values() for family, _ in goals} | {_G1B}


@dataclass(frozen=True, slots=True)
class Best:
    """A baseline at its best on a case, for one level.

    `tried` holds the score of every setting: the rung's rate at which it first failed with the
    scouting seeds, and its attainment there. `others` are settings that came near.
    """

    family: str
    level: float
    curve: Curve
    others: tuple[Curve, ...]
    tried: dict[str, tuple[float, float]]

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "family": self.family,
            "level": self.level,
            "best": self.curve.to_json(),
            "others": [each.to_json() for each in self.others],
            "tried": {name: list(score) for name, score in self.tried.items()},
        }


@dataclass(frozen=True, slots=True)
class CaseGoodput:
    """The goodputs of one case: ours, and of every baseline by (family, level).

    `planning` is, by policy, the real time that a plan took over the virtual time of a step: a
    simulation does not wait for it.
    """

    case: Case
    levels: tuple[float, ...]
    ours: Curve | Missing
    baselines: dict[tuple[str, float], Best | Missing]
    planning: dict[str, float] = field(default_factory=dict)

    @property
    def knee(self) -> float | None:
        """The 90 % goodput of our planner in requests per second; None if there is none."""
        return None if isinstance(self.ours, Missing) else self.ours.goodput(KNEE).rate

    def best(self, family: str, level: float = KNEE) -> Best | None:
        """Return that baseline at its best; None if it was not measured."""
        found = self.baselines.get((family, level))
        return found if isinstance(found, Best) else None

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "case": self.case.name,
            "num_requests": self.case.num_requests,
            "base_rate": self.case.base_rate,
            "ours": self.ours if isinstance(self.ours, Missing) else self.ours.to_json(),
            "baselines": [
                {"family": family, "level": level, "missing": found}
                if isinstance(found, Missing)
                else found.to_json()
                for (family, level), found in self.baselines.items()
            ],
            "planning": self.planning,
        }


def _attainment(row: SweepRow) -> float:
    return row.attainment


def attain_on(case: Case, runs: Runs, number: Callable[[SweepRow], float] = _attainment) -> Attain:
    """Return what answers with the attainment of a policy on that case, or another number."""

    def attain(policy: str, rung: int, seeds: Sequence[int]) -> list[float]:
        load = case.load(rate_of(rung))
        tasks = [SweepTask(policy, load, seed) for seed in seeds]
        label = f"{case.name}: {policy}"
        return [number(row) for row in runs.rows(case.scene, tasks, label)]

    return attain


def measure_goodput(
    cases: Sequence[Case],
    runs: Runs,
    seeds: Sequence[int],
    *,
    families: Sequence[str],
    levels: Sequence[float],
) -> list[CaseGoodput]:
    """Return the goodputs of our planner and of each family's best, case by case.

    Families are those of `STATIC_FAMILIES` and `VARIANTS`, and `A_DEFAULT`; only `edf` and
    `edf-shed` are measured beyond the first level.
    """
    curves = runs.together([partial(_ours, case, runs, seeds, levels) for case in cases])
    jobs: list[tuple[int, str, float, Callable[[], Best]]] = []
    for index, (case, ours) in enumerate(zip(cases, curves, strict=True)):
        for family in families:
            for level in levels if family in _EVERY_LEVEL else levels[:1]:
                # Where ours holds a level nowhere, only a baseline that a goal names can tell more.
                is_reached = not isinstance(ours, Missing) and ours.goodput(level).rate is not None
                if isinstance(ours, Missing) or not (is_reached or family in _NAMED):
                    continue
                job = partial(best_of, case, runs, seeds, family, level, ours)
                jobs.append((index, family, level, job))
    found = runs.together([job for *_, job in jobs])
    by_case: list[dict[tuple[str, float], Best | Missing]] = [{} for _ in cases]
    for (index, family, level, _), best in zip(jobs, found, strict=True):
        by_case[index][family, level] = best
    return [
        CaseGoodput(
            case, tuple(levels), ours, baselines, _planning(case, runs, ours, baselines.values())
        )
        for case, ours, baselines in zip(cases, curves, by_case, strict=True)
    ]


def _planning(
    case: Case, runs: Runs, ours: Curve | Missing, others: Iterable[Best | Missing]
) -> dict[str, float]:
    """Return planning time over step time, by policy, over the runs of its curve."""
    curves = [] if isinstance(ours, Missing) else [ours]
    curves += [each.curve for each in others if isinstance(each, Best)]
    found = {}
    for curve in curves:
        tasks = [
            SweepTask(curve.policy, case.load(rate_of(rung)), seed)
            for rung, _ in curve.points
            for seed in curve.seeds
        ]
        measures = [row.measures for row in runs.rows(case.scene, tasks)]
        steps_s = sum(each["mean_step_s"] for each in measures)
        planning_s = sum(each["planner_us_mean"] * 1e-6 for each in measures)
        found[curve.policy] = planning_s / steps_s if steps_s else 0.0
    return found


def _ours(case: Case, runs: Runs, seeds: Sequence[int], levels: Sequence[float]) -> Curve:
    start = rung_near(case.start_rate)
    return walk(attain_on(case, runs), OURS, levels, seeds, start, Span.around(start))


def best_of(
    case: Case,
    runs: Runs,
    seeds: Sequence[int],
    family: str,
    level: float,
    ours: Curve | None = None,
) -> Best:
    """Find the best setting of a baseline with the first seed (three where the level is strict),
    then walk with all of them.

    A setting that comes near is walked too, and the seeds' mean decides. `ours` tells where to
    begin.
    """
    attain = attain_on(case, runs)
    span = Span.around(rung_near(case.start_rate))
    rate = None if ours is None else ours.goodput(level).rate
    guess = case.start_rate if rate is None else rate
    start = rung_near(guess * _START.get(family, _START_OTHERS))
    scouts = seeds[: _STRICT_SEEDS if level > _STRICT_LEVEL else 1]
    race = Race(attain, level, scouts, start, span)
    if family in STATIC_FAMILIES:
        for kind in _KINDS.get(family, (family,)):
            search_budget(kind, race, coarse=BUDGETS)
    else:
        race(VARIANTS.get(family, (family,)))
    ranked = sorted(race.scores, key=lambda name: race.scores[name], reverse=True)
    curves = []
    for name in ranked[:2]:
        rung, value = race.scores[name]
        best_rung, best_value = race.scores[ranked[0]]
        if rung == best_rung and value >= best_value - _NEAR:
            curves.append(walk(attain, name, (level,), seeds, int(rung), span))
    curves.sort(key=lambda curve: _order(curve, level), reverse=True)
    tried = {name: (rate_of(int(rung)), value) for name, (rung, value) in race.scores.items()}
    return Best(family, level, curves[0], tuple(curves[1:]), tried)


def _order(curve: Curve, level: float) -> tuple[float, float]:
    mean = statistics.fmean(value for _, values in curve.points for value in values)
    return curve.goodput(level).rate or 0.0, mean


def g1_checks(cases: Sequence[CaseGoodput]) -> list[Check]:
    """Return the checks of G1: goodput over each baseline's best."""
    return [
        _ratio_check(
            "G1", f"{percent(level)} goodput over {family} at its best", each, family, level, w
        )
        for level, goals in _G1.items()
        for family, w in goals
        for each in cases
    ]


def g1b_checks(steady: Sequence[CaseGoodput], changing: Sequence[CaseGoodput]) -> list[Check]:
    """Return the checks of G1b: goodput over the best static budget with our admission."""
    claim = "goodput over the best static budget with our admission"
    return [
        _ratio_check("G1b", f"{percent(level)} {claim}, {what}", each, _G1B, level, wanted)
        for what, cases, levels, wanted in (
            ("steady", steady, STEADY_LEVELS, 1.0),
            ("changing", changing, CHANGING_LEVELS, 1.15),
        )
        for level in levels
        for each in cases
    ]


def _ratio_check(
    goal: str, claim: str, found: CaseGoodput, family: str, level: float, wanted: float
) -> Check:
    measured, note, is_open = None, "", False
    best = found.baselines.get((family, level))
    if isinstance(found.ours, Missing):
        note = str(found.ours)
    elif best is None or isinstance(best, Missing):
        note = "not measured" if best is None else str(best)
    else:
        ours, policy = found.ours, best.curve.policy
        measured, note = goodput_ratio(ours, best.curve, level), policy
        is_open = measured is None
        if is_open:
            note = f"neither holds {percent(level)} at any rate that was tried ({policy})"
        elif ours.goodput(level).rate is None:
            note = f"{policy}; ours holds {percent(level)} at no rate that was tried"
        if goal == "G1b" and {OURS, policy} <= found.planning.keys():
            mine, other = found.planning[OURS], found.planning[policy]
            note += f"; planning is {mine:.1%} of a step, not waited for ({policy}: {other:.1%})"
    return Check(goal, claim, found.case.name, wanted, True, "×", measured, note, is_open=is_open)
