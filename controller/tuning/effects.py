"""What trials tell of single knobs: those in which one alone was not as shipped.

Owns the comparison with the shipped defaults on the same scenes. Must not simulate.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from controller.tuning.influence import Effect, by_gain
from controller.tuning.objective import Outcome, overstepped
from controller.tuning.trial import Trial


def effects_alone(trials: Sequence[Trial]) -> tuple[Effect, ...]:
    """Return what each trial gained that moved one knob from trial 0, the largest gains first.

    A trial that was given up early is compared on the scenes that it did; a failed one tells
    nothing.
    """
    first = trials[0]
    effects = []
    for trial in trials[1:]:
        moved = moved_knobs(trial.point, first.point)
        if len(moved) == 1 and trial.score is not None and trial.outcomes:
            usual = first.outcomes[: len(trial.outcomes)]
            value = float(trial.point[moved[0]])
            effects.append(
                Effect(
                    moved[0],
                    value,
                    gain=trial.score - kept(usual),
                    kept=kept(trial.outcomes) - kept(usual),
                    guards=tuple(overstepped(trial.outcomes, usual)),
                )
            )
    return by_gain(effects)


def moved_knobs(point: Mapping[str, float], first: Mapping[str, float]) -> list[str]:
    """Return the knobs in which two points differ."""
    return [name for name, value in point.items() if value != first[name]]


def kept(outcomes: Sequence[Outcome]) -> float:
    """Return the share of promises that was kept, by weight, over scenes."""
    return statistics.fmean(each.attainment for each in outcomes)
