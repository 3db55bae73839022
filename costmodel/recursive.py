"""The online learner: every sample moves the plane that it belongs to, in tens of microseconds.

Owns what happens to coefficients at a sample. Must not read a clock, and must not hold a formula
that a part owns.
"""

from __future__ import annotations

from typing import ClassVar

from costmodel.features import FloatArray
from costmodel.judged import JudgedPlanes


class RecursiveLeastSquares(JudgedPlanes):
    """A `CostModel` that learns from every step. Single writer."""

    kind: ClassVar[str] = "recursive_least_squares"

    def _learn(
        self,
        index: int,
        row: FloatArray,
        believed_s: float,
        taught_s: float,
        weight: float | None = None,
    ) -> None:
        if self._planes[index].learn(row, believed_s, taught_s, weight):
            self._envelope.set_plane(index, self._planes[index].physical)
            self._version += 1
