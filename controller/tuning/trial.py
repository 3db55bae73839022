"""`Trial`: a point that was tried, what came of it, and which of several is the best.

Must not know who keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from controller.tuning.objective import Outcome

# Scores that differ by less are the same: what is left of sums in another order.
_TIE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Trial:
    """A point that was tried. `score` is None where it failed, for `reason`.

    `number` counts from 0, the shipped defaults. `outcomes` are those of the scenes that were
    simulated: not all, where it was given up early. `ended_at_ms` is epoch milliseconds.
    """

    number: int
    state: str
    point: Mapping[str, float]
    score: float | None
    outcomes: tuple[Outcome, ...]
    reason: str | None
    ended_at_ms: int


def best_trial(trials: Sequence[Trial]) -> Trial:
    """Return the complete trial with the highest score; the earlier of equals, so the defaults."""
    best = trials[0]
    for trial in trials[1:]:
        if trial.state == "complete" and (trial.score or 0.0) > (best.score or 0.0) + _TIE:
            best = trial
    return best
