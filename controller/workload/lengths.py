"""Where lengths come from: fixed, lognormal, or those of a trace.

Owns the seam `LengthSource` and its implementations. Must not know when a request arrives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from controller.workload.arrivals import MAX_LENGTH_TOKENS, Workload
from controller.workload.draws import check_count, check_positive

IntArray = npt.NDArray[np.int64]

# The standard normal's 99th percentile.
_Z99: Final = 2.3263478740408408


class LengthSource(Protocol):
    """Draws the lengths of requests."""

    def draw(self, rng: np.random.Generator, num_requests: int) -> tuple[IntArray, IntArray]:
        """Return prompt and output lengths in tokens, each [num_requests] and at least 1.

        With generators in the same state, a longer draw begins like a shorter one.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """Every request alike. ValueError names the field."""

    num_prompt_tokens: int
    num_output_tokens: int

    def __post_init__(self) -> None:
        """Check both lengths."""
        check_count("num_prompt_tokens", self.num_prompt_tokens)
        check_count("num_output_tokens", self.num_output_tokens)

    def draw(self, rng: np.random.Generator, num_requests: int) -> tuple[IntArray, IntArray]:
        """Return the same two lengths for every request."""
        return (
            np.full(num_requests, self.num_prompt_tokens, dtype=np.int64),
            np.full(num_requests, self.num_output_tokens, dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class LognormalLengths:
    """Lognormal lengths by median and 99th percentile in tokens, prompt and output independent.

    exp(ln p50 + z·ln(p99 / p50) / 2.326) with z standard normal, rounded, at least 1 and at most
    `max_prompt_tokens` and `max_output_tokens`. ValueError names the field.
    """

    prompt_p50: float
    prompt_p99: float
    output_p50: float
    output_p99: float
    max_prompt_tokens: int = 1_000_000
    max_output_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        """Check every field."""
        for kind in ("prompt", "output"):
            p50, p99 = getattr(self, f"{kind}_p50"), getattr(self, f"{kind}_p99")
            check_positive(f"{kind}_p50", p50)
            check_positive(f"{kind}_p99", p99)
            if p99 < p50:
                raise ValueError(f"{kind}_p99 must not be below {kind}_p50 = {p50}, got {p99}")
            maximum = getattr(self, f"max_{kind}_tokens")
            check_count(f"max_{kind}_tokens", maximum)
            if p50 > maximum:
                raise ValueError(f"{kind}_p50 must not exceed {maximum} tokens, got {p50}")

    def draw(self, rng: np.random.Generator, num_requests: int) -> tuple[IntArray, IntArray]:
        """Return lengths from two streams, so that a longer draw begins like a shorter one."""
        for_prompts, for_outputs = rng.spawn(2)
        return (
            _lognormal(
                for_prompts, self.prompt_p50, self.prompt_p99, self.max_prompt_tokens, num_requests
            ),
            _lognormal(
                for_outputs, self.output_p50, self.output_p99, self.max_output_tokens, num_requests
            ),
        )


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """Pairs of lengths drawn with replacement from a workload: what belongs together stays so.

    ValueError for a workload without requests. Prefixes and classes are not drawn.
    """

    workload: Workload
    _pairs: IntArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Keep the pairs as one array, [2, num_requests of the workload]."""
        arrivals = self.workload.arrivals
        if not arrivals:
            raise ValueError(f"workload {self.workload.name!r} holds no request to draw from")
        pairs = np.array([(a.num_prompt_tokens, a.num_output_tokens) for a in arrivals]).T
        # The only way into a frozen dataclass for what is derived once.
        object.__setattr__(self, "_pairs", pairs.astype(np.int64))

    def draw(self, rng: np.random.Generator, num_requests: int) -> tuple[IntArray, IntArray]:
        """Return the lengths of requests of the workload, each equally likely every time."""
        drawn = self._pairs[:, rng.integers(self._pairs.shape[1], size=num_requests)]
        return drawn[0], drawn[1]


def _lognormal(
    rng: np.random.Generator, p50: float, p99: float, maximum: int, num_requests: int
) -> IntArray:
    sigma = math.log(p99 / p50) / _Z99
    with np.errstate(over="ignore"):  # infinity is cut like every number above the maximum
        drawn = p50 * np.exp(sigma * rng.standard_normal(num_requests))
    return np.clip(np.rint(drawn), 1, min(maximum, MAX_LENGTH_TOKENS)).astype(np.int64)
