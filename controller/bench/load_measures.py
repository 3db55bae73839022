"""From what the client saw to promises kept: one outcome per offered request, numbers per class.

Owns definitions and arithmetic. Must not measure, nor decide whether a run may be quoted.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from controller.bench.load_run import LoadRun, OfferedRequest
from controller.bench.series import largest_gap
from controller.policy.slo import SloClass
from controller.simulation.measures import Percentiles

REFUSED_STATUS: Final = 429
EVERYBODY: Final = "all"
"""The group of all classes together."""


class Fate(enum.StrEnum):
    """What became of an offered request."""

    SERVED = "served"
    REFUSED = "refused"
    UNSERVED = "unserved"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One offered request; seconds count from its scheduled arrival, so lateness is in them.

    `ttft_s` is None without a token, `tpot_s` below two: (t_last - t_first) / (n - 1).
    `longest_gap_s` is None below two reads. `is_kept` says whether it was served and met every
    target; without targets it is enough to be served. `reason` is a refusal's, or the error.
    """

    index: int
    slo_class: str
    at_s: float
    num_prompt_tokens: int
    num_wanted_tokens: int
    num_output_tokens: int
    fate: Fate
    reason: str
    retry_after_s: float | None
    is_degraded: bool
    late_s: float
    ttft_s: float | None
    tpot_s: float | None
    longest_gap_s: float | None
    is_kept: bool


def outcomes_of(run: LoadRun, classes: Mapping[str, SloClass]) -> tuple[Outcome, ...]:
    """Judge every request of a run; KeyError on an unknown class."""
    origin = min((each.due_at for each in run.requests), default=0.0)
    return tuple(_outcome(each, classes[each.slo_class], origin) for each in run.requests)


def _outcome(offered: OfferedRequest, slo_class: SloClass, origin: float) -> Outcome:
    series = offered.series
    fate = _fate_of(offered)
    first_at, last_at, num = series.first_token_at, series.last_token_at, series.num_output_tokens
    ttft_s = None if first_at is None else first_at - offered.due_at
    tpot_s = None
    if first_at is not None and last_at is not None and num > 1:
        tpot_s = (last_at - first_at) / (num - 1)
    gap = largest_gap([series])
    slo = slo_class.slo
    is_kept = fate is Fate.SERVED and _is_within(ttft_s, slo.ttft_s) and (
        num < 2 or _is_within(tpot_s, slo.tpot_s)
    )  # fmt: skip
    return Outcome(
        index=offered.index,
        slo_class=offered.slo_class,
        at_s=offered.due_at - origin,
        num_prompt_tokens=offered.num_prompt_tokens,
        num_wanted_tokens=offered.num_wanted_tokens,
        num_output_tokens=num,
        fate=fate,
        reason=series.dropped_reason or series.error or "",
        retry_after_s=series.retry_after_s,
        is_degraded=series.decision == "degraded",
        late_s=offered.late_s,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        longest_gap_s=None if gap is None else gap.duration_s,
        is_kept=is_kept,
    )


def _fate_of(offered: OfferedRequest) -> Fate:
    if offered.is_cut:
        return Fate.UNSERVED
    if offered.series.status == REFUSED_STATUS:
        return Fate.REFUSED
    return Fate.SERVED if offered.series.error is None else Fate.FAILED


def _is_within(actual_s: float | None, target_s: float | None) -> bool:
    """Whether a target is met; one without a measurement is not."""
    return target_s is None or (actual_s is not None and actual_s <= target_s)


@dataclass(frozen=True, slots=True)
class GroupNumbers:
    """Offered requests of one class (or all) in numbers; seconds.

    `attainment` is the share of OFFERED requests that met every target. Percentiles are over the
    requests that have such a number. `refusals` counts by reason; `retry_after_s` is over those
    refusals that said when to come back.
    """

    name: str
    num_offered: int
    num_kept: int
    num_served: int
    num_unserved: int
    num_failed: int
    num_degraded: int
    refusals: dict[str, int]
    retry_after_s: Percentiles | None
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    gap_s: Percentiles | None

    @property
    def attainment(self) -> float:
        """Share of offered requests that met every target."""
        return self.num_kept / self.num_offered

    @property
    def num_refused(self) -> int:
        """How many were refused, for whatever reason."""
        return sum(self.refusals.values())


@dataclass(frozen=True, slots=True)
class LoadNumbers:
    """One run in numbers: `groups` holds everybody first, then the classes by name.

    `goodput` is requests per second that met every target, over the span of arrivals at the rate
    that was asked for. `late_s` is the client's own lateness.
    """

    groups: tuple[GroupNumbers, ...]
    goodput: float
    late_s: Percentiles

    def group(self, name: str) -> GroupNumbers | None:
        """Return the numbers of a class, None if nobody of it arrived."""
        return next((each for each in self.groups if each.name == name), None)


def numbers_of(outcomes: Sequence[Outcome], duration_s: float) -> LoadNumbers:
    """Return the numbers of a run whose arrivals spanned `duration_s`; ValueError of nobody."""
    late_s = Percentiles.of(each.late_s for each in outcomes)
    if late_s is None:
        raise ValueError("nobody was offered")
    names = sorted({each.slo_class for each in outcomes})
    groups = [
        group_of(EVERYBODY, outcomes),
        *(group_of(name, [o for o in outcomes if o.slo_class == name]) for name in names),
    ]
    return LoadNumbers(tuple(groups), groups[0].num_kept / duration_s, late_s)


def group_of(name: str, outcomes: Sequence[Outcome]) -> GroupNumbers:
    """Return the numbers of a group that is not empty."""
    refused = [each for each in outcomes if each.fate is Fate.REFUSED]
    return GroupNumbers(
        name=name,
        num_offered=len(outcomes),
        num_kept=sum(each.is_kept for each in outcomes),
        num_served=_count(outcomes, Fate.SERVED),
        num_unserved=_count(outcomes, Fate.UNSERVED),
        num_failed=_count(outcomes, Fate.FAILED),
        num_degraded=sum(each.is_degraded for each in outcomes),
        refusals=_by_reason(refused),
        retry_after_s=Percentiles.of(each.retry_after_s for each in refused),
        ttft_s=Percentiles.of(each.ttft_s for each in outcomes),
        tpot_s=Percentiles.of(each.tpot_s for each in outcomes),
        gap_s=Percentiles.of(each.longest_gap_s for each in outcomes),
    )


def _count(outcomes: Iterable[Outcome], fate: Fate) -> int:
    return sum(each.fate is fate for each in outcomes)


def _by_reason(refused: Iterable[Outcome]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for each in refused:
        counts[each.reason] = counts.get(each.reason, 0) + 1
    return dict(sorted(counts.items()))
