"""`RecordedNoise`: what steps of a real machine took over what its formula says, in their order.

Owns the factors, their JSON form and how stretches of them are drawn. Must not know a formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from costmodel.features import Regime
from costmodel.fields import SnapshotError, read_numbers

MIN_STEPS: Final = 100
"""Fewer steps do not tell how a machine's speed comes and goes."""
MAX_STEPS: Final = 8192
"""The last so many are kept: an hour's worth on a slow machine, minutes on a quick one."""
STRETCH_STEPS: Final = 128
"""Steps from one drawn instant to the next: longer than most slow stretches last."""

# Fewer of a regime are no record of it: one slow step would be all that it ever takes.
_FEW_STEPS: Final = 20
# A step that took a thousand times what it should is as good as one that never ends.
_MAX_FACTOR: Final = 1000.0
_DIGITS: Final = 4
# One letter per step in JSON.
_LETTERS: Final = {regime.value[0]: regime for regime in Regime}


@dataclass(frozen=True, slots=True)
class RecordedNoise:
    """Factors of steps in the order in which they were taken, and each one's regime.

    Independent draws cannot show what a neighbour on the same cores does: it slows many steps in a
    row, and some kinds of work more than others. ValueError names what is wrong.
    """

    regimes: tuple[Regime, ...]
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check that there is a positive factor for each step."""
        if len(self.regimes) != len(self.factors) or not self.factors:
            raise ValueError(
                f"recorded must hold a factor for each step, and at least one:"
                f" got {len(self.factors)} for {len(self.regimes)}"
            )
        for index, factor in enumerate(self.factors):
            if not 0.0 < factor <= _MAX_FACTOR:
                raise ValueError(
                    f"recorded.factors[{index}] must be in (0, {_MAX_FACTOR:g}], got {factor}"
                )

    @classmethod
    def of(cls, steps: Iterable[tuple[Regime, float, float]]) -> RecordedNoise | None:
        """Return the noise of steps (regime, seconds, seconds by the formula), oldest first.

        The last `MAX_STEPS` count; None below `MIN_STEPS`. Seconds must be positive.
        """
        found = [
            (regime, min(_MAX_FACTOR, max(10.0**-_DIGITS, round(seconds / formula_s, _DIGITS))))
            for regime, seconds, formula_s in steps
        ][-MAX_STEPS:]
        if len(found) < MIN_STEPS:
            return None
        return cls(tuple(regime for regime, _ in found), tuple(factor for _, factor in found))

    def of_regime(self, regime: Regime) -> tuple[float, ...]:
        """Return the factors of a regime's steps, in order; those of all where it has too few."""
        own = tuple(
            factor
            for factor, each in zip(self.factors, self.regimes, strict=True)
            if each is regime
        )
        return own if len(own) >= _FEW_STEPS else self.factors

    def quantile(self, regime: Regime, share: float) -> float:
        """Return the factor that `share` of such a regime's steps do not exceed."""
        return float(np.quantile(self.of_regime(regime), share, method="higher"))

    def to_json(self) -> dict[str, Any]:
        """Return the noise as JSON values: a letter per step, and its factor."""
        letters = "".join(regime.value[0] for regime in self.regimes)
        return {"regimes": letters, "factors": list(self.factors)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RecordedNoise:
        """Rebuild it; ValueError names the field that is wrong."""
        letters = document.get("regimes")
        if not isinstance(letters, str) or not set(letters) <= set(_LETTERS):
            raise ValueError(f"recorded.regimes must be a text of the letters {''.join(_LETTERS)}")
        try:
            factors = read_numbers(document, "factors", "recorded", MAX_STEPS)
        except SnapshotError as error:
            raise ValueError(str(error)) from error
        return cls(tuple(_LETTERS[letter] for letter in letters), tuple(factors))


class Stretches:
    """Draws factors from stretches of a record: a block bootstrap (Künsch, "The jackknife and the
    bootstrap for general stationary observations", 1989).

    Every `STRETCH_STEPS` steps a place in the record is drawn, as a share of it, and from there on
    each step has the next factor of its own regime, round the end. The share is taken of each
    regime's own steps: the next one after an instant would mostly be one that comes after a pause.
    A regime of which the record holds few has the factors of all.
    """

    def __init__(self, noise: RecordedNoise, rng: np.random.Generator) -> None:
        self._rng = rng
        self._own = {regime: noise.of_regime(regime) for regime in Regime}
        self._next = dict.fromkeys(Regime, 0)
        self._num_left = 0

    def factor(self, regime: Regime) -> float:
        """Return the factor of the next step."""
        if self._num_left == 0:
            share = float(self._rng.random())
            self._next = {each: int(share * len(own)) for each, own in self._own.items()}
            self._num_left = STRETCH_STEPS
        self._num_left -= 1
        own = self._own[regime]
        place = self._next[regime] % len(own)
        self._next[regime] = place + 1
        return own[place]
