"""What the learners share: planes that predict, samples that are screened, margins, drift.

Owns how the parts work together for one step. Must not read a clock, hold a formula that a part
owns, or decide how coefficients are learnt from the samples that passed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Self

from costmodel.base import LatencyEstimate, MarginalCosts, ModelQuality, RegimeQuality
from costmodel.basis import expand_scaled
from costmodel.drift import PageHinkley
from costmodel.envelope import DECODE_PLANE, NUM_PLANES, PREFILL_PLANE, WORK_PLANE, Envelope
from costmodel.features import FloatArray, Regime, StepFeatures
from costmodel.fields import SnapshotError, read_array, read_count, read_mapping, read_number
from costmodel.hygiene import COLD_SAMPLES, RejectReason, Screen, check_sample
from costmodel.margin import MAX_COVERAGE, MIN_COVERAGE, PRIOR_MARGIN
from costmodel.mixing import MixingRatio
from costmodel.plane import NonNegativePlane
from costmodel.regime_margins import RegimeMargins
from costmodel.window import QualityWindow

# A plane teaches where it is the larger one; the plane at home keeps a near tie, so that noise does
# not pass samples to and fro between two planes that say the same.
_TIE: Final = 0.98
# How young a plane forgets after a change of speed (a memory of 20 samples, growing) and after a
# drift alarm (of 70).
_AGE_AFTER_SHIFT: Final = 0
_AGE_AFTER_ALARM: Final = 100
# A plane that is the largest one in less than a fifth of the steps at its home is asleep
# (exponential mean), unless it answers for steps elsewhere: each of those counts like five at home.
_AWAKE_SHARE: Final = 0.2
_AWAKE_STEP: Final = 0.02
_AWAY_STEP: Final = 0.1
# Prefill work is large or small against the running median of its predictions.
_SPLIT_STEP: Final = 0.02
# Beyond every prediction; below, moving by shares of itself cannot overflow.
_MAX_SPLIT_S: Final = 1e30
# Of a step that is worth so much of all that is known of its kind (a fifth: four others like it) a
# surprise tells what such steps take, not how fast the machine is. It then weighs four times all
# that is known of them: four fifths of its surprise are gone.
_NOVEL: Final = 0.2
_TOLD: Final = 4.0
_REGIMES: Final = tuple(Regime)


class JudgedPlanes(ABC):
    """A `CostModel` but for its learning: `_learn` is what a learner says. Single writer.

    `latency = max over planes`, see `envelope`. Each sample belongs to the plane that predicted it.
    Margins, windows and drift detectors are per regime.
    """

    kind: ClassVar[str]
    """The learner's name in a snapshot."""

    def __init__(self, planes: Sequence[NonNegativePlane], margin: float = PRIOR_MARGIN) -> None:
        """Start from `NUM_PLANES` planes in the order of `envelope` (see `prior`).

        `margin` is the share of the mean that the upper bound adds while nothing is known.
        """
        self._planes = list(planes)
        self._envelope = Envelope([plane.physical for plane in planes])
        self._split_s = 0.0
        self._presence = [0.5] * NUM_PLANES
        self._screens = [Screen() for _ in range(NUM_PLANES)]
        self._margins = RegimeMargins(margin)
        self._windows = {regime: QualityWindow() for regime in _REGIMES}
        self._window = QualityWindow()
        self._mixing = MixingRatio()
        self._drifts = {regime: PageHinkley() for regime in _REGIMES}
        self._num_rejected: dict[str, int] = {}
        self._version = 0
        self._num_drift_alarms = 0

    @property
    def version(self) -> int:
        """Updates of the coefficients so far."""
        return self._version

    @property
    def num_drift_alarms(self) -> int:
        """Changes that were noticed: Page–Hinkley alarms and runs of one-sided surprises (not those
        of a cold start).
        """
        return self._num_drift_alarms

    @property
    def coefficients(self) -> tuple[tuple[float, ...], ...]:
        """Coefficients per plane, seconds per unit, in the order of `basis.BASIS_NAMES`."""
        return tuple(tuple(plane.physical.tolist()) for plane in self._planes)

    def predict(self, features: FloatArray) -> LatencyEstimate:
        """Return mean and upper seconds for candidates of shape (n, NUM_FEATURES)."""
        return self._envelope.estimate(features, self._margins.shares)

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        """Learn from one executed step; False if the sample was refused, which is counted by
        reason.
        """
        reason = check_sample(features, latency_s)
        if reason is not None:
            self.reject(reason)
            return False
        regime = features.regime
        predicted = self._envelope.predict_step(features, self._margins.shares)
        latency_s = float(latency_s)
        ratio = latency_s / predicted.mean_s
        is_covered = latency_s <= predicted.upper_s
        home = self._home(regime, predicted.mean_s)
        index = home
        if predicted.plane_s[home] < _TIE * predicted.mean_s:
            index = predicted.plane_s.index(predicted.mean_s)
        self._presence[home] += _AWAKE_STEP * ((index == home) - self._presence[home])
        if index != home:
            self._presence[index] += _AWAY_STEP * (1.0 - self._presence[index])
        row = expand_scaled(features)
        novelty = self._novelty(index, row, ratio, predicted.mean_s)
        screen = self._screens[index]
        verdict = screen.judge_unknown(ratio) if novelty else screen.judge(ratio)
        if verdict.taught_ratio is None:
            # It broke its bound, or kept it, all the same: coverage counts every step that was
            # promised.
            self._margins.record(regime, ratio - 1.0, is_covered=is_covered, is_outlier=True)
            self._windows[regime].record_coverage(is_covered=is_covered)
            self._window.record_coverage(is_covered=is_covered)
            self.reject(RejectReason.OUTLIER)
            return False

        plane = self._planes[index]
        believed_s, weight = predicted.mean_s, None
        taught_ratio = verdict.taught_ratio
        if verdict.shift is not None:
            believed_s *= self._shift(index, verdict.shift)
            self._drifts[regime].reset()
            if not verdict.is_cold:
                self._alarm(regime)
        elif novelty:
            # It says nothing of drift; and once it is taught in full it weighs by what it took, for
            # what was said of it means little.
            if taught_ratio == ratio:
                believed_s, taught_ratio, weight = latency_s, 1.0, _TOLD / novelty
        elif self._drifts[regime].record((ratio - 1.0) / screen.size):
            plane.forget_faster(_AGE_AFTER_ALARM)
            self._alarm(regime)
        taught_s = believed_s * taught_ratio
        self._remember(features, taught_s)
        self._learn(index, row, believed_s, taught_s, weight)
        if index != home and self._presence[home] < _AWAKE_SHARE:
            # A plane that is nowhere the largest one would never learn again. It wakes up by what
            # happens at its home, and where fewer planes are enough they come to agree there.
            self._learn(home, row, believed_s, taught_s)

        self._margins.record(regime, ratio - 1.0, is_covered=is_covered, is_outlier=False)
        if regime is Regime.MIXED:
            self._mixing.record(latency_s, predicted.apart_s)
        error = abs(latency_s - predicted.mean_s) / latency_s
        self._windows[regime].record(error, is_covered=is_covered)
        self._window.record(error, is_covered=is_covered)
        return True

    def reject(self, reason: RejectReason) -> None:
        """Count a sample that must not teach for a reason only the caller knows (a failed step, KV
        that was moved).
        """
        self._num_rejected[reason] = self._num_rejected.get(reason, 0) + 1

    def change_speed(self, factor: float) -> None:
        """Take from outside that the same work takes `factor` times as long; margins stay wide
        until coverage is back.
        """
        for index, plane in enumerate(self._planes):
            plane.rescale(factor)
            plane.forget_faster(_AGE_AFTER_SHIFT)
            self._envelope.set_plane(index, plane.physical)
        self._split_s *= factor
        self._memory_shifted(factor)
        self._margins.widen()
        for drift in self._drifts.values():
            drift.reset()
        self._version += 1

    def aim_for(self, coverage: float) -> None:
        """Let upper bounds hold with that probability from now on.

        ValueError if it is outside [`MIN_COVERAGE`, `MAX_COVERAGE`]. What was learnt stays; the
        share of steps that kept their bound is counted on over both targets.
        """
        if not MIN_COVERAGE <= coverage <= MAX_COVERAGE:
            raise ValueError(
                f"coverage must be in [{MIN_COVERAGE}, {MAX_COVERAGE}], got {coverage!r}"
            )
        self._margins.aim_for(coverage)

    @property
    def target_coverage(self) -> float:
        """The probability that upper bounds are to hold with."""
        return self._margins.coverage

    def marginals(self) -> MarginalCosts:
        """Return marginal costs under the current coefficients."""
        return self._envelope.marginals()

    def quality(self) -> ModelQuality:
        """Return error and coverage over the recent past, and the model's version."""
        return ModelQuality(
            version=self._version,
            num_observed=self._window.num_observed,
            mape=self._window.mape,
            coverage=self._window.coverage,
            regimes=tuple(
                RegimeQuality(
                    regime=regime,
                    num_observed=window.num_observed,
                    mape=window.mape,
                    coverage=window.coverage,
                    margin=self._margins.shares[regime],
                )
                for regime, window in self._windows.items()
            ),
            num_rejected={str(reason): count for reason, count in self._num_rejected.items()},
            target_coverage=self.target_coverage,
            mixing_ratio=self._mixing.ratio,
        )

    def _novelty(self, index: int, row: FloatArray, ratio: float, predicted_s: float) -> float:
        """Return the leverage of a step that took `ratio` times its prediction, if it surprises a
        plane that has not seen its kind in a model that knows the machine's speed; 0 otherwise.

        That of the longer time: a machine that became faster must not make all that is known look
        like little.
        """
        plane, screen = self._planes[index], self._screens[index]
        if not (screen.is_surprise(ratio) and plane.is_trusted):
            return 0.0
        if all(each.num_accepted < COLD_SAMPLES for each in self._screens):
            return 0.0
        novelty = plane.novelty(row, predicted_s * max(1.0, ratio))
        return novelty if novelty > _NOVEL or screen.is_among_unknown(ratio) else 0.0

    def _home(self, regime: Regime, predicted_s: float) -> int:
        """Return the plane that is expected to be the largest one, and steer the usual size."""
        if regime is Regime.DECODE_ONLY:
            return DECODE_PLANE
        # A running median of predictions by fixed relative steps.
        is_large = predicted_s > self._split_s
        if self._split_s == 0.0:
            self._split_s = predicted_s
        self._split_s *= 1.0 + _SPLIT_STEP if is_large else 1.0 - _SPLIT_STEP
        return WORK_PLANE if is_large else PREFILL_PLANE

    @abstractmethod
    def _learn(
        self,
        index: int,
        row: FloatArray,
        believed_s: float,
        taught_s: float,
        weight: float | None = None,
    ) -> None:
        """Learn that a step with scaled basis `row` took `taught_s`; plane `index` answers for it.

        With a `weight`, in samples, the next prediction is to know it.
        """

    def _remember(self, features: StepFeatures, taught_s: float) -> None:  # noqa: B027 - optional
        """Keep a sample that passed, as it is to be learnt; a learner without a memory need not."""

    def _memory_shifted(self, factor: float) -> None:  # noqa: B027 - optional
        """Hear that the same work takes `factor` times as long from now on."""

    def _install(self, index: int, plane: NonNegativePlane) -> None:
        """Put a plane in the place of another one."""
        self._planes[index] = plane
        self._envelope.set_plane(index, plane.physical)

    def _shift(self, index: int, factor: float) -> float:
        """Rescale plane `index` after a change of speed, and the others along with it.

        Machines slow down as a whole more often than for one kind of work, and a plane left behind
        would lose its samples to the one that moved. Where the guess is wrong, a plane that was
        dragged along sees its own run of surprises and returns alone: planes never drive each other
        to and fro.
        """
        applied = self._planes[index].rescale(factor)
        self._envelope.set_plane(index, self._planes[index].physical)
        self._planes[index].forget_faster(_AGE_AFTER_SHIFT)
        if not self._screens[index].is_on_trial:
            self._split_s *= applied
            self._memory_shifted(applied)
            for other in set(range(NUM_PLANES)) - {index}:
                self._planes[other].rescale(applied)
                self._planes[other].forget_faster(_AGE_AFTER_SHIFT)
                self._screens[other].put_on_trial()
                self._envelope.set_plane(other, self._planes[other].physical)
        self._screens[index].is_on_trial = False
        return applied

    def _alarm(self, regime: Regime) -> None:
        self._num_drift_alarms += 1
        self._margins.widen(regime)

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON numbers (see `snapshot`)."""
        return {
            "version": self._version,
            "num_drift_alarms": self._num_drift_alarms,
            "num_rejected": {str(reason): count for reason, count in self._num_rejected.items()},
            "split_s": self._split_s,
            "presence": list(self._presence),
            "planes": {str(i): plane.state() for i, plane in enumerate(self._planes)},
            "screens": {str(i): screen.state() for i, screen in enumerate(self._screens)},
            "margins": self._margins.state(),
            "drifts": {str(regime): part.state() for regime, part in self._drifts.items()},
            "windows": {str(regime): part.state() for regime, part in self._windows.items()},
            "window": self._window.state(),
            "mixing": self._mixing.state(),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], path: str = "state") -> Self:
        """Rebuild from `state()`; SnapshotError names the field that is wrong."""

        def part(group: str, name: str) -> tuple[Mapping[str, Any], str]:
            below = f"{path}.{group}"
            return read_mapping(read_mapping(state, group, path), name, below), f"{below}.{name}"

        indices = [str(index) for index in range(NUM_PLANES)]
        model = cls([NonNegativePlane.restore(*part("planes", index)) for index in indices])
        model._split_s = read_number(state, "split_s", path, 0.0, _MAX_SPLIT_S)
        presence = read_array(state, "presence", path, (NUM_PLANES,))
        if ((presence < 0.0) | (presence > 1.0)).any():
            raise SnapshotError(f"{path}.presence", "must be shares in [0, 1]")
        model._presence = presence.tolist()
        model._screens = [Screen.restore(*part("screens", index)) for index in indices]
        for regime in _REGIMES:
            model._drifts[regime] = PageHinkley.restore(*part("drifts", regime))
            model._windows[regime] = QualityWindow.restore(*part("windows", regime))
        model._margins = RegimeMargins.restore(
            read_mapping(state, "margins", path), f"{path}.margins"
        )
        model._window = QualityWindow.restore(read_mapping(state, "window", path), f"{path}.window")
        # Snapshots that are older than the ratio have none.
        if "mixing" in state:
            mixing = read_mapping(state, "mixing", path)
            model._mixing = MixingRatio.restore(mixing, f"{path}.mixing")
        model._version = read_count(state, "version", path)
        model._num_drift_alarms = read_count(state, "num_drift_alarms", path)
        rejected = read_mapping(state, "num_rejected", path)
        for reason in rejected:
            if reason not in RejectReason.__members__.values():
                raise SnapshotError(f"{path}.num_rejected.{reason}", "is not a known reason")
            model._num_rejected[reason] = read_count(rejected, reason, f"{path}.num_rejected")
        model._restore_own(state, path)
        return model

    def _restore_own(self, state: Mapping[str, Any], path: str) -> None:  # noqa: B027 - may be none
        """Take over what only this kind of learner stores."""
