"""The learner that serves: recursive at every step, and open to a better fit from elsewhere.

Owns the two halves of a handover, both for the loop's thread: what a refit needs, and taking over
what it found. Must not run the refit: that costs tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from costmodel.basis import SCALES, expand
from costmodel.features import StepFeatures
from costmodel.margin import PRIOR_MARGIN
from costmodel.plane import NonNegativePlane
from costmodel.recursive import RecursiveLeastSquares
from costmodel.refit import MIN_SAMPLES, Refit, RefitJob
from costmodel.strata import StratifiedWindow


class RefittedLeastSquares(RecursiveLeastSquares):
    """`RecursiveLeastSquares` beside a stratified window that a refit may learn from.

    The recursion follows each step, but its memory is its information matrix; the window remembers
    whole steps of every kind, so a fit of all of them can undo what a bad start or a run of one
    kind has left behind. Single writer, both verbs and both halves of the handover.
    """

    kind: ClassVar[str] = "refitted_least_squares"

    def __init__(self, planes: Sequence[NonNegativePlane], margin: float = PRIOR_MARGIN) -> None:
        """Start from `NUM_PLANES` planes in the order of `envelope` (see `prior`)."""
        super().__init__(planes, margin)
        # Not part of a snapshot: it fills again within minutes, and the coefficients are what
        # remains of it.
        self._memory = StratifiedWindow()
        self._epoch = 0
        self._num_adopted = 0

    @property
    def num_adopted(self) -> int:
        """Refits that replaced the coefficients."""
        return self._num_adopted

    @property
    def num_remembered(self) -> int:
        """Steps that were ever kept for a refit."""
        return self._memory.num_added

    def refit_job(self) -> RefitJob | None:
        """Return copies of all that a refit needs, or None while too little is known."""
        samples = self._memory.samples()
        if len(samples.latency_s) < MIN_SAMPLES:
            return None
        planes = np.array([plane.coefficients for plane in self._planes])
        return RefitJob(samples, planes, self._epoch)

    def adopt(self, refit: Refit) -> bool:
        """Go on from a refit's coefficients; False if it is no better, or from before a change of
        speed.
        """
        if not refit.is_better or refit.epoch != self._epoch:
            return False
        samples = self._memory.samples()
        rows = expand(samples.features) / SCALES
        values = rows @ refit.planes.T
        owners, predicted_s = values.argmax(axis=1), values.max(axis=1)
        relative = rows / predicted_s[:, None]
        for index, scaled in enumerate(refit.planes):
            self._install(index, NonNegativePlane.from_fit(scaled, relative[owners == index]))
        for drift in self._drifts.values():
            drift.reset()
        self._num_adopted += 1
        self._version += 1
        return True

    def _remember(self, features: StepFeatures, taught_s: float) -> None:
        self._memory.add(features, taught_s)

    def _memory_shifted(self, factor: float) -> None:
        self._memory.rescale(factor)
        self._epoch += 1
