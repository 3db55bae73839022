"""The study of the goals: does the controller keep its promises, in the simulator?

Owns which parts there are and in which order they run. Must not print or write a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from controller.bench.goals_binding import BINDING_FAMILY, Binding, measure_bindings
from controller.bench.goals_calm import Calm, g2_checks, measure_calm
from controller.bench.goals_cases import (
    Case,
    Inputs,
    Kind,
    changing_cases,
    one_class_cases,
    steady_cases,
)
from controller.bench.goals_goodput import (
    A_DEFAULT,
    CHANGING_LEVELS,
    OURS,
    STATIC_FAMILIES,
    STEADY_LEVELS,
    VARIANTS,
    CaseGoodput,
    g1_checks,
    g1b_checks,
    measure_goodput,
)
from controller.bench.goals_overload import Overload, g3_checks, measure_overload
from controller.bench.goals_promises import (
    Loads,
    g6_checks,
    measure_curve,
)
from controller.bench.goals_runs import Missing, Runs
from controller.bench.goals_verdicts import Check
from controller.policy.settings import PolicyConfig

GOALS: Final = ("g1", "g1b", "g2", "g3", "g6", "curve", "binds")
STUDY_FORMAT: Final = 2
_FAMILIES: Final = {
    "g1": ("edf", "fcfs", "slack-greedy", "slack-greedy-even", "smallest-feasible", A_DEFAULT),
    "g1b": ("edf-shed",),
    "g3": ("fcfs",),
    "curve": ("edf-shed", "edf", "fcfs", *VARIANTS, A_DEFAULT),
    "binds": (BINDING_FAMILY,),
}


@dataclass(frozen=True, slots=True)
class Study:
    """What is known so far.

    `goals` names the parts that were asked for. A part that is empty was not asked for, has no
    traffic, or is still to come (`is_complete` False, as where results are absent).
    """

    inputs: Inputs
    seeds: tuple[int, ...]
    goals: tuple[str, ...]
    steady: tuple[CaseGoodput, ...] = ()
    changing: tuple[CaseGoodput, ...] = ()
    calm: tuple[tuple[Case, Calm | Missing], ...] = ()
    overload: tuple[tuple[Case, Overload | Missing], ...] = ()
    curve: Loads | Missing | None = None
    bindings: tuple[Binding, ...] = ()
    checks: tuple[Check, ...] = ()
    num_runs: int = 0
    is_complete: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values; files by their name alone."""
        files = (self.inputs.azure_code, self.inputs.azure_conv, self.inputs.mooncake)
        return {
            "format": STUDY_FORMAT,
            "is_complete": self.is_complete,
            "traces": [None if path is None else path.name for path in files],
            "hardware": [each.to_json() for each in self.inputs.hardware],
            "num_requests": self.inputs.num_requests,
            "start_s": self.inputs.start_s,
            "seeds": list(self.seeds),
            "goals": list(self.goals),
            "num_runs": self.num_runs,
            "checks": [each.to_json() for each in self.checks],
            "steady": [each.to_json() for each in self.steady],
            "changing": [each.to_json() for each in self.changing],
            "calm": _pairs(self.calm),
            "overload": _pairs(self.overload),
            "curve": self.curve.to_json() if isinstance(self.curve, Loads) else self.curve,
            "bindings": [each.to_json() for each in self.bindings],
        }


def run_study(
    inputs: Inputs, runs: Runs, seeds: Sequence[int], goals: Sequence[str] = GOALS
) -> Iterator[Study]:
    """Run the parts in turn; yield what is known after each of them, the last one complete.

    ValueError (also of a trace that cannot be read) before anything is simulated.
    """
    study = Study(inputs, tuple(seeds), tuple(each for each in GOALS if each in goals))
    steady = steady_cases(inputs)
    changing = changing_cases(inputs) if {"g1b", "binds"} & set(goals) else []
    one_class = one_class_cases(inputs) if "g2" in goals else []
    if not (steady or changing or one_class):
        raise ValueError("no trace is given, and no goal was asked for that needs none")
    if steady and set(goals) - {"g2"}:
        wanted = {family for goal in goals for family in _FAMILIES.get(goal, ())}
        families = [each for each in (*STATIC_FAMILIES, *VARIANTS, A_DEFAULT) if each in wanted]
        found = measure_goodput(steady, runs, seeds, families=families, levels=STEADY_LEVELS)
        study = replace(study, steady=tuple(found))
        yield _judged(study, runs)
    if changing:
        found = measure_goodput(
            changing, runs, seeds, families=("edf-shed",), levels=CHANGING_LEVELS
        )
        study = replace(study, changing=tuple(found))
        yield _judged(study, runs)
    if one_class:
        calm = runs.together([partial(measure_calm, case, runs, seeds) for case in one_class])
        study = replace(study, calm=tuple(zip(one_class, calm, strict=True)))
        yield _judged(study, runs)
    if "g3" in goals and steady:
        jobs = [partial(measure_overload, each, runs, seeds) for each in study.steady]
        overload = runs.together(jobs)
        study = replace(study, overload=tuple(zip(steady, overload, strict=True)))
        yield _judged(study, runs)
    if "curve" in goals and steady:
        chosen = next((e for e in study.steady if e.case.kind is Kind.AZURE_CONV), study.steady[0])
        study = replace(
            study, curve=runs.together([partial(measure_curve, chosen, runs, seeds)])[0]
        )
    if "binds" in goals:
        yield _judged(study, runs)
        bindings = measure_bindings(study.steady, study.changing, runs, seeds)
        study = replace(study, bindings=tuple(bindings))
    yield replace(_judged(study, runs), is_complete=runs.num_absent == 0)


def _judged(study: Study, runs: Runs) -> Study:
    """Hold what was measured so far against the goals."""
    goals, checks = study.goals, []
    if "g1" in goals:
        checks += g1_checks(study.steady)
    if "g1b" in goals:
        checks += g1b_checks(study.steady, study.changing)
    checks += g2_checks(study.calm)
    checks += g3_checks(study.overload)
    if "g6" in goals:
        rows = list(runs.policy_rows.get(OURS, {}).values())
        checks += g6_checks(rows, PolicyConfig().max_overtaken)
    return replace(study, checks=tuple(checks), num_runs=runs.num_done)


def _pairs(
    pairs: Sequence[tuple[Case, Calm | Missing]] | Sequence[tuple[Case, Overload | Missing]],
) -> list[dict[str, Any]]:
    return [
        {"case": case.name, "missing": found} if isinstance(found, Missing) else found.to_json()
        for case, found in pairs
    ]
