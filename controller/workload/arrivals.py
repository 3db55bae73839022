"""The words of a workload: one `Arrival` per request, and the `Workload` that holds them in order.

Owns frozen data, its checks and the numbers that are shown of it. Must not read a file, draw a
number or read a clock: times count from the workload's own start.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

# Beyond any context: a number above it is a slip (bytes, an instant, a typing error).
MAX_LENGTH_TOKENS: Final = 10**9
MAX_PREFIX_ID: Final = 2**63


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload. ValueError names the field.

    `at_s` is seconds since the workload's start, finite and not negative. The two lengths are
    tokens in [1, `MAX_LENGTH_TOKENS`]: the prompt's, and how many the answer will have. `slo_class`
    names a class of service (None = whatever is the default). `prefix_ids` names the prompt's
    blocks of `prefix_block_tokens` tokens from its beginning, the last one perhaps not full: two
    prompts whose first k ids are equal begin with the same tokens, as far as k blocks reach
    (Mooncake's `hash_ids`). Empty = it shares nothing with any other.
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    slo_class: str | None = None
    prefix_ids: tuple[int, ...] = ()
    prefix_block_tokens: int = 512

    def __post_init__(self) -> None:
        """Check every field."""
        if not (isinstance(self.at_s, float | int) and 0 <= self.at_s < math.inf):
            raise ValueError(f"at_s must be finite and not negative, got {self.at_s!r}")
        for field in ("num_prompt_tokens", "num_output_tokens", "prefix_block_tokens"):
            value = getattr(self, field)
            if type(value) is not int or not 1 <= value <= MAX_LENGTH_TOKENS:
                raise ValueError(
                    f"{field} must be an integer in [1, {MAX_LENGTH_TOKENS}], got {value!r}"
                )
        name = self.slo_class
        if name is not None and not (name and name == name.strip()):
            raise ValueError(
                f"slo_class must be a name without spaces around it, or None, got {name!r}"
            )
        if not all(type(block) is int and 0 <= block < MAX_PREFIX_ID for block in self.prefix_ids):
            raise ValueError(f"prefix_ids must be integers in [0, 2^63), got {self.prefix_ids!r}")
        if len(self.prefix_ids) > -(-self.num_prompt_tokens // self.prefix_block_tokens):
            raise ValueError(
                f"prefix_ids names {len(self.prefix_ids)} blocks of {self.prefix_block_tokens} "
                f"tokens, but the prompt has {self.num_prompt_tokens} tokens only"
            )


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """How long something is, in tokens, over all requests of a workload.

    Percentiles are NumPy's default (linear interpolation between ranks).
    """

    mean: float
    p50: float
    p90: float
    p99: float
    max: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival; those that arrive at once stay in the order they were given.

    ValueError names the first arrival that is earlier than the one before it.
    """

    name: str
    arrivals: tuple[Arrival, ...]

    def __post_init__(self) -> None:
        """Check the name and the order."""
        if not self.name:
            raise ValueError("name of a workload must not be empty")
        for index, (a, b) in enumerate(itertools.pairwise(self.arrivals)):
            if b.at_s < a.at_s:
                raise ValueError(
                    f"arrivals must be sorted by at_s: number {index + 1} (from 0) arrives at "
                    f"{b.at_s} s, after one at {a.at_s} s"
                )

    @property
    def num_requests(self) -> int:
        """How many requests arrive."""
        return len(self.arrivals)

    @property
    def duration_s(self) -> float:
        """Seconds from the workload's start to its last arrival; 0 without one."""
        return self.arrivals[-1].at_s if self.arrivals else 0.0

    @property
    def rate(self) -> float:
        """Mean requests per second up to the last arrival; 0 where all arrive at the start."""
        return len(self.arrivals) / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def prompt_summary(self) -> LengthSummary | None:
        """Prompt lengths; None without a request."""
        return _summary([arrival.num_prompt_tokens for arrival in self.arrivals])

    @property
    def output_summary(self) -> LengthSummary | None:
        """Output lengths; None without a request."""
        return _summary([arrival.num_output_tokens for arrival in self.arrivals])

    @property
    def class_counts(self) -> dict[str | None, int]:
        """Requests per class, in order of first appearance."""
        counts: dict[str | None, int] = {}
        for arrival in self.arrivals:
            counts[arrival.slo_class] = counts.get(arrival.slo_class, 0) + 1
        return counts


def sorted_workload(name: str, arrivals: Iterable[Arrival]) -> Workload:
    """Return a workload of arrivals in any order; those at the same instant keep their order."""
    return Workload(name, tuple(sorted(arrivals, key=lambda arrival: arrival.at_s)))


def _summary(lengths: list[int]) -> LengthSummary | None:
    if not lengths:
        return None
    p50, p90, p99 = np.percentile(lengths, (50, 90, 99)).tolist()
    return LengthSummary(float(np.mean(lengths)), p50, p90, p99, max(lengths))
