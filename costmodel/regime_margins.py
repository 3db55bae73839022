"""The margins of all regimes, and which of them each regime's bounds use.

Owns what regimes that are rarely seen take over from those that are not. Must not know a basis or a
coefficient, or how a margin is steered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from costmodel.features import Regime
from costmodel.fields import read_mapping
from costmodel.margin import PRIOR_MARGIN, ConformalMargin, prior_scale

# A regime with as many scores speaks for itself, and lends its margin to those with fewer.
_ENOUGH_SCORES: Final = 50
_REGIMES: Final = tuple(Regime)


class RegimeMargins:
    """A `ConformalMargin` per regime, and `shares`: what is added to the mean, by regime.

    The bound of a mixed step is never below that of its parts (see `envelope`): a part that is wide
    for want of data would widen the mixed steps with it. Where those are known (50 scores) a part
    with fewer has the margin that their scores ask for, as it would be without steering: that goes
    down to nothing where the other part's bound holds mixed steps anyhow. The part's own margin is
    steered by what it would have covered itself.
    """

    def __init__(self, margin: float = PRIOR_MARGIN) -> None:
        """Start without scores: every margin is `margin`, a share of the mean."""
        self._margins = {regime: ConformalMargin(margin) for regime in _REGIMES}
        self._has_borrowers = True
        self.shares = dict.fromkeys(_REGIMES, margin)

    @property
    def coverage(self) -> float:
        """The share of steps that upper bounds are to hold for."""
        return self._margins[Regime.MIXED].coverage

    def record(self, regime: Regime, score: float, *, is_covered: bool, is_outlier: bool) -> None:
        """Learn `actual / mean − 1` of a step and whether its upper bound held.

        The score of an outlier is not kept: it only steers.
        """
        margin = self._margins[regime]
        if self._is_told(regime):
            is_covered = score <= margin.margin
        if is_outlier:
            margin.record_coverage(is_covered=is_covered)
        else:
            margin.record(score, is_covered=is_covered)
        self._share()

    def widen(self, regime: Regime | None = None) -> None:
        """Keep a regime's margin (None = all) wide until its coverage is back."""
        for each in _REGIMES if regime is None else (regime,):
            self._margins[each].widen()
        self._share()

    def aim_for(self, coverage: float) -> None:
        """Change the target; what was learnt stays."""
        for margin in self._margins.values():
            margin.aim_for(coverage)
        self._share()

    def _is_told(self, regime: Regime) -> bool:
        return (
            self._margins[regime].num_scores < _ENOUGH_SCORES
            and regime is not Regime.MIXED
            and self._margins[Regime.MIXED].num_scores >= _ENOUGH_SCORES
        )

    def _share(self) -> None:
        if self._has_borrowers:
            known = [m.margin for m in self._margins.values() if m.num_scores >= _ENOUGH_SCORES]
            self._has_borrowers = len(known) < len(self._margins)
            if known:
                lent = min(PRIOR_MARGIN * prior_scale(self.coverage), max(known))
                for margin in self._margins.values():
                    if margin.num_scores < _ENOUGH_SCORES:
                        margin.borrow(lent)
        for regime, margin in self._margins.items():
            if self._is_told(regime):
                mixed = self._margins[Regime.MIXED]
                self.shares[regime] = mixed.unsteered()
            else:
                self.shares[regime] = margin.margin

    def state(self) -> dict[str, Any]:
        """Return the margins as JSON values, by regime."""
        return {str(regime): margin.state() for regime, margin in self._margins.items()}

    @classmethod
    def restore(cls, state: Mapping[str, Any], path: str) -> RegimeMargins:
        """Rebuild from `state()`; SnapshotError names the field below `path` that is wrong."""
        restored = cls()
        for regime in _REGIMES:
            part = read_mapping(state, str(regime), path)
            restored._margins[regime] = ConformalMargin.restore(part, f"{path}.{regime}")
        restored._share()
        return restored
