"""The ladder: which rates are tried, and what a policy is worth on them.

Owns the walk to the rates at which attainment falls below a level, and the race of static budgets.
Must not simulate: attainment is asked for through a function.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from controller.simulation.goodput import Goodput, LoadPoint, goodput

RATIO: Final = 1.15
"""From one rung to the next. Rung k is 1.15^k requests per second, for every case and policy."""
DEPTH: Final = 16
"""How many rungs below the first guess are tried: a ninth of its rate."""
HEIGHT: Final = 12
_PATIENCE: Final = 4
# A rung's rate is that rung, whatever its logarithm is rounded to.
_ROUNDING: Final = 1e-9
_LOST: Final = 0.02
_FIRST_BUDGET: Final = 512.0

Attain = Callable[[str, int, Sequence[int]], Sequence[float]]
"""Called with (policy, rung, seeds); returns the share of offered requests kept, by seed."""


def rate_of(rung: int) -> float:
    """Return the requests per second of a rung."""
    return float(RATIO**rung)


def rung_near(rate: float) -> int:
    """Return the rung whose rate is nearest by ratio; ValueError unless `rate` is positive."""
    if not (math.isfinite(rate) and rate > 0.0):
        raise ValueError(f"rate must be a positive number, got {rate}")
    return round(math.log(rate, RATIO))


def rung_above(rate: float) -> int:
    """Return the lowest rung whose rate is more than `rate`, which must be positive."""
    return math.floor(math.log(rate, RATIO) + _ROUNDING) + 1


@dataclass(frozen=True, slots=True)
class Span:
    """The rungs that may be tried, both ends included."""

    floor: int
    ceiling: int

    @classmethod
    def around(cls, rung: int) -> Span:
        """Return the span around a first guess."""
        return cls(rung - DEPTH, rung + HEIGHT)


@dataclass(frozen=True, slots=True)
class Curve:
    """Attainment of a policy by rung, lowest first, and there by seed in the order of `seeds`.

    Rungs between two that matter may be missing.
    """

    policy: str
    seeds: tuple[int, ...]
    points: tuple[tuple[int, tuple[float, ...]], ...]

    def goodput(self, level: float) -> Goodput:
        """Return the goodput of the mean over seeds."""
        return goodput(
            [LoadPoint(rate_of(rung), statistics.fmean(values)) for rung, values in self.points],
            level,
        )

    def goodput_by_seed(self, level: float) -> list[Goodput]:
        """Return the goodput of each seed's own curve."""
        return [
            goodput([LoadPoint(rate_of(rung), values[i]) for rung, values in self.points], level)
            for i in range(len(self.seeds))
        ]

    @property
    def lowest_rate(self) -> float:
        """The lowest rate that was tried with all seeds."""
        return rate_of(self.points[0][0])

    def to_json(self) -> dict[str, Any]:
        """Return the curve as JSON values, rates in requests per second."""
        return {
            "policy": self.policy,
            "seeds": list(self.seeds),
            "points": [
                {"rate": rate_of(rung), "attainment": list(values)} for rung, values in self.points
            ],
        }


def walk(
    attain: Attain,
    policy: str,
    levels: Sequence[float],
    seeds: Sequence[int],
    start: int,
    span: Span,
) -> Curve:
    """Find, for every level, the neighbouring rungs between which each seed falls below it.

    The first seed scouts: up from `start` until it is below all levels, down until it holds them
    all. Then all seeds are tried at the two rungs around each fall, and further up or down until
    each of them, and their mean, has fallen and has held, or the span ends.
    """
    seeds = tuple(seeds)
    falls = _scout(attain, policy, levels, seeds[0], start, span)
    full: dict[int, tuple[float, ...]] = {}

    def at(rung: int) -> tuple[float, ...]:
        if rung not in full:
            full[rung] = tuple(attain(policy, rung, seeds))
        return full[rung]

    for level, fall in zip(levels, falls, strict=True):
        low, high = max(fall - 1, span.floor), min(fall, span.ceiling)
        while not _has_held(at(low), level) and low > span.floor:
            low -= 1
        while not _has_fallen([at(rung) for rung in range(low, high + 1)], level):
            if high >= span.ceiling:
                break
            high += 1
    return Curve(policy, seeds, tuple(sorted(full.items())))


