"""`Influence`: which knobs matter, each moved alone, and which of the changes that were found.

Owns what is kept of it in a profile. Must not simulate, nor import Optuna: servers read profiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Scores that differ by less are the same: what is left of sums in another order.
_TIE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Effect:
    """What a knob at `value` did on the tuning part; 0.01 is a point.

    `gain` is of the score, `kept` of the promises by weight alone: the rest of the gain is what
    the guards found, and `guards` names those that the worse side of the two oversteps.
    """

    knob: str
    value: float
    gain: float
    kept: float
    guards: tuple[str, ...] = ()

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


def by_gain(effects: Sequence[Effect]) -> tuple[Effect, ...]:
    """Return effects with the largest gain first."""
    return tuple(sorted(effects, key=lambda each: -each.gain))
