"""Targets: an SLO, and the class of requests that has it (control.md section 1).

Owns what may be asked for. Must not know an instant or a request.
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
    """Targets of one request in seconds; None = no target of that kind. ValueError names the
    field.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        """Check that every given target is finite, positive and at most `MAX_TARGET_S`."""
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and 0 < value <= MAX_TARGET_S):
                raise ValueError(
                    f"{name} must be a finite number in (0, {MAX_TARGET_S:g}], got {value}"
                )

    @property
    def is_best_effort(self) -> bool:
        """Whether no target is given."""
        return self.ttft_s is None and self.tpot_s is None and self.e2e_s is None


@dataclass(frozen=True, slots=True)
class SloClass:
    """A named class of service: default targets, how much it weighs in a conflict, what happens
    when it cannot be met.
    """

    name: str
    slo: Slo = field(default_factory=Slo)
    weight: float = 1.0
    on_infeasible: OnInfeasible = OnInfeasible.REJECT

    def __post_init__(self) -> None:
        """Check name and weight; ValueError names the field."""
        if not self.name:
            raise ValueError("name of an SLO class must not be empty")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(
                f"weight of SLO class {self.name!r} must be a positive number, got {self.weight}"
            )
