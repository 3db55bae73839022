"""Random numbers without state: the uniform of output token i depends on a request's key and i.

Owns keys and the counter-based generator. Nothing is advanced, so executing a step twice, another
batch or a preemption cannot change a draw.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

UintArray = npt.NDArray[np.uint64]
FloatArray = npt.NDArray[np.float64]

# SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014;
# constants of Vigna's reference implementation, the finaliser being Stafford's variant 13). Number
# i of a stream is a function of its start and i alone: that makes it a counter-based generator.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def key_of_seed(seed: int) -> int:
    """Return the 64-bit key of a client's seed; any integer, also negative, has one of its own."""
    return _digest(f"seed {seed}")


def key_of_request(engine_seed: int, request_id: str) -> int:
    """Return the 64-bit key of a request without a seed."""
    return _digest(f"request {engine_seed} {request_id}")


def uniforms(keys: UintArray, indices: UintArray) -> FloatArray:
    """Return float64 in [0, 1) of 53 random bits for each (key, index); shapes (n,)."""
    bits = _mix(keys + (indices + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: UintArray) -> UintArray:
    """SplitMix64's output function; products wrap around at 64 bits."""
    mixed = (state ^ (state >> _SHIFTS[0])) * _MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return mixed ^ (mixed >> _SHIFTS[2])


def _digest(text: str) -> int:
    # A digest, not the seed itself: neighbouring seeds start far apart on SplitMix64's one cycle,
    # and integers beyond 64 bits do not fold onto each other.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
