"""Refitting the planes to a window of steps at once, off the step path, with scikit-learn.

Owns the batch fit and the verdict whether it is better than what is in use. Pure: a job holds
copies, so that it can run anywhere. Must not touch a model; importing it does not import
scikit-learn, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from costmodel.basis import BASIS_NAMES, NUM_BASIS, SCALES, expand
from costmodel.envelope import DECODE_PLANE, NUM_PLANES, PREFILL_PLANE, WORK_PLANE
from costmodel.features import FloatArray
from costmodel.nonneg import solve_nonnegative
from costmodel.plane import MAX_COEFFICIENT_S, MIN_INTERCEPT_S
from costmodel.strata import Samples

IntArray = npt.NDArray[np.intp]
Solver = Callable[[FloatArray, FloatArray, FloatArray], FloatArray]

# A sample counts half after that many later ones, but never less than the least weight: what is
# rare must still be known when it comes back.
HALF_LIFE: Final = 1000.0
_LEAST_WEIGHT: Final = 0.1
# Each coefficient is believed like that many samples in which it is all of the latency: it decides
# only where samples say nothing.
_PRIOR_SAMPLES: Final = 0.05
_MAX_ROUNDS: Final = 5
_SETTLED: Final = 2e-3
# A start that is off by more than that factor is brought to the samples' scale.
_FAR: Final = 1.5
# Huber's constant: 95 % efficient where residuals are normal.
_HUBER: Final = 1.345
_MAD_TO_SIGMA: Final = 1.4826
_LEAST_SIGMA: Final = 0.005
_LOSS_KNEE: Final = 0.1
# One step in that many is held out, the newest included.
HOLD_OUT: Final = 4
MIN_SAMPLES: Final = 80
# Better is: by that many standard errors of the mean difference, and by that share of the error.
_STANDARD_ERRORS: Final = 2.0
_LEAST_GAIN: Final = 0.15
_WORST_ERROR: Final = 1.0
# Where a search parts small prefill work from large: quantiles of the sizes that were seen.
_CUTS: Final = (0.2, 0.4, 0.6, 0.8)
_TOKENS: Final = BASIS_NAMES.index("num_prefill_tokens")
_HAS_PREFILL: Final = BASIS_NAMES.index("has_prefill")


@dataclass(frozen=True, slots=True)
class Refit:
    """What a job found: scaled coefficients (NUM_PLANES, NUM_BASIS) fitted to all its samples.

    `error` and `current_error` are mean relative errors on the `num_held_out` samples that the
    judged fit had not seen; `is_better` says that the difference is more than chance. `epoch` is
    the job's.
    """

    planes: FloatArray
    error: float
    current_error: float
    num_held_out: int
    is_better: bool
    epoch: int


@dataclass(frozen=True, slots=True)
class RefitJob:
    """Copies of a window and of the scaled planes in use, (NUM_PLANES, NUM_BASIS).

    `epoch` names the speed of the machine that the samples are in: an answer from before a change
    is stale.
    """

    samples: Samples
    planes: FloatArray
    epoch: int = 0

    def run(self) -> Refit:
        """Fit three quarters of the samples, judge on the rest, then fit all of them.

        Milliseconds to tenths of a second. ValueError with fewer than `MIN_SAMPLES` samples.
        """
        num = len(self.samples.latency_s)
        if num < MIN_SAMPLES:
            raise ValueError(f"a refit needs at least {MIN_SAMPLES} samples, got {num}")
        is_held = np.arange(num)[::-1] % HOLD_OUT == 0
        kept = Samples(*(part[~is_held] for part in self.samples))
        held = Samples(*(part[is_held] for part in self.samples))
        trial = search_planes(kept, self.planes)
        errors, current = (relative_errors(planes, held) for planes in (trial, self.planes))
        gains = current - errors
        mean_error, mean_current = float(errors.mean()), float(current.mean())
        spread = float(gains.std(ddof=1)) / float(np.sqrt(len(gains)))
        gain = mean_current - mean_error
        is_better = gain > _STANDARD_ERRORS * spread and gain > _LEAST_GAIN * mean_current
        planes = fit_planes(self.samples, trial) if is_better else self.planes
        return Refit(planes, mean_error, mean_current, len(gains), is_better, self.epoch)


def relative_errors(planes: FloatArray, samples: Samples) -> FloatArray:
    """Return |predicted − actual| / actual, shape (n,), at most 1: an outlier is no verdict."""
    rows = expand(samples.features) / SCALES
    predicted_s = (rows @ planes.T).max(axis=1)
    errors: FloatArray = np.abs(predicted_s / samples.latency_s - 1.0)
    return np.minimum(errors, _WORST_ERROR)


def fit_planes(samples: Samples, start: FloatArray) -> FloatArray:
    """Return scaled coefficients (NUM_PLANES, NUM_BASIS), none negative, near-minimal in Huber's
    loss of relative residuals, for `latency = max over planes`.

    In turns: samples go to the plane that is the largest one there (Magnani and Boyd, "Convex
    piecewise-linear fitting", 2009), weights follow the residuals (Huber 1964, by iteratively
    reweighted least squares), and each plane is fitted by scikit-learn's non-negative least
    squares. A plane without samples keeps its shape. `start` has the result's shape; the best round
    is kept.
    """
    rows = expand(samples.features) / SCALES
    return _take_turns(rows, samples, start, _by_estimator)[1]


def search_planes(samples: Samples, start: FloatArray) -> FloatArray:
    """Return the best of `fit_planes` from several starts: the given one, and small and large
    prefill work parted at each of four sizes.

    Turns end in the nearest minimum, and where step times do not grow evenly the nearest one may be
    twice as far off as the best. The starts are compared by normal equations, which are quick; the
    best one is then fitted as ever.
    """
    rows = expand(samples.features) / SCALES
    has_prefill = rows[:, _HAS_PREFILL] > 0.0
    sizes = np.unique(rows[has_prefill, _TOKENS])
    places = sorted({int(cut * len(sizes)) for cut in _CUTS} - {0})
    best = _take_turns(rows, samples, start, _by_equations)
    for size in sizes[places]:
        owners = np.where(rows[:, _TOKENS] < size, PREFILL_PLANE, WORK_PLANE)
        owners[~has_prefill] = DECODE_PLANE
        latency_s = samples.latency_s
        parted = _fit_owners(rows, latency_s, 1.0 / latency_s, owners, start, _by_equations)
        found = _take_turns(rows, samples, parted, _by_equations)
        best = min(best, found, key=lambda each: each[0])
    return _take_turns(rows, samples, best[1], _by_estimator)[1]


def _take_turns(
    rows: FloatArray, samples: Samples, start: FloatArray, solve: Solver
) -> tuple[float, FloatArray]:
    """Return the least loss that turns reach from `start`, and the planes that have it."""
    latency_s = samples.latency_s
    fresh = np.maximum(0.5 ** (samples.ages / HALF_LIFE), _LEAST_WEIGHT)
    # Brought to the scale of the samples first: from a guess that is far off, one plane would take
    # them all and leave the others where they are.
    scale = float(np.median(latency_s / (rows @ start.T).max(axis=1)))
    if not 1.0 / _FAR <= scale <= _FAR:
        start = start * scale
    planes = best = start
    least = last = np.inf
    owned: IntArray = np.empty(0, dtype=np.intp)
    for _ in range(_MAX_ROUNDS):
        values = rows @ planes.T
        owners = values.argmax(axis=1)
        predicted_s = values.max(axis=1)
        residuals = latency_s / predicted_s - 1.0
        sigma = max(_LEAST_SIGMA, _MAD_TO_SIGMA * float(np.median(np.abs(residuals))))
        size = np.abs(residuals) / sigma
        weights = fresh * np.minimum(1.0, _HUBER / np.maximum(size, 1e-12))
        # Of the ratio's logarithm: predicting twice as much is as bad as predicting half.
        loss = _huber_loss(np.abs(np.log(latency_s / predicted_s)), fresh)
        # A plane that gives its samples to a twin keeps what it says of them, and so the loss: who
        # owns them must have settled too.
        is_settled = abs(loss - last) < _SETTLED * loss and np.array_equal(owners, owned)
        last, owned = loss, owners
        if loss < least:
            least, best = loss, planes
        if is_settled:
            break
        # Divided by what is predicted, not by what was measured: dividing by a noisy number would
        # favour the samples that happened to be quick.
        planes = _fit_owners(rows, latency_s, np.sqrt(weights) / predicted_s, owners, planes, solve)
    return float(least), best


def _fit_owners(
    rows: FloatArray,
    latency_s: FloatArray,
    share: FloatArray,
    owners: IntArray,
    start: FloatArray,
    solve: Solver,
) -> FloatArray:
    """Return each plane fitted to the rows that it owns, each weighing `share` (n,) squared."""
    planes = start.copy()
    for index in range(NUM_PLANES):
        is_own = owners == index
        if is_own.any():
            own = share[is_own]
            planes[index] = _nonnegative(
                rows[is_own] * own[:, None], latency_s[is_own] * own, start[index], solve
            )
    return planes


def _huber_loss(sizes: FloatArray, weights: FloatArray) -> float:
    """Return the weighted mean of Huber's loss with a fixed knee, comparable between rounds."""
    knee = _LOSS_KNEE
    loss = np.where(sizes <= knee, sizes * sizes, knee * (2.0 * sizes - knee))
    return float((weights * loss).sum() / weights.sum())


