"""Mixed loads over all rounds: one row per policy and rate, ratios taken within a round.

Owns aggregation. Must not measure or print: a run with a violation gives no number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from controller.bench.load_measures import EVERYBODY, GroupNumbers, LoadNumbers, Outcome
from controller.bench.load_rounds import LoadResult, LoadSession
from controller.bench.report import Spread
from controller.simulation.goodput import Goodput, LoadPoint, goodput
from controller.simulation.measures import NUM_DECILES, Percentiles

STATIC_PREFIX: Final = "static-"
LEVELS: Final = (0.9, 0.99)
"""Attainment at which goodput is read off the rates."""


@dataclass(frozen=True, slots=True)
class Tail:
    """P50, P90 and P99 of one quantity in seconds, each the median over rounds and its spread."""

    p50: Spread
    p90: Spread
    p99: Spread


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One class (or all) under one policy at one rate.

    Shares are of offered requests. `tpot_p90_vs_static` compares with the best static budget of the
    same rate and round. `refusals` are summed over rounds, by reason; `num_retry_after` of them
    said when to come back, `retry_after_s` is the median of what they said.
    """

    name: str
    num_offered: int
    attainment: Spread
    refused: Spread
    unserved: Spread
    degraded: Spread
    ttft_s: Tail | None
    tpot_s: Tail | None
    gap_s: Tail | None
    tpot_p90_vs_static: Spread | None
    refusals: dict[str, int]
    num_retry_after: int
    retry_after_s: Spread | None


@dataclass(frozen=True, slots=True)
class Decile:
    """A tenth of the offered requests of all rounds by prompt length, shortest first.

    `longest_prompt` is in tokens, `attainment` a share of the offered ones.
    """

    longest_prompt: int
    num_offered: int
    attainment: float


@dataclass(frozen=True, slots=True)
class LoadRow:
    """One policy at one rate (requests per second) over all rounds; `groups` has everybody first.

    `goodput` counts requests per second that met every target; `goodput_vs_static` compares with
    the best static budget of the same rate and round, `best_static` names it (None = none valid).
    Groups, deciles and numbers are empty or None without a valid round.
    """

    key: str
    label: str
    rate: float
    num_rounds: int
    num_valid: int
    goodput: Spread | None
    goodput_vs_static: Spread | None
    best_static: str | None
    late_p99_s: Spread | None
    groups: tuple[ClassRow, ...]
    deciles: tuple[Decile, ...]


def rows_of(session: LoadSession) -> list[LoadRow]:
    """Return one row per rate and policy, in the order in which they were measured."""
    rows: list[LoadRow] = []
    for rate in session.terms.rates:
        results = [each for each in session.results if each.rate == rate]
        best = best_static(results)
        reference = {
            each.round_no: each.numbers
            for each in results
            if each.key == best and each.numbers is not None
        }
        keys = dict.fromkeys(each.key for each in results)
        rows += [_row([r for r in results if r.key == key], best, reference) for key in keys]
    return rows


def best_static(results: Sequence[LoadResult]) -> str | None:
    """Return the static budget that kept most promises among results of one rate, None without one.

    Among equals the first one measured.
    """
    kept: dict[str, list[float]] = {}
    for each in results:
        if each.key.startswith(STATIC_PREFIX) and each.numbers is not None:
            kept.setdefault(each.key, []).append(each.numbers.groups[0].attainment)
    return max(kept, key=lambda key: sum(kept[key]) / len(kept[key]), default=None)


def goodputs(session: LoadSession) -> dict[str, tuple[Goodput, ...]]:
    """Return the goodput of every policy at each of `LEVELS`, rounds at one rate by their mean.

    A policy without a valid run has none.
    """
    points: dict[str, list[LoadPoint]] = {}
    for each in session.results:
        if each.numbers is not None:
            point = LoadPoint(each.rate, each.numbers.groups[0].attainment)
            points.setdefault(each.key, []).append(point)
    return {key: tuple(goodput(of, level) for level in LEVELS) for key, of in points.items()}


