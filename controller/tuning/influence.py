"""`Influence`: which knobs matter, each moved alone, and which of the changes that were found.

Owns both tables. Must not simulate, nor import Optuna: servers read profiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from controller.tuning.trial import Trial

# Scores that differ by less are the same: what is left of sums in another order.
_TIE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Effect:
    """What a knob at `value` gained on the tuning part; 0.01 of the score is a point."""

    knob: str
    value: float
    gain: float

    @property
    def is_none(self) -> bool:
        """Whether the score was the same with and without."""
        return abs(self.gain) <= _TIE


@dataclass(frozen=True, slots=True)
class Influence:
    """What was learnt of single knobs on the tuning part, the largest gains first.

    `alone` are trials in which one knob alone was not as shipped, against the shipped defaults.
    `found` are the changes of a profile, against the same settings with that one as shipped.
    """

    alone: tuple[Effect, ...] = ()
    found: tuple[Effect, ...] = ()


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
            gain = trial.score - statistics.fmean(each.attainment for each in usual)
            effects.append(Effect(moved[0], float(trial.point[moved[0]]), gain))
    return by_gain(effects)


def moved_knobs(point: Mapping[str, float], first: Mapping[str, float]) -> list[str]:
    """Return the knobs in which two points differ."""
    return [name for name, value in point.items() if value != first[name]]


def by_gain(effects: Sequence[Effect]) -> tuple[Effect, ...]:
    """Return effects with the largest gain first."""
    return tuple(sorted(effects, key=lambda each: -each.gain))