def _nonnegative(
    design: FloatArray, target: FloatArray, start: FloatArray, solve: Solver
) -> FloatArray:
    """Return the coefficients, intercept at least `MIN_INTERCEPT_S`, pulled weakly to `start`."""
    # The scaled coefficients of a real device are of one order: none is believed more firmly than
    # the largest, or a small one could not grow.
    pull = np.sqrt(_PRIOR_SAMPLES) / float(start.max())
    design = np.vstack([design, np.eye(NUM_BASIS) * pull])
    target = np.concatenate([target, start * pull])
    lower = np.zeros(NUM_BASIS)
    lower[0] = MIN_INTERCEPT_S
    found = solve(design, target - design @ lower, np.maximum(start - lower, 0.0)) + lower
    return np.minimum(np.maximum(found, lower), MAX_COEFFICIENT_S)


def _by_equations(design: FloatArray, target: FloatArray, start: FloatArray) -> FloatArray:
    """Return argmin over x >= 0 of |design x − target|² by its normal equations, from `start`."""
    return solve_nonnegative(design.T @ design, design.T @ target, start)


def _by_estimator(design: FloatArray, target: FloatArray, _start: FloatArray) -> FloatArray:
    """Return argmin over x >= 0 of |design x − target|² by scikit-learn."""
    estimator = _estimator()
    estimator.fit(design, target)
    found: FloatArray = np.asarray(estimator.coef_, dtype=np.float64)
    return found


def load_solver() -> None:
    """Import scikit-learn now: a second that a later refit need not take."""
    _estimator()


def _estimator() -> Any:
    from sklearn.linear_model import LinearRegression

    return LinearRegression(fit_intercept=False, positive=True)
