"""The batch learner: coefficients stand still between refits of a stratified window.

Owns when a refit is due. Must not read a clock: refits are counted in samples, and run where
`observe` is called, so this learner is for analysis and as a yardstick; on a step path see
`refitted`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from costmodel.features import FloatArray, StepFeatures
from costmodel.fields import read_count, read_mapping
from costmodel.judged import JudgedPlanes
from costmodel.margin import PRIOR_MARGIN
from costmodel.plane import NonNegativePlane
from costmodel.refit import fit_planes, search_planes
from costmodel.strata import StratifiedWindow

# A young model refits whenever it has seen half as many samples more, later at every so many; and
# soon after a change of speed, when what it kept is known to a factor only.
REFIT_EVERY: Final = 50
_YOUNG_GROWTH: Final = 2
_AFTER_SHIFT: Final = 10
# A refit looks further than the nearest minimum once there is enough to tell by.
_SEARCH_FROM: Final = 100


class WindowedRegression(JudgedPlanes):
    """A `CostModel` that fits all that it remembers, now and then. Single writer."""

    kind: ClassVar[str] = "windowed_regression"

    def __init__(self, planes: Sequence[NonNegativePlane], margin: float = PRIOR_MARGIN) -> None:
        """Start from `NUM_PLANES` planes in the order of `envelope` (see `prior`)."""
        super().__init__(planes, margin)
        self._memory = StratifiedWindow()
        self._due_at = 1

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        """Keep one executed step, refit where it is due; False if the sample was refused."""
        is_taught = super().observe(features, latency_s)
        if is_taught and self._memory.num_added >= self._due_at:
            self._refit()
        return is_taught

    def _refit(self) -> None:
        start = np.array([plane.coefficients for plane in self._planes])
        num = self._memory.num_added
        fit = search_planes if num >= _SEARCH_FROM else fit_planes
        for index, scaled in enumerate(fit(self._memory.samples(), start)):
            self._install(index, NonNegativePlane(scaled))
        self._version += 1
        self._due_at = num + min(REFIT_EVERY, max(1, num // _YOUNG_GROWTH))

    def _learn(
        self,
        index: int,
        row: FloatArray,
        believed_s: float,
        taught_s: float,
        weight: float | None = None,
    ) -> None:
        """Change nothing: the window learns."""

    def _remember(self, features: StepFeatures, taught_s: float) -> None:
        self._memory.add(features, taught_s)

    def _memory_shifted(self, factor: float) -> None:
        self._memory.rescale(factor)
        self._due_at = min(self._due_at, self._memory.num_added + _AFTER_SHIFT)

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON numbers (see `snapshot`)."""
        return {**super().state(), "memory": self._memory.state(), "due_at": self._due_at}

    def _restore_own(self, state: Mapping[str, Any], path: str) -> None:
        memory = read_mapping(state, "memory", path)
        self._memory = StratifiedWindow.restore(memory, f"{path}.memory")
        self._due_at = read_count(state, "due_at", path)