def _scout(
    attain: Attain, policy: str, levels: Sequence[float], seed: int, start: int, span: Span
) -> list[int]:
    """Return, for each level, the lowest rung at which one seed is below it.

    One rung above the span's ceiling where it never is; the floor where it is everywhere.
    """
    seen: dict[int, float] = {}

    def at(rung: int) -> float:
        if rung not in seen:
            seen[rung] = attain(policy, rung, (seed,))[0]
        return seen[rung]

    start = min(max(start, span.floor), span.ceiling)
    rung = start
    while at(rung) >= min(levels) and rung < span.ceiling:
        rung += 1
    rung = start
    while at(rung) < max(levels) and rung > span.floor:
        # A level that is out of reach anywhere is not looked for step by step.
        if start - rung == _PATIENCE and at(span.floor) < max(levels):
            lower = [level for level in levels if at(span.floor) >= level]
            while lower and at(rung) < max(lower) and rung > span.floor:
                rung -= 1
            break
        rung -= 1
    falls = []
    for level in levels:
        below = [rung for rung, value in seen.items() if value < level]
        falls.append(min(below, default=span.ceiling + 1))
    return falls


def _has_held(values: Sequence[float], level: float) -> bool:
    return min(values) >= level


def _has_fallen(points: Sequence[Sequence[float]], level: float) -> bool:
    """Whether every seed, and the mean, was below the level at one of the rungs."""
    is_each = all(min(values) < level for values in zip(*points, strict=True))
    return is_each and min(statistics.fmean(values) for values in points) < level


class Race:
    """Scores policies for `search_budget`: how far up the ladder each of them holds a level.

    A score is (rung at which it first fails, mean attainment of the seeds there). Whoever comes
    later begins at the rung at which the best so far failed, and if it fails there too must hold
    the one below: how much of a collapse is left says nothing. A loser costs two runs, not a walk,
    and its score is the lower of the two, where it lost. Where the first seed is two points below
    the level, the others are not asked.
    """

    def __init__(
        self, attain: Attain, level: float, seeds: Sequence[int], start: int, span: Span
    ) -> None:
        self._attain = attain
        self._level = level
        self._seeds = tuple(seeds)
        self._span = span
        self._next = min(max(start, span.floor), span.ceiling)
        self._is_first = True
        self.scores: dict[str, tuple[float, float]] = {}

    def __call__(self, policies: Sequence[str]) -> list[tuple[float, float]]:
        """Return the scores of the policies, in their order."""
        for policy in sorted(policies, key=_from_the_middle):
            self.scores[policy] = self._score(policy)
        return [self.scores[policy] for policy in policies]

    def _score(self, policy: str) -> tuple[float, float]:
        rung = self._next
        value = self._at(policy, rung)
        while value >= self._level and rung < self._span.ceiling:
            rung += 1
            value = self._at(policy, rung)
        if rung == self._next:
            # The first one has nobody to lose against: how far down does it have to go? For the
            # others one rung tells.
            while rung > self._span.floor:
                below = self._at(policy, rung - 1)
                if below >= self._level:
                    break
                rung, value = rung - 1, below
                if not self._is_first:
                    break
        # Whoever lost says nothing about where the next one should begin.
        self._next = rung if self._is_first else max(rung, self._next)
        self._is_first = False
        return float(rung), value

    def _at(self, policy: str, rung: int) -> float:
        first = self._attain(policy, rung, self._seeds[:1])
        if first[0] < self._level - _LOST:
            return first[0]
        return statistics.fmean([*first, *self._attain(policy, rung, self._seeds[1:])])


def _from_the_middle(policy: str) -> tuple[float, str]:
    """Sort budgets by their distance from 512 tokens: a good first one makes losers cheap."""
    digits = "".join(each for each in policy if each.isdigit())
    budget = float(digits) if digits else _FIRST_BUDGET
    return abs(math.log(max(budget, 1.0) / _FIRST_BUDGET)), policy
