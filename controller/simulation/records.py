"""What a simulation leaves behind: a record per request, and counts over steps.

Owns the frozen results. Must not gather them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from engine.request import FinishReason

_SERVED: Final = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class MissCause(enum.StrEnum):
    """Why a promise was missed; of several reasons the first one here.

    `OTHER`: the end came too late, or a request without targets was not served.
    """

    REFUSED = "refused"
    LATE = "first_token_late"
    SLOW = "tokens_too_slow"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One offered request and what became of it; instants are virtual seconds.

    `num_wanted_tokens` is how long its answer would have been. `decision` and `reason` are the last
    verdict of admission. `ttft_s`, `tpot_s`, `e2e_s` and `attained` are those of `Judgement`;
    `longest_gap_s` is the longest time between two tokens, `longest_wait_s` between arrival and the
    first work. `attained` is None for best effort.
    """

    index: int
    slo_class: str
    arrived_at: float
    num_prompt_tokens: int
    num_wanted_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    decision: str
    reason: str
    is_degraded: bool
    finish_reason: str
    first_token_at: float | None
    ended_at: float
    wait_s: float
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    longest_gap_s: float
    fluidity: float | None
    num_preemptions: int
    predicted_ttft_s: float | None
    ttft_target_s: float | None
    tpot_target_s: float | None
    is_ttft_met: bool | None
    is_tpot_met: bool | None
    attained: bool | None

    @property
    def is_served(self) -> bool:
        """Whether the whole answer was given, late or not."""
        return self.finish_reason in _SERVED

    @property
    def is_kept(self) -> bool:
        """Whether every target was met; of best effort it is enough to be served."""
        return self.is_served if self.attained is None else self.attained

    @property
    def miss_cause(self) -> MissCause | None:
        """Why the promise was missed; None if it was kept."""
        if self.is_kept:
            return None
        if self.finish_reason == FinishReason.REJECTED:
            return MissCause.REFUSED
        if self.is_ttft_met is False:
            return MissCause.LATE
        return MissCause.SLOW if self.is_tpot_met is False else MissCause.OTHER


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Counts over all steps of a simulation.

    `busy_s` is virtual time within steps. `bindings` counts steps by the constraint that set their
    budget, `bound_s` is the virtual time within them; steps that compute nothing, or whose planner
    gives no constraint, are left out. Planner times are real microseconds per call (P50, P99, mean
    over all calls), which no hash covers. `mape` and `coverage` are the cost model's over its last
    500 steps, `num_refits` the refits of a window of them.
    """

    num_steps: int
    busy_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preemptions: int
    num_swapped_blocks: int
    max_running: int
    max_waiting: int
    max_blocks_used: int
    bindings: Mapping[str, int]
    planner_us_mean: float
    planner_us_p50: float
    planner_us_p99: float
    mape: float
    coverage: float
    num_refits: int = 0
    bound_s: Mapping[str, float] = field(default_factory=dict)


class Stretch(NamedTuple):
    """Arrivals of a workload that are counted, from number `first` up to but without `last`, in a
    simulation that begins with arrival `begin`; steps count that start at `from_s` or later and
    before `until_s`.

    What comes before `first` brings the machine into its state, what comes after `last` keeps it
    busy until everybody who counts has ended.
    """

    begin: int
    first: int
    last: int
    from_s: float = -math.inf
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """One workload under one policy on one machine.

    `event_hash` covers every step's instants and work, every verdict and every ending: the same
    inputs give the same hash in any process. `wall_s` is real time.
    """

    workload: str
    policy: str
    hardware: str
    seed: int
    offered_rate: float
    requests: tuple[SimulatedRequest, ...]
    steps: StepSummary
    event_hash: str
    wall_s: float
