"""Whether a restored model still describes this machine, told by a few timed steps.

Owns the verdict. Must not run a step or read a snapshot.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from costmodel.features import StepFeatures
from costmodel.hygiene import check_sample
from costmodel.judged import JudgedPlanes

# Within that factor the machine is the one that was stored: a handful of steps tells no more.
SAME_SPEED: Final = 1.2
# Beyond it, it is another machine under the same name.
MAX_SCALE: Final = 4.0
# A model that is right about the kinds of work is right about each but for one factor.
MAX_SPREAD: Final = 0.35


@dataclass(frozen=True, slots=True)
class WarmStartVerdict:
    """`problem` says why the model must not be used, None if it may be.

    `scale` is the median of measured / predicted, `spread` the mean distance from it, as a share;
    both over `num_steps` steps.
    """

    problem: str | None
    scale: float
    spread: float
    num_steps: int

    @property
    def is_same_speed(self) -> bool:
        """Whether the machine is as fast as it was."""
        return 1.0 / SAME_SPEED <= self.scale <= SAME_SPEED


def judge_restored(
    model: JudgedPlanes, samples: Sequence[tuple[StepFeatures, float]]
) -> WarmStartVerdict:
    """Compare a restored model with (features, seconds) of a few steps of every kind.

    Nothing usable to compare with is no objection: the model is taken as it is.
    """
    usable = [sample for sample in samples if check_sample(*sample) is None]
    if not usable:
        return WarmStartVerdict(None, 1.0, 0.0, 0)
    predicted_s = model.predict(np.array([features for features, _ in usable])).mean_s.tolist()
    ratios = [latency_s / mean for (_, latency_s), mean in zip(usable, predicted_s, strict=True)]
    scale = statistics.median(ratios)
    # A mean, so that one kind of work out of four counts; bounded, so that one bad step does not.
    spread = statistics.mean(min(1.0, abs(ratio / scale - 1.0)) for ratio in ratios)
    problem = None
    if not 1.0 / MAX_SCALE <= scale <= MAX_SCALE:
        problem = f"steps take {scale:.2f} times what the stored model says"
    elif spread > MAX_SPREAD:
        problem = f"the stored model misses the kinds of work by {spread:.0%}"
    return WarmStartVerdict(problem, scale, spread, len(usable))


def fit_to_speed(model: JudgedPlanes, verdict: WarmStartVerdict) -> None:
    """Let a restored model follow a machine that is faster or slower than it was."""
    if not verdict.is_same_speed:
        model.change_speed(verdict.scale)
