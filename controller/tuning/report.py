"""From a search and its comparison to a profile: what is said of it, and the rows that are kept.

Owns the words and numbers of the verdict. Must not simulate or write.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any, Final

from controller.runtime.tuned_for import TunedFor
from controller.simulation.digits import share
from controller.tuning.effects import effects_alone
from controller.tuning.influence import Influence
from controller.tuning.job import Comparison, Search
from controller.tuning.objective import Outcome
from controller.tuning.profile import BudgetProfile, Judged, Provenance, Spread, Verdict
from controller.tuning.space import DEFAULTS, settings_at
from controller.tuning.task import TuningTask
from controller.tuning.trial import Trial
from store.profiles import TrialRecord

_MEASURES: Final[Mapping[str, Callable[[Outcome], float | None]]] = {
    "attainment": lambda each: each.attainment,
    "useful_tokens_per_s": lambda each: each.useful_tokens_per_s,
    "ttft_p99_s": lambda each: each.ttft_p99_s,
    "tpot_p99_s": lambda each: each.tpot_p99_s,
    "gap_p99_s": lambda each: each.gap_p99_s,
}


def make_profile(
    name: str,
    task: TuningTask,
    search: Search,
    comparison: Comparison,
    *,
    tuned_for: TunedFor,
    seed: int,
    created_at: int,
    study: str | None = None,
    run: str | None = None,
) -> BudgetProfile:
    """Return the profile of what was found; `created_at` is epoch milliseconds UTC."""
    return BudgetProfile(
        name=name,
        settings=search.settings,
        tuned_for=tuned_for,
        provenance=Provenance(
            workload=task.name,
            hardware=task.hardware.name,
            seeds=tuple(scene.seed for scene in task.tuning),
            held_out_seeds=tuple(scene.seed for scene in task.held_out),
            num_trials=len(search.trials),
            trial=search.best.number,
            seed=seed,
            classes=tuple(asdict(each) for each in task.classes),
            versions={name: metadata.version(name) for name in ("paceline", "optuna")},
            created_at=created_at,
            study=study,
            run=run,
        ),
        judged=Judged(
            verdict=comparison.verdict,
            statement=statement(search, comparison),
            before=spreads(comparison.before),
            after=spreads(comparison.after),
            difference=_spread(comparison.differences),
            harms=comparison.harms,
        ),
        influence=Influence(alone=effects_alone(search.trials), found=search.worth),
    )


def statement(search: Search, comparison: Comparison) -> str:
    """Say in a sentence or two what the profile is worth, whatever that is."""
    num_trials, num_scenes = len(search.trials), len(comparison.differences)
    if not search.has_found:
        return (
            f"Nothing better than the shipped defaults was found in {num_trials}"
            f" trial{'' if num_trials == 1 else 's'}:"
            " the profile holds the defaults."
        )
    before = statistics.fmean(each.attainment for each in comparison.before)
    after = statistics.fmean(each.attainment for each in comparison.after)
    difference = _spread(comparison.differences)
    numbers = (
        f"On the held-out part the settings keep {share(after)} of the promises by weight, the"
        f" shipped defaults {share(before)}: {_points(difference.mean)} points,"
        f" {_points(difference.min)} to {_points(difference.max)} over {num_scenes}"
        f" scene{'' if num_scenes == 1 else 's'}."
    )
    if comparison.harms and difference.mean > 0.0:
        harms = ", ".join(f"{name} by {excess:.1%}" for name, excess in comparison.harms.items())
        return f"{numbers} Worse than the defaults all the same: too much is lost in {harms}."
    if comparison.verdict is Verdict.WORSE:
        return f"{numbers} Worse than the defaults: what was found does not carry over."
    if comparison.verdict is Verdict.UNCLEAR:
        if num_scenes == 1:
            return f"{numbers} Not better for sure: one scene does not tell its own uncertainty."
        return f"{numbers} Not better for sure: the difference is within its own uncertainty."
    return numbers


def spreads(outcomes: Sequence[Outcome]) -> dict[str, Spread]:
    """Return every measure over scenes; one that no scene has is left out."""
    found = {
        name: [value for value in map(read, outcomes) if value is not None]
        for name, read in _MEASURES.items()
    }
    for name in sorted({name for each in outcomes for name in each.attainment_by_class}):
        found[f"attainment of {name}"] = [
            each.attainment_by_class[name] for each in outcomes if name in each.attainment_by_class
        ]
    return {name: _spread(values) for name, values in found.items() if values}


def trial_records(study: str, trials: Sequence[Trial]) -> list[TrialRecord]:
    """Return the rows of a study's trials."""
    return [
        TrialRecord(
            study=study,
            trial_no=trial.number,
            at=trial.ended_at_ms,
            state=trial.state,
            score=trial.score,
            settings=settings_of(trial),
            measures={"scenes": [each.to_json() for each in trial.outcomes]},
            reason=trial.reason,
        )
        for trial in trials
    ]


def settings_of(trial: Trial) -> dict[str, Any]:
    """Return every setting that a trial ran with; only the point, where it is no valid one."""
    if trial.number == 0:
        return DEFAULTS.to_json()
    return dict(trial.point) if trial.state == "failed" else settings_at(trial.point).to_json()


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), min(values), max(values))


def _points(share: float) -> str:
    return f"{share * 100:+.1f}"
