"""Promises: an SLO, the instants it implies, and whether it was kept (control.md section 1).

Owns targets, deadlines, pacing and judging. Must not read a clock: every instant is handed in.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

MAX_TARGET_S = 1e4


class OnInfeasible(enum.StrEnum):
    """What a class does with a request whose target cannot be met."""

    REJECT = "reject"
    DEGRADE = "degrade"
    QUEUE = "queue"


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets of one request in seconds; None = no target of that kind. ValueError names the field."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        """Check that every given target is finite, positive and at most `MAX_TARGET_S`."""
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and 0 < value <= MAX_TARGET_S):
                raise ValueError(f"{name} must be a finite number in (0, {MAX_TARGET_S:g}], got {value}")

    @property
    def is_best_effort(self) -> bool:
        """Whether no target is given."""
        return self.ttft_s is None and self.tpot_s is None and self.e2e_s is None


@dataclass(frozen=True, slots=True)
class SloClass:
    """A named class of service: default targets, how much it weighs in a conflict, what happens when it cannot be met."""

    name: str
    slo: Slo = field(default_factory=Slo)
    weight: float = 1.0
    on_infeasible: OnInfeasible = OnInfeasible.REJECT

    def __post_init__(self) -> None:
        """Check name and weight; ValueError names the field."""
        if not self.name:
            raise ValueError("name of an SLO class must not be empty")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight of SLO class {self.name!r} must be a positive number, got {self.weight}")


@dataclass(slots=True, eq=False)
class Promise:
    """The SLO of one request as instants, plus what has happened to its tokens so far.

    Carried by the engine as `Request.promise`, unread. Mutable: `record_token` is called once per emitted token by the
    loop's listener, never by a planner.
    """

    slo: Slo
    slo_class: SloClass
    arrived_at: float
    priority: int = 0
    is_degraded: bool = False
    base_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_tokens: int = 0
    num_tokens_on_time: int = 0
    longest_gap_s: float = 0.0

    @property
    def weight(self) -> float:
        """Class weight; a degraded request keeps no weight against promises."""
        return self.slo_class.weight

    @property
    def first_deadline_at(self) -> float:
        """D_1 = a + T; +inf without a TTFT target."""
        return math.inf if self.slo.ttft_s is None else self.arrived_at + self.slo.ttft_s

    def token_deadline_at(self, number: int) -> float:
        """D_n for the n-th output token (1-based): B + (n-1)·p, or D_1 while no token was emitted."""
        raise NotImplementedError

    def record_token(self, at: float) -> None:
        """Account for one emitted token at instant `at`: gaps, fluidity and re-basing of B."""
        raise NotImplementedError
