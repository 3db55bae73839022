"""Which samples may teach, and how much: checks counted by reason, clipping, and the escape from
clipping.

Owns the reasons of refusal and one robust screen. Must not know a basis or a coefficient.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from costmodel.basis import MAX_FEATURE
from costmodel.features import StepFeatures
from costmodel.fields import SnapshotError, read_count, read_number, read_numbers

MAX_LATENCY_S: Final = 3600.0
# An hour over the least prediction, a microsecond.
MAX_RATIO: Final = 4e9
# So many surprises in a row at most are put down to work that nobody knew.
MAX_UNKNOWN_RUN: Final = 16
# Beyond this factor a lone residual is not weak evidence but none.
OUTLIER_FACTOR: Final = 8.0
# That many one-sided surprises in a row are a change of speed: independent outliers, 1 % of steps,
# would do that once in 10¹² steps. A screen that knows nothing yet believes a shorter run.
SHIFT_RUN: Final = 6
COLD_SHIFT_RUN: Final = 3
COLD_SAMPLES: Final = 10
_SURPRISE: Final = 5.0
_MIN_SURPRISE: Final = 0.08
_MAX_SHIFT: Final = 64.0
_START_SIZE: Final = 0.05
_MIN_SIZE: Final = 0.005
_MAX_SIZE: Final = 0.2
_SIZE_STEP: Final = 0.02


class RejectReason(enum.StrEnum):
    """Why a sample did not teach. The last two are known to the caller only, who reports them.

    What runs before the first request (warm-up sweep, capture of graphs) is never a sample.
    """

    NOT_FINITE = "not_finite"
    NOT_POSITIVE = "not_positive"
    OUT_OF_RANGE = "out_of_range"
    NO_WORK = "no_work"
    OUTLIER = "outlier"
    FAILED_STEP = "failed_step"
    SWAP = "swap"


def check_sample(features: StepFeatures, latency_s: float) -> RejectReason | None:
    """Return why a sample cannot be used whatever the model believes, or None.

    Finite first, then the latency's sign and range (at most an hour), then features in [0, 10¹²]
    with some work.
    """
    if not math.isfinite(latency_s + sum(features)):
        return RejectReason.NOT_FINITE
    if latency_s <= 0.0:
        return RejectReason.NOT_POSITIVE
    if latency_s > MAX_LATENCY_S or min(features) < 0.0 or max(features) > MAX_FEATURE:
        return RejectReason.OUT_OF_RANGE
    if features.num_prefill_tokens <= 0.0 and features.num_decode_requests <= 0.0:
        return RejectReason.NO_WORK
    return None


class Verdict(NamedTuple):
    """What to do with a sample whose actual/predicted ratio was judged.

    `taught_ratio` is the ratio to learn (clipped), None for an outlier. `shift` is set on a change
    of speed: first multiply what is believed by it, then learn `taught_ratio` against the new
    belief.
    """

    taught_ratio: float | None
    shift: float | None = None
    is_cold: bool = False


class Screen:
    """Huber-like clipping of relative residuals, with a run-length escape hatch.

    Within `limit` = 5 typical residuals (at least 8 %) a sample teaches in full; beyond, as if it
    were at the limit (Huber, "Robust estimation of a location parameter", 1964); beyond a factor of
    8, not at all. `SHIFT_RUN` one-sided surprises in a row are a true change. The typical residual
    is the running median of |residual|, tracked by fixed relative steps, so that no single sample
    can move it by more than 2 %.
    """

    def __init__(self) -> None:
        self.num_accepted = 0
        self.is_on_trial = False
        self._size = _START_SIZE
        self._run: list[float] = []
        # Surprises in a row of an unknown kind, negative where they were quicker than predicted.
        self._num_unknown = 0

    @property
    def size(self) -> float:
        """Running median of |actual/predicted − 1|."""
        return self._size

    @property
    def limit(self) -> float:
        """Relative residual beyond which a sample is a surprise."""
        return max(_MIN_SURPRISE, _SURPRISE * self._size)

    def is_surprise(self, ratio: float) -> bool:
        """Whether actual/predicted is beyond the limit."""
        limit = self.limit
        # On the low side the same surprise is 1/(1 + limit): a ratio cannot fall by more than all
        # of it.
        return not 1.0 / (1.0 + limit) <= ratio <= 1.0 + limit

    def judge(self, ratio: float) -> Verdict:
        """Judge actual/predicted, finite and positive."""
        residual = ratio - 1.0
        limit = self.limit
        step = 1.0 + _SIZE_STEP if abs(residual) > self._size else 1.0 - _SIZE_STEP
        self._size = min(_MAX_SIZE, max(_MIN_SIZE, self._size * step))
        low, high = 1.0 / (1.0 + limit), 1.0 + limit
        if low <= ratio <= high:
            self._run.clear()
            self._num_unknown = 0
            self.num_accepted += 1
            self.is_on_trial = False
            return Verdict(ratio)
        if self._run and (self._run[-1] > 1.0) != (ratio > 1.0):
            self._run.clear()
        self._run.append(ratio)
        is_cold = self.num_accepted < COLD_SAMPLES
        if len(self._run) >= (COLD_SHIFT_RUN if is_cold else SHIFT_RUN):
            # The newest ones: the surprises before them have taught a little each, and have moved
            # the belief.
            factor = statistics.median(self._run[-COLD_SHIFT_RUN:])
            shift = min(_MAX_SHIFT, max(1.0 / _MAX_SHIFT, factor))
            self._run.clear()
            self.num_accepted += 1
            return Verdict(min(high, max(low, ratio / shift)), shift, is_cold)
        if not 1.0 / OUTLIER_FACTOR <= ratio <= OUTLIER_FACTOR:
            return Verdict(None)
        self.num_accepted += 1
        return Verdict(min(high, max(low, ratio)))

    def is_among_unknown(self, ratio: float) -> bool:
        """Whether a surprise goes on with a run of unknown steps: what they are found to take is
        learnt in more than one of them.
        """
        return self._num_unknown != 0 and (self._num_unknown > 0) == (ratio > 1.0)

    def judge_unknown(self, ratio: float) -> Verdict:
        """Judge a surprise of a kind that the belief does not know.

        Such steps say nothing of the speed of those that are known: they teach what they take. A
        lone one may be an outlier and teaches no more than any surprise before another one agrees;
        far beyond the belief `SHIFT_RUN` have to.
        """
        if not self.is_among_unknown(ratio):
            self._num_unknown = 0
        self._num_unknown += 1 if ratio > 1.0 else -1
        num = abs(self._num_unknown)
        is_near = 1.0 / OUTLIER_FACTOR <= ratio <= OUTLIER_FACTOR
        if num > MAX_UNKNOWN_RUN:
            # This is no matter of kinds: the next one is judged like any other.
            self._num_unknown = 0
        if num >= (2 if is_near else SHIFT_RUN):
            return Verdict(ratio)
        high = 1.0 + self.limit
        return Verdict(min(high, max(1.0 / high, ratio)) if is_near else None)

    def put_on_trial(self) -> None:
        """Start counting surprises anew: the belief was moved by what another screen saw.

        On trial until a sample is no surprise.
        """
        self.is_on_trial = True
        self._run.clear()

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON numbers."""
        return {
            "num_accepted": self.num_accepted,
            "is_on_trial": int(self.is_on_trial),
            "size": self._size,
            "run": list(self._run),
            "num_unknown": self._num_unknown,
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], path: str) -> Screen:
        """Rebuild from `state()`; SnapshotError names the field below `path` that is wrong."""
        screen = cls()
        screen.num_accepted = read_count(state, "num_accepted", path)
        screen.is_on_trial = read_number(state, "is_on_trial", path, 0.0, 1.0) == 1.0
        screen._size = read_number(state, "size", path, _MIN_SIZE, _MAX_SIZE)
        screen._run = read_numbers(state, "run", path, SHIFT_RUN)
        if any(not 0.0 <= ratio <= MAX_RATIO for ratio in screen._run):
            raise SnapshotError(f"{path}.run", f"must be in [0, {MAX_RATIO:g}]")
        # Snapshots that are older than it have none.
        if "num_unknown" in state:
            bound = float(MAX_UNKNOWN_RUN)
            screen._num_unknown = int(read_number(state, "num_unknown", path, -bound, bound))
        return screen
