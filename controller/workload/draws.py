"""Where random numbers come from: a seed and a purpose make a stream of their own.

Owns the derivation of generators and the checks of arguments that several generators share. Must
not draw.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np


def rng_for(purpose: str, seed: int) -> np.random.Generator:
    """Return the PCG64 generator of `purpose` under `seed`; ValueError unless `seed` is ≥ 0.

    Each purpose has its own stream: with one for all, arrivals and classes that were drawn from the
    same seed would depend on each other. The purpose is hashed by CRC, not by `hash`, which differs
    from process to process.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer that is not negative, got {seed!r}")
    key = np.random.SeedSequence([seed, zlib.crc32(purpose.encode())])
    return np.random.Generator(np.random.PCG64(key))


def check_positive(name: str, value: float) -> None:
    """ValueError naming the argument unless it is a finite number above 0."""
    if not (_is_number(value) and 0.0 < value < math.inf):
        raise ValueError(f"{name} must be a positive number, got {value!r}")


def check_not_negative(name: str, value: float) -> None:
    """ValueError naming the argument unless it is a finite number of at least 0."""
    if not (_is_number(value) and 0.0 <= value < math.inf):
        raise ValueError(f"{name} must be a number that is not negative, got {value!r}")


def check_count(name: str, value: int, minimum: int = 1) -> None:
    """ValueError naming the argument unless it is an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")


def shares_of(name: str, mix: Mapping[str, float]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return the classes of a mix in its order, and their shares with the sum 1.

    Shares are relative (50, 30 and 20 do). ValueError naming the argument for an empty mix, a share
    that is negative or not finite, or a sum of 0.
    """
    if not mix:
        raise ValueError(f"{name} must name at least one class")
    for key, share in mix.items():
        check_not_negative(f"{name}[{key!r}]", share)
    total = sum(mix.values())
    if not 0.0 < total < math.inf:
        raise ValueError(f"{name} must have a share above 0, got {dict(mix)!r}")
    return tuple(mix), tuple(share / total for share in mix.values())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
