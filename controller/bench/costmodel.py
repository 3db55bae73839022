"""How well, and how quickly, a cost model predicts a series of steps.

Owns the replay and its numbers. Each step is predicted before it is shown, so nothing is judged by
what it was fitted to.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from controller.bench.costmodel_steps import StepSeries
from controller.runtime.refits import FIRST_REFIT, REFIT_EVERY
from costmodel.features import FloatArray, Regime
from costmodel.judged import JudgedPlanes
from costmodel.prior import flat_prior
from costmodel.recursive import RecursiveLeastSquares
from costmodel.refit import Refit
from costmodel.refitted import RefittedLeastSquares
from costmodel.windowed import WindowedRegression
from engine.clock import Clock

LEARNERS: dict[str, type[JudgedPlanes]] = {
    "recursive": RecursiveLeastSquares,
    "refitted": RefittedLeastSquares,
    "windowed": WindowedRegression,
}
# G4 asks for a small error within that many steps, and for coverage over the last that many, in
# every regime with at least so many.
LEARNING_STEPS = 500
MIN_REGIME_STEPS = 200
# G5: back under this error, as the mean of any so many steps in a row from there to step 200.
RECOVERED_MAPE = 0.08
RECOVERY_STEPS = 200
_RECOVERY_WINDOW = 20
DRIFT_FACTORS = (1.5, 2.0)
# A background fit takes as long as a few steps.
_REFIT_STEPS = 5
_CANDIDATES = 16
_TIMED_CALLS = 300
_TIMED_ROUNDS = 5


class RegimeNumbers(NamedTuple):
    """Errors and coverage of one regime over the last steps, as shares."""

    regime: str
    num_steps: int
    mape: float
    p90_error: float
    coverage: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """Steps from a change of speed until the error is small again, and stays so until step
    `RECOVERY_STEPS`; None if it never is.
    """

    factor: float
    num_steps: int | None


@dataclass(frozen=True, slots=True)
class CostModelNumbers:
    """One learner on one series. Errors are |predicted − actual| / actual of steps that no source
    calls an outlier; `mape`, `p90_error` and `coverage` are over the steps after the first
    `LEARNING_STEPS` (all, in a shorter series). `predict_s` is for 16 candidates.
    """

    series: str
    learner: str
    num_steps: int
    num_left_out: int
    mape: float
    p90_error: float
    coverage: float
    regimes: tuple[RegimeNumbers, ...]
    recoveries: tuple[Recovery, ...]
    num_refits: int
    num_adopted: int
    predict_s: float
    observe_s: float


class _Replay(NamedTuple):
    """Per step: error, whether the upper bound held, whether it is to be judged; and refits."""

    errors: FloatArray
    is_covered: FloatArray
    is_judged: FloatArray
    num_refits: int
    num_adopted: int
    model: JudgedPlanes


def measure(series: StepSeries, learner: str, clock: Clock) -> CostModelNumbers:
    """Replay a series, and its slowed copies, through a fresh model that starts from nothing."""
    replay = _replay(series, learner)
    first = LEARNING_STEPS if len(series.steps) > LEARNING_STEPS else 0
    kinds = np.array([step.features.regime.value for step in series.steps])
    regimes = []
    for regime in Regime:
        own = np.flatnonzero((kinds == regime.value) & (np.arange(len(kinds)) >= first))
        if own.size:
            regimes.append(RegimeNumbers(regime.value, own.size, *_shares(replay, own)))
    predict_s, observe_s = _timings(replay.model, series, clock)
    return CostModelNumbers(
        series.name,
        learner,
        len(series.steps),
        series.num_left_out,
        *_shares(replay, np.arange(first, len(kinds))),
        tuple(regimes),
        tuple(_recovery(series, learner, factor) for factor in DRIFT_FACTORS),
        replay.num_refits,
        replay.num_adopted,
        predict_s,
        observe_s,
    )


def _replay(series: StepSeries, learner: str) -> _Replay:
    model = flat_prior(LEARNERS[learner])
    errors, covered = [], []
    num_refits = 0
    pending: tuple[int, Refit] | None = None
    due_at = FIRST_REFIT
    for index, step in enumerate(series.steps):
        mean_s, upper_s = model.predict(step.features.to_array()[None])
        errors.append(abs(float(mean_s[0]) - step.latency_s) / step.latency_s)
        covered.append(float(step.latency_s <= float(upper_s[0])))
        model.observe(step.features, step.latency_s)
        if not isinstance(model, RefittedLeastSquares):
            continue
        # As the server does it: a job leaves, and its answer is taken over some steps later.
        if pending is not None and index >= pending[0]:
            model.adopt(pending[1])
            pending = None
        if pending is None and model.num_remembered >= due_at:
            due_at = model.num_remembered + REFIT_EVERY
            job = model.refit_job()
            if job is not None:
                pending = index + _REFIT_STEPS, job.run()
                num_refits += 1
    num_adopted = model.num_adopted if isinstance(model, RefittedLeastSquares) else 0
    is_judged = np.array([not step.is_outlier for step in series.steps], dtype=np.float64)
    return _Replay(np.array(errors), np.array(covered), is_judged, num_refits, num_adopted, model)


def _shares(replay: _Replay, index: npt.NDArray[np.int64]) -> tuple[float, float, float]:
    """Return MAPE, P90 of the error, and coverage (outliers included) of the chosen steps."""
    errors = replay.errors[index][replay.is_judged[index] > 0.0]
    if not errors.size:
        return 0.0, 0.0, float(replay.is_covered[index].mean())
    mape, high = float(errors.mean()), float(np.quantile(errors, 0.9))
    return mape, high, float(replay.is_covered[index].mean())


def _recovery(series: StepSeries, learner: str, factor: float) -> Recovery:
    """Change the speed half-way and count the steps until the error is small again."""
    change_at = len(series.steps) // 2
    replay = _replay(series.slowed(factor, change_at), learner)
    is_judged = replay.is_judged[change_at:] > 0.0
    judged, errors = np.flatnonzero(is_judged), replay.errors[change_at:][is_judged]
    return Recovery(factor, steps_to_recover(judged, errors))


def steps_to_recover(steps: npt.NDArray[np.int64], errors: FloatArray) -> int | None:
    """Return the first of `steps` since the change from which the mean error of every 20 in a row
    is small, up to those that begin at step `RECOVERY_STEPS`; None without such a step.

    Both arrays have shape (n,): steps that are judged, rising from 0, and the error of each.
    """
    num_windows = len(errors) - _RECOVERY_WINDOW + 1
    sums = np.concatenate(([0.0], np.cumsum(errors)))
    for start in range(num_windows):
        # One quiet stretch amid large errors is no recovery.
        stop = max(start + 1, int(np.searchsorted(steps, RECOVERY_STEPS, side="right")))
        stop = min(stop, num_windows)
        means = (sums[start + _RECOVERY_WINDOW : stop + _RECOVERY_WINDOW] - sums[start:stop]) / (
            _RECOVERY_WINDOW
        )
        if (means < RECOVERED_MAPE).all():
            return int(steps[start])
    return None


def _timings(model: JudgedPlanes, series: StepSeries, clock: Clock) -> tuple[float, float]:
    """Return the best mean seconds of rounds of predictions (16 candidates) and of updates.

    A refit that is due inside an update is part of it: that is what the batch learner costs.
    """
    steps = series.steps
    candidates = np.array([steps[i % len(steps)].features for i in range(_CANDIDATES)])
    shown = [steps[i % len(steps)] for i in range(_TIMED_CALLS)]

    def observe() -> None:
        for step in shown:
            model.observe(step.features, step.latency_s)

    def predict() -> None:
        for _ in range(_TIMED_CALLS):
            model.predict(candidates)

    return _best(predict, clock), _best(observe, clock)


def _best(calls: Callable[[], None], clock: Clock) -> float:
    rounds = []
    for _ in range(_TIMED_ROUNDS):
        started_at = clock.now()
        calls()
        rounds.append((clock.now() - started_at) / _TIMED_CALLS)
    return min(rounds)


def misses(numbers: CostModelNumbers) -> tuple[str, ...]:
    """Return every goal (docs/measuring.md, G4 and G5) that the numbers do not meet, in words."""
    found = []
    if numbers.mape > 0.05:
        found.append(f"G4: MAPE {numbers.mape:.1%} > 5 %")
    if not 0.87 <= numbers.coverage <= 0.93:
        found.append(f"G4: coverage {numbers.coverage:.1%} outside 87–93 %")
    for regime in numbers.regimes:
        is_many = regime.num_steps >= MIN_REGIME_STEPS
        if is_many and not 0.87 <= regime.coverage <= 0.93:
            found.append(f"G4: coverage of {regime.regime} {regime.coverage:.1%}")
    for recovery in numbers.recoveries:
        if recovery.num_steps is None:
            found.append(f"G5: ×{recovery.factor:g} never recovered")
        elif recovery.num_steps > RECOVERY_STEPS:
            found.append(f"G5: ×{recovery.factor:g} took {recovery.num_steps} steps")
    return tuple(found)


def averages(rows: Sequence[CostModelNumbers]) -> dict[str, float]:
    """Return the mean MAPE of each learner over all series."""
    learners = dict.fromkeys(row.learner for row in rows)
    return {
        name: statistics.mean(row.mape for row in rows if row.learner == name) for name in learners
    }
