"""One spike as it happened, and the numbers that are quoted from it.

Owns the frozen record of a run and the derivation of its numbers. Must not decide whether the run
may be quoted: that is `validity.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.bench.scenario import Promises, SpikeScenario
from controller.bench.series import (
    RequestSeries,
    largest_gap,
    normal_gap_s,
    tokens_per_second,
)


@dataclass(frozen=True, slots=True)
class SpikeRun:
    """What the client saw of one spike; instants in seconds on its clock.

    `calibrated_gap_s` is the median gap of the calm phase before it, on the same server. `long` is
    None if the long request was never sent because the short ones did not get that far.
    """

    scenario: SpikeScenario
    promises: Promises
    calibrated_gap_s: float
    shorts: tuple[RequestSeries, ...]
    long: RequestSeries | None


@dataclass(frozen=True, slots=True)
class SpikeNumbers:
    """The numbers of one run: seconds, tokens per second.

    `largest_gap_s` is over the whole run of the short requests. `is_largest_at_arrival` tells
    whether that gap was open when the long prompt arrived. `num_merged_reads` counts reads that
    delivered several tokens of a short request at once.
    """

    largest_gap_s: float
    is_largest_at_arrival: bool
    normal_gap_s: float
    long_ttft_s: float
    tokens_per_second: float
    target_gap_s: float | None
    num_merged_reads: int

    @property
    def gap_ratio(self) -> float:
        """Largest over normal gap: how much the neighbours notice of the long prompt."""
        return self.largest_gap_s / self.normal_gap_s


def numbers_of(run: SpikeRun) -> SpikeNumbers:
    """Return the numbers of a run; ValueError if one is undefined (such a run is invalid)."""
    if run.long is None:
        raise ValueError("the long request was never sent")
    largest = largest_gap(run.shorts)
    normal_s = normal_gap_s(run.shorts, until=run.long.sent_at)
    speed = tokens_per_second((*run.shorts, run.long))
    ttft_s = run.long.ttft_s
    if largest is None or not normal_s or speed is None or ttft_s is None:
        raise ValueError("too few tokens came to speak of gaps, TTFT and speed")
    return SpikeNumbers(
        largest_gap_s=largest.duration_s,
        is_largest_at_arrival=largest.spans(run.long.sent_at),
        normal_gap_s=normal_s,
        long_ttft_s=ttft_s,
        tokens_per_second=speed,
        target_gap_s=run.promises.short_tpot_s,
        num_merged_reads=sum(series.num_merged_reads for series in run.shorts),
    )
