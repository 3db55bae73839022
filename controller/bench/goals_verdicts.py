"""Verdicts: a number against a goal, and by how much it was missed.

Owns `Check` and the ratio of two goodputs. Must not simulate or print.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from controller.bench.goals_ladder import Curve


class Verdict(enum.StrEnum):
    """What became of a goal in one case."""

    MET = "met"
    MISSED = "missed"
    OPEN = "open"
    MISSING = "not measured"
    REPORTED = "no goal"


class Sign(enum.StrEnum):
    """How a number is to be read: as it stands, as a bound, or as nothing."""

    EXACT = ""
    AT_LEAST = "≥"
    AT_MOST = "≤"
    UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class Measured:
    """A number over seeds: the middle one, the smallest, the largest."""

    value: float
    low: float
    high: float
    sign: Sign = Sign.EXACT

    @classmethod
    def of(cls, values: Sequence[float], sign: Sign = Sign.EXACT) -> Measured:
        """Describe the values; ValueError without one."""
        if not values:
            raise ValueError("values must not be empty")
        return cls(statistics.median(values), min(values), max(values), sign)


@dataclass(frozen=True, slots=True)
class Check:
    """One goal in one case.

    `wanted` is a least value where `is_least`, otherwise a most one; both are in `unit` (`×`, `%`
    or nothing). `wanted` None is no goal: the number is only reported. `measured` is None where
    there is no number, `note` says why, or what else counts. `holds_beside` is whether a condition
    beside the number holds (equal attainment, for example). `is_open` says of an absent number that
    it was looked for, and that what was found does not tell.
    """

    goal: str
    claim: str
    case: str
    wanted: float | None
    is_least: bool
    unit: str
    measured: Measured | None
    note: str = ""
    holds_beside: bool = True
    is_open: bool = False

    @property
    def verdict(self) -> Verdict:
        """Whether the goal is met; a bound that does not tell is open."""
        found = self.measured
        if self.wanted is None:
            return Verdict.REPORTED
        if found is None:
            return Verdict.OPEN if self.is_open else Verdict.MISSING
        if not self.holds_beside:
            return Verdict.MISSED
        is_good = found.value >= self.wanted if self.is_least else found.value <= self.wanted
        # A bound from the side of the goal tells; one from the other side does not.
        bad_news, good_news = (
            (Sign.AT_MOST, Sign.AT_LEAST) if self.is_least else (Sign.AT_LEAST, Sign.AT_MOST)
        )
        if found.sign is Sign.UNKNOWN or found.sign is (bad_news if is_good else good_news):
            return Verdict.OPEN
        return Verdict.MET if is_good else Verdict.MISSED

    @property
    def margin(self) -> float | None:
        """By how much the goal is met (positive) or missed, as a share of it; None unmeasured, or
        without a goal.

        Where the goal is 0, the measured number itself, negative.
        """
        if self.measured is None or self.wanted is None:
            return None
        value = self.measured.value
        if self.wanted == 0.0:
            return value if self.is_least else -value
        share = value / self.wanted - 1.0
        return share if self.is_least else -share

    def to_json(self) -> dict[str, Any]:
        """Return the check as JSON values."""
        return asdict(self) | {"verdict": self.verdict.value, "margin": self.margin}


def goodput_ratio(ours: Curve, theirs: Curve, level: float) -> Measured | None:
    """Return our goodput over theirs, seed by seed; None where both are below all rates.

    Where every rate held, or none did, the lowest or highest rate that was tried stands in, and the
    ratio is a bound. Where the mean of ours holds nowhere and theirs does, it is one of the means.
    """
    if ours.goodput(level).rate is None:
        their_rate = theirs.goodput(level).rate
        if their_rate is None:
            return None
        return Measured.of([ours.lowest_rate / their_rate], Sign.AT_MOST)
    ratios = []
    is_least = is_most = False
    pairs = zip(ours.goodput_by_seed(level), theirs.goodput_by_seed(level), strict=True)
    for our, their in pairs:
        is_least |= our.is_bound or their.rate is None
        is_most |= their.is_bound or our.rate is None
        over = theirs.lowest_rate if their.rate is None else their.rate
        under = ours.lowest_rate if our.rate is None else our.rate
        ratios.append(under / over)
    signs = {
        (False, False): Sign.EXACT,
        (True, False): Sign.AT_LEAST,
        (False, True): Sign.AT_MOST,
        (True, True): Sign.UNKNOWN,
    }
    return Measured.of(ratios, signs[is_least, is_most])


def percent(share: float) -> str:
    """Return a share as text: `90 %`."""
    return f"{100.0 * share:.0f} %"


def shown(found: Measured | None, unit: str = "") -> str:
    """Return a number with its spread as text; a dash where there is none."""
    if found is None:
        return "–"
    text = f"{found.sign.value} {_with_unit(found.value, unit)}".strip()
    if math.isclose(found.low, found.high, rel_tol=1e-9, abs_tol=1e-12):
        return text
    return f"{text} ({_number(found.low, unit)}–{_number(found.high, unit)})"


def wanted_text(check: Check) -> str:
    """Return the goal as text: `≥ 1.60×`; a dash without one."""
    if check.wanted is None:
        return "–"
    return f"{'≥' if check.is_least else '≤'} {_with_unit(check.wanted, check.unit)}"


def _with_unit(value: float, unit: str) -> str:
    return f"{_number(value, unit)}{' %' if unit == '%' else unit}"


def _number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100.0 * value:.1f}"
    if unit == "" and value == int(value):
        return f"{value:.0f}"
    return f"{value:.2f}"
