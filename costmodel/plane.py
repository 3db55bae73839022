"""One plane of the cost model: recursive least squares in information form with non-negative
coefficients.

Owns the information matrix, the moment vector and the coefficients of one affine function. Must not
know regimes, margins or which samples deserve to teach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from costmodel.basis import NUM_BASIS, SCALES
from costmodel.features import FloatArray
from costmodel.fields import SnapshotError, read_array, read_count
from costmodel.nonneg import solve_nonnegative

# An empty step costs at least this: keeps every prediction positive by a constraint on the
# intercept.
MIN_INTERCEPT_S = 1e-6
# No scaled coefficient goes beyond this by rescaling; repeated one-sided shifts must not compound
# without end.
MAX_COEFFICIENT_S = 1e4
# Forget 2 % of the information along the direction of each new sample. Because only that direction
# is forgotten, the memory is about NUM_BASIS / 0.02 = 450 samples.
FORGETTING = 0.02
# A young plane forgets faster, so that the memory is about half of what it has seen: its first
# samples were shared out between the planes by a guess.
YOUNG_FORGETTING = 14.0
YOUNG_SAMPLES = 40
# Weight of the initial coefficients, in samples: they decide only where data says nothing.
PRIOR_WEIGHT = 0.1
# A settled plane moves little by one sample: it solves for its coefficients at every fourth, a
# plane that has just begun, or just changed, at every sample.
SETTLED_SAMPLES = 50
SOLVE_EVERY = 4
# A batch is a plane's whole past: the first samples after it must not wash it out.
BATCH_AGE = 100
# Without a batch the early samples went to planes by a guess: a change among the first ones scales
# down all information.
TRUSTED_SAMPLES = 500
UNTRUSTED_KEEP = 0.2
# As many samples as directional forgetting remembers; and an age at which a plane forgets no faster
# than it ever will: a fit has seen its samples several times.
FIT_SAMPLES = 450
SETTLED_AGE = 1000
# An hour of work that was thought to take a microsecond, squared, is far below this; products of
# such numbers are far from overflow.
_MAX_KNOWN = 1e40
# How far what is known may be ahead of the coefficients, as a sum of squared relative errors, and
# as a share of all samples: a settled plane solves at every fourth one (measured: 0.1).
_MAX_GAP_SHARE = 0.25
_MAX_GAP = 1.0
_PROXIMAL = 1e-9
_LOWER = np.zeros(NUM_BASIS)
_LOWER[0] = MIN_INTERCEPT_S


class NonNegativePlane:
    """Coefficients of `latency = coefficients · basis`, learnt from relative errors.

    Minimises Σ wᵢ (1 − x·φᵢ/yᵢ)² over x >= 0 (the intercept: >= 1 µs). A sample enters divided by
    the latency predicted for it, so the squared error is relative and steps of 10 ms and of seconds
    count alike.

    Forgetting is directional (Cao and Schwartz, "A directional forgetting algorithm based on the
    decomposition of the information matrix", Automatica 36, 2000): R ← R − μ Rφφ'R / φ'Rφ + φφ'.
    Information about work that the recent steps did not contain stays, so a long idle phase cannot
    wash out the busy regime.
    """

    def __init__(self, coefficients: FloatArray) -> None:
        """Start from scaled coefficients (seconds per scaled unit), shape (NUM_BASIS,), weakly
        believed.
        """
        self._set(np.maximum(coefficients, _LOWER))
        self._num_samples = 0
        self._num_total = 0
        # The scaled coefficients of a real device are of one order: none is believed more firmly
        # than the largest, or a small guess could not grow.
        self._information: FloatArray = (
            np.eye(NUM_BASIS) * PRIOR_WEIGHT / float(self.coefficients.max()) ** 2
        )
        self._moment: FloatArray = self._information @ self.coefficients

    def _set(self, coefficients: FloatArray) -> None:
        self.coefficients: FloatArray = coefficients
        self.physical: FloatArray = coefficients / SCALES

    def learn(
        self, row: FloatArray, predicted_s: float, taught_s: float, weight: float | None = None
    ) -> bool:
        """Learn that a step with scaled basis `row` took `taught_s`; True if the coefficients
        moved.

        `predicted_s` is what had been believed: it sets the relative weight. A step with a `weight`
        of its own counts as so many, and moves them at once.
        """
        direction = row / predicted_s
        target = taught_s / predicted_s
        if weight is not None:
            direction *= math.sqrt(weight)
            target *= math.sqrt(weight)
        seen = self._information.dot(direction)
        forgotten = max(FORGETTING, YOUNG_FORGETTING / (YOUNG_SAMPLES + self._num_samples))
        root = math.sqrt(forgotten / float(direction.dot(seen)))
        seen *= root
        # The moment loses what the information loses, times the unconstrained solution R⁻¹m.
        self._moment += direction * target - seen * (root * float(direction.dot(self._moment)))
        # Two products of a vector with itself: the matrix stays symmetric to the last bit.
        self._information += direction[:, None] * direction
        self._information -= seen[:, None] * seen
        self._num_samples += 1
        self._num_total += 1
        is_due = self._num_samples <= SETTLED_SAMPLES or not self._num_samples % SOLVE_EVERY
        if not is_due and weight is None:
            return False
        self._solve()
        return True

    def believe(self, rows: FloatArray, latencies_s: FloatArray) -> None:
        """Fit a batch at once: scaled rows (n, NUM_BASIS) and seconds (n,), on top of what is
        known, nothing forgotten.
        """
        self._num_samples = max(self._num_samples, BATCH_AGE)
        self._num_total = max(self._num_total, TRUSTED_SAMPLES)
        relative = rows / latencies_s[:, None]
        self._information = self._information + relative.T @ relative
        self._moment = self._moment + relative.sum(axis=0)
        self._solve()

    def novelty(self, row: FloatArray, latency_s: float) -> float:
        """Return how little is known of steps like the scaled `row`, seconds `latency_s`: the
        leverage z'R⁻¹z of z = row / latency. 1 is what a single such step would have told; the
        average over all that a settled plane remembers is NUM_BASIS / 450.
        """
        direction = row / latency_s
        return float(direction @ np.linalg.solve(self._known()[0], direction))

    @property
    def is_trusted(self) -> bool:
        """Whether it has seen a warm-up, or as much as one is worth."""
        return self._num_total >= TRUSTED_SAMPLES

    @classmethod
    def from_fit(cls, coefficients: FloatArray, relative: FloatArray) -> NonNegativePlane:
        """Return a plane that goes on from a batch fit: scaled coefficients (NUM_BASIS,), and the
        rows that they were fitted to, each divided by its prediction, shape (n, NUM_BASIS).

        The rows weigh no more than the memory of a plane that learnt online. The minimum of what is
        known is the fit itself, whatever loss it was made with.
        """
        plane = cls(coefficients)
        keep = min(1.0, FIT_SAMPLES / max(1, len(relative)))
        plane._information = plane._information + relative.T @ relative * keep
        plane._moment = plane._information @ plane.coefficients
        plane._num_samples = plane._num_total = SETTLED_AGE
        return plane

    def forget_faster(self, age: int) -> None:
        """Forget as a plane of `age` samples does, from now on, if this one is older.

        Directional as ever: a change says that what the coming steps excite may be wrong, not what
        they leave alone. Scaling all information down instead would hand the directions without
        data over to noise.
        """
        self._num_samples = min(self._num_samples, age)
        if self._num_total < TRUSTED_SAMPLES:
            self._information *= UNTRUSTED_KEEP
            self._moment *= UNTRUSTED_KEEP

    def rescale(self, factor: float) -> float:
        """Multiply every coefficient: the same work now takes `factor` times as long. Return the
        factor applied.
        """
        factor = min(factor, MAX_COEFFICIENT_S / float(self.coefficients.max()))
        factor = max(factor, MIN_INTERCEPT_S / float(self.coefficients.max()))
        # Past samples read φ/ŷ; in the new unit of time each is 1/factor of what it was.
        self._information /= factor * factor
        self._moment /= factor
        self._set(np.maximum(self.coefficients * factor, _LOWER))
        return factor

    def _known(self) -> tuple[FloatArray, float]:
        """Return the information with a little more on its diagonal, so that the system is never
        singular, and how much more.
        """
        gram = self._information.copy()
        pull = _PROXIMAL * float(gram.trace())
        gram.flat[:: NUM_BASIS + 1] += pull
        return gram, pull

    def _solve(self) -> None:
        gram, pull = self._known()
        # A proximal term towards the last solution: harmless where data decides.
        last = self.coefficients - _LOWER
        moment = self._moment + pull * self.coefficients - gram[:, 0] * MIN_INTERCEPT_S
        self._set(solve_nonnegative(gram, moment, last) + _LOWER)

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON numbers."""
        return {
            "coefficients": self.coefficients.tolist(),
            "num_samples": self._num_samples,
            "num_total": self._num_total,
            "information": self._information.tolist(),
            "moment": self._moment.tolist(),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], path: str) -> NonNegativePlane:
        """Rebuild from `state()`; SnapshotError names the field below `path` that is wrong."""
        coefficients = read_array(state, "coefficients", path, (NUM_BASIS,))
        if (coefficients < _LOWER).any():
            raise SnapshotError(f"{path}.coefficients", "a coefficient is below its bound")
        if (coefficients > MAX_COEFFICIENT_S).any():
            raise SnapshotError(f"{path}.coefficients", f"one is above {MAX_COEFFICIENT_S:g}")
        plane = cls(coefficients)
        plane._num_samples = read_count(state, "num_samples", path)
        plane._num_total = read_count(state, "num_total", path)
        plane._information = read_array(state, "information", path, (NUM_BASIS, NUM_BASIS))
        plane._moment = read_array(state, "moment", path, (NUM_BASIS,))
        for name, stored in (("information", plane._information), ("moment", plane._moment)):
            if (np.abs(stored) > _MAX_KNOWN).any():
                raise SnapshotError(f"{path}.{name}", f"a number is beyond {_MAX_KNOWN:g}")
        if (plane._information != plane._information.T).any():
            raise SnapshotError(f"{path}.information", "is not symmetric")
        if np.linalg.eigvalsh(plane._information)[0] <= 0.0:
            raise SnapshotError(f"{path}.information", "is not positive definite")
        plane._solve()
        gap = plane.coefficients - coefficients
        is_bounded = bool(plane.coefficients.max() <= 2.0 * MAX_COEFFICIENT_S)
        known = float(coefficients @ plane._information @ coefficients)
        # What is known must say what is believed, or the first sample throws the belief away.
        if not is_bounded or gap @ plane._information @ gap > _MAX_GAP_SHARE * known + _MAX_GAP:
            raise SnapshotError(f"{path}.moment", "does not belong to the coefficients")
        plane._set(coefficients)
        return plane