def _row(
    results: Sequence[LoadResult], best: str | None, reference: Mapping[int, LoadNumbers]
) -> LoadRow:
    valid = [(each.round_no, each.numbers) for each in results if each.numbers is not None]
    names = dict.fromkeys(group.name for _, numbers in valid for group in numbers.groups)
    first = results[0]
    return LoadRow(
        key=first.key,
        label=first.label,
        rate=first.rate,
        num_rounds=len(results),
        num_valid=len(valid),
        goodput=Spread.of([numbers.goodput for _, numbers in valid]),
        goodput_vs_static=Spread.of(
            [
                numbers.goodput / reference[round_no].goodput
                for round_no, numbers in valid
                if round_no in reference and reference[round_no].goodput > 0
            ]
        ),
        best_static=best,
        late_p99_s=Spread.of([numbers.late_s.p99 for _, numbers in valid]),
        groups=tuple(_class_row(name, valid, reference) for name in names),
        deciles=_deciles(
            [o for each in results if each.numbers is not None for o in each.outcomes]
        ),
    )


def _deciles(outcomes: Sequence[Outcome]) -> tuple[Decile, ...]:
    """Return tenths of as equal sizes as can be; fewer where there are fewer than ten requests."""
    ordered = sorted(outcomes, key=lambda each: each.num_prompt_tokens)
    parts = [
        ordered[len(ordered) * tenth // NUM_DECILES : len(ordered) * (tenth + 1) // NUM_DECILES]
        for tenth in range(NUM_DECILES)
    ]
    return tuple(
        Decile(part[-1].num_prompt_tokens, len(part), sum(o.is_kept for o in part) / len(part))
        for part in parts
        if part
    )


def _class_row(
    name: str, valid: Sequence[tuple[int, LoadNumbers]], reference: Mapping[int, LoadNumbers]
) -> ClassRow:
    found = [
        (round_no, group)
        for round_no, numbers in valid
        if (group := numbers.group(name)) is not None
    ]
    groups = [group for _, group in found]

    def share(count: Callable[[GroupNumbers], float]) -> Spread:
        spread = Spread.of([count(group) / group.num_offered for group in groups])
        assert spread is not None  # noqa: S101 - the name comes from one of the groups
        return spread

    refusals: dict[str, int] = {}
    for group in groups:
        for reason, count in group.refusals.items():
            refusals[reason] = refusals.get(reason, 0) + count
    return ClassRow(
        name=name,
        num_offered=sum(group.num_offered for group in groups),
        attainment=share(lambda group: group.num_kept),
        refused=share(lambda group: group.num_refused),
        unserved=share(lambda group: group.num_unserved),
        degraded=share(lambda group: group.num_degraded),
        ttft_s=_tail([group.ttft_s for group in groups]),
        tpot_s=_tail([group.tpot_s for group in groups]),
        gap_s=_tail([group.gap_s for group in groups]),
        tpot_p90_vs_static=_tpot_ratio(name, found, reference),
        refusals=dict(sorted(refusals.items())),
        num_retry_after=sum(
            group.retry_after_s.num for group in groups if group.retry_after_s is not None
        ),
        retry_after_s=Spread.of(
            [group.retry_after_s.p50 for group in groups if group.retry_after_s is not None]
        ),
    )


def _tpot_ratio(
    name: str,
    found: Sequence[tuple[int, GroupNumbers]],
    reference: Mapping[int, LoadNumbers],
) -> Spread | None:
    ratios = []
    for round_no, group in found:
        other = reference[round_no].group(name) if round_no in reference else None
        if group.tpot_s is not None and other is not None and other.tpot_s is not None:
            ratios.append(group.tpot_s.p90 / other.tpot_s.p90)
    return Spread.of(ratios)


def _tail(percentiles: Sequence[Percentiles | None]) -> Tail | None:
    known = [each for each in percentiles if each is not None]
    p50, p90, p99 = (
        Spread.of([getattr(each, name) for each in known]) for name in ("p50", "p90", "p99")
    )
    return None if p50 is None or p90 is None or p99 is None else Tail(p50, p90, p99)


def everybody(row: LoadRow) -> ClassRow | None:
    """Return the numbers of all classes together, None without a valid round."""
    return next((group for group in row.groups if group.name == EVERYBODY), None)
