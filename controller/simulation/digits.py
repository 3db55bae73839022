"""Numbers as people read them: three digits, the unit elsewhere, a dash where there is none.

Owns how many digits a report shows. Must not know what a number means.
"""

from __future__ import annotations

import math
from typing import Final

MISSING: Final = "–"


def plain(value: float | None) -> str:
    """Return three significant digits without an exponent: 0.177, 16.6, 154, 8,364; 0 is 0."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0.0:
        return "0"
    num_before = math.floor(math.log10(abs(value))) + 1
    # 0.9996 has three digits only as 1.00: the size that counts is that of what is shown.
    decimals = max(0, 3 - num_before)
    shown = round(value, decimals)
    if shown and math.floor(math.log10(abs(shown))) + 1 > num_before:
        decimals = max(0, decimals - 1)
    return f"{value:,.{min(decimals, 6)}f}"


def whole_millis(seconds: float | None) -> str:
    """Return seconds with three digits, none of them below a millisecond."""
    if seconds is not None and 0.0 < seconds < 0.1:
        return "<0.001" if seconds < 0.0005 else f"{seconds:.3f}"
    return plain(seconds)


def millis(seconds: float | None) -> str:
    """Return seconds as milliseconds, three digits."""
    return MISSING if seconds is None else plain(seconds * 1e3)


def share(value: float | None) -> str:
    """Return a share in percent with one decimal, `100%` and `0%` only where it is all or none."""
    if value is None:
        return MISSING
    if value in (0.0, 1.0):
        return f"{value:.0%}"
    # 99.97 % is not everybody, and 0.02 % is not nobody.
    return f"{min(0.999, max(0.001, value)):.1%}"


def share_range(low: float, high: float) -> str:
    """Return the smallest and the largest share, one percent sign: `95.7–98.0%`."""
    if low == high:
        return share(low)
    return f"{share(low).removesuffix('%')}–{share(high)}"


def short(value: float) -> str:
    """Return a count in at most four characters where thousands allow it: 980, 1.5k, 85k, 2.1M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.1f}{unit}" if abs(scaled) < 9.95 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}"
