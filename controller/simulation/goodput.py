"""Goodput: the highest rate at which promises are kept, read off a sweep over load.

Owns that arithmetic. Must not run a simulation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Attainment (share of offered requests) at an offered rate in requests per second."""

    rate: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """The rate at which attainment falls below `level`, interpolated between two points.

    `rate` is None where not even the lowest rate held. `is_bound` says that every rate held, so
    that the goodput is at least the highest one.
    """

    level: float
    rate: float | None
    is_bound: bool


def goodput(points: Iterable[LoadPoint], level: float) -> Goodput:
    """Return the highest rate up to which every point holds `level`, interpolated linearly to where
    the next one does not.

    A rate that holds again beyond one that does not is luck, and is not counted. Points at the same
    rate (seeds) count by their mean. ValueError without a point, or for a level outside (0, 1].
    """
    if not 0.0 < level <= 1.0:
        raise ValueError(f"level must be in (0, 1], got {level}")
    curve = mean_curve(points)
    if not curve:
        raise ValueError("points must not be empty")
    if curve[0].attainment < level:
        return Goodput(level, None, False)
    for low, high in itertools.pairwise(curve):
        if high.attainment < level:
            share = (low.attainment - level) / (low.attainment - high.attainment)
            return Goodput(level, low.rate + share * (high.rate - low.rate), False)
    return Goodput(level, curve[-1].rate, True)


def shown(found: Goodput, by_seed: Sequence[Goodput] = ()) -> str:
    """Return a goodput as text: `≥` where every load held, "below all" where none did.

    More than one seed adds the smallest and the largest.
    """
    if found.rate is None:
        return "below all"
    text = f"{'≥ ' if found.is_bound else ''}{found.rate:.2f}"
    if len(by_seed) > 1:
        # At least as low as the lowest load is no number.
        rates = sorted(each.rate for each in by_seed if each.rate is not None)
        low = f"{rates[0]:.2f}" if len(rates) == len(by_seed) else "below all"
        high = f"{rates[-1]:.2f}" if rates else "below all"
        if low != high:
            text += f" ({low}–{high})"
    return text


def mean_curve(points: Iterable[LoadPoint]) -> list[LoadPoint]:
    """Return one point per rate, lowest first, with the mean attainment of those at that rate."""
    by_rate: dict[float, list[float]] = {}
    for point in points:
        by_rate.setdefault(point.rate, []).append(point.attainment)
    return [LoadPoint(rate, sum(v) / len(v)) for rate, v in sorted(by_rate.items())]


def crossovers(
    first: Sequence[LoadPoint], second: Sequence[LoadPoint], least_lead: float = 0.0
) -> list[float]:
    """Return the rates at which two curves over the same rates change places, interpolated.

    Rates that only one of them has are left out; curves that touch without crossing do not cross.
    Whoever is ahead by no more than `least_lead` does not lead.
    """
    theirs = {point.rate: point.attainment for point in mean_curve(second)}
    gaps = [
        (point.rate, point.attainment - theirs[point.rate])
        for point in mean_curve(first)
        if point.rate in theirs
    ]
    # Where they agree nobody leads: the crossing is between the last lead and the next one.
    leads = [(rate, gap) for rate, gap in gaps if abs(gap) > least_lead]
    return [
        a_rate + a_gap / (a_gap - b_gap) * (b_rate - a_rate)
        for (a_rate, a_gap), (b_rate, b_gap) in itertools.pairwise(leads)
        if a_gap * b_gap < 0.0
    ]
