"""Measures: from the records of a simulation to the numbers that policies are compared by.

Owns definitions and arithmetic. Must not run anything: every number is a pure function of records.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from controller.simulation.hardware import HardwareProfile
from controller.simulation.records import MissCause, SimulatedRequest, SimulationResult
from costmodel.features import StepFeatures

NUM_DECILES: Final = 10
BURST_BIN_S: Final = 10.0
# A busiest bin below twice the mean demand is no burst.
_BURST_FACTOR: Final = 2.0
_RECOVERED: Final = 0.9
_RECOVERED_BINS: Final = 3
_CHUNK_TOKENS: Final = 8192


@dataclass(frozen=True, slots=True)
class Percentiles:
    """P50, P90 and P99 of `num` values, and the largest (linear between ranks)."""

    num: int
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Percentiles | None:
        """Describe the values that there are; None without one."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
        return cls(len(known), p50, p90, p99, max(known))


@dataclass(frozen=True, slots=True)
class GroupMeasures:
    """What became of a group of offered requests.

    `attainment` is the share of OFFERED requests that met every target: a refused one is missed,
    and one without targets met them if it was served. Percentiles, in seconds, are over the
    requests that have such a number: `ttft_s` counts from arrival, `tpot_s` is the mean per token
    after the first, `gap_s` the longest time between two tokens of a request. `longest_wait_s` is
    the longest time from arrival to the first work or the end. `misses` counts those that missed a
    target by `MissCause`, each once.
    """

    name: str
    num_offered: int
    num_served: int
    num_refused: int
    num_degraded: int
    attainment: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    gap_s: Percentiles | None
    longest_wait_s: float
    misses: dict[str, int]

    @classmethod
    def of(cls, name: str, requests: Sequence[SimulatedRequest]) -> GroupMeasures:
        """Measure a group; ValueError if it is empty."""
        if not requests:
            raise ValueError(f"group {name!r} is empty")
        return cls(
            name=name,
            num_offered=len(requests),
            num_served=sum(each.is_served for each in requests),
            num_refused=sum(each.finish_reason == "rejected" for each in requests),
            num_degraded=sum(each.is_degraded for each in requests),
            attainment=sum(each.is_kept for each in requests) / len(requests),
            ttft_s=Percentiles.of(each.ttft_s for each in requests),
            tpot_s=Percentiles.of(each.tpot_s for each in requests),
            gap_s=Percentiles.of(
                each.longest_gap_s for each in requests if each.num_output_tokens > 1
            ),
            longest_wait_s=max(each.wait_s for each in requests),
            misses=miss_counts(requests),
        )


@dataclass(frozen=True, slots=True)
class Measures:
    """One simulation in numbers.

    `deciles` are tenths of the requests by prompt length, shortest first (fewer where there are
    fewer than ten requests). `refusals` counts by reason. `largest_slowdown` is the largest ratio
    of the time a served request took to what it would have taken alone. `jain_index` is Jain's
    index of fairness, (Σx)² / (n·Σx²), over offered requests, with x the inverse of that slowdown
    and 0 for whoever was not served: 1 where everybody is equally well off, 1/n where one has it
    all. `burst_recovery_s`: see the function of that name. `useful_tokens_per_s` counts prompt and
    output tokens of requests that met every target, `output_tokens_per_s` all output tokens, per
    second from the first arrival to the last end. `mean_step_s` is virtual; planner times are real.
    `prediction_mape` and `coverage` are the cost model's. `binding_steps` and `binding_time` are
    shares by the constraint that set a step's budget, of such steps and of the virtual time within
    them; empty where the planner gives none.
    """

    overall: GroupMeasures
    classes: tuple[GroupMeasures, ...]
    deciles: tuple[GroupMeasures, ...]
    refusals: dict[str, int]
    largest_slowdown: float | None
    jain_index: float
    burst_recovery_s: float | None
    has_burst: bool
    useful_tokens_per_s: float
    output_tokens_per_s: float
    num_steps: int
    mean_step_s: float
    planner_us_mean: float
    planner_us_p99: float
    prediction_mape: float
    coverage: float
    binding_steps: dict[str, float]
    binding_time: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values = asdict(self)
        return values | {name: list(values[name]) for name in ("classes", "deciles")}


def measure(result: SimulationResult, hardware: HardwareProfile) -> Measures:
    """Measure a simulation that ran on `hardware`; ValueError if nobody was offered."""
    requests = result.requests
    alone_s = [
        alone_seconds(hardware, each.num_prompt_tokens, each.num_wanted_tokens) for each in requests
    ]
    slowdowns = [
        (each.ended_at - each.arrived_at) / alone if each.is_served else None
        for each, alone in zip(requests, alone_s, strict=True)
    ]
    overall = GroupMeasures.of("all", requests)
    has_burst, recovery_s = burst_recovery_s(requests, alone_s)
    span_s = max(each.ended_at for each in requests) - requests[0].arrived_at
    refusals: dict[str, int] = {}
    for each in requests:
        if each.finish_reason == "rejected":
            refusals[each.reason] = refusals.get(each.reason, 0) + 1
    kept_tokens = sum(
        each.num_prompt_tokens + each.num_output_tokens for each in requests if each.is_kept
    )
    steps = result.steps
    return Measures(
        overall=overall,
        classes=tuple(
            GroupMeasures.of(name, group)
            for name, group in sorted(_grouped(requests, lambda each: each.slo_class).items())
        ),
        deciles=tuple(by_prompt_length(requests)),
        refusals=dict(sorted(refusals.items())),
        largest_slowdown=max((s for s in slowdowns if s is not None), default=None),
        jain_index=jain_index([0.0 if s is None else 1.0 / max(s, 1e-9) for s in slowdowns]),
        burst_recovery_s=recovery_s,
        has_burst=has_burst,
        useful_tokens_per_s=_per(kept_tokens, span_s),
        output_tokens_per_s=_per(sum(each.num_output_tokens for each in requests), span_s),
        num_steps=steps.num_steps,
        mean_step_s=_per(steps.busy_s, steps.num_steps),
        planner_us_mean=steps.planner_us_mean,
        planner_us_p99=steps.planner_us_p99,
        prediction_mape=steps.mape,
        coverage=steps.coverage,
        binding_steps=_shares(steps.bindings),
        binding_time=_shares(steps.bound_s),
    )


def by_prompt_length(requests: Sequence[SimulatedRequest]) -> list[GroupMeasures]:
    """Measure tenths of the requests by prompt length; equal lengths stay in order of arrival."""
    ranked = sorted(requests, key=lambda each: each.num_prompt_tokens)
    num = min(NUM_DECILES, len(ranked))
    edges = [len(ranked) * i // num for i in range(num + 1)]
    groups = [ranked[a:b] for a, b in itertools.pairwise(edges)]
    return [
        GroupMeasures.of(f"{each[0].num_prompt_tokens}-{each[-1].num_prompt_tokens}", each)
        for each in groups
    ]


def miss_counts(requests: Iterable[SimulatedRequest]) -> dict[str, int]:
    """Count the requests that missed a target by `MissCause`, in its order; 0 is left out."""
    counts = Counter(each.miss_cause for each in requests)
    return {cause.value: counts[cause] for cause in MissCause if counts[cause]}


def jain_index(shares: Sequence[float]) -> float:
    """Return (Σx)² / (n·Σx²) of shares that are not negative; 1 if all are 0.

    Jain, Chiu and Hawe, "A quantitative measure of fairness", 1984.
    """
    squares = math.fsum(x * x for x in shares)
    return 1.0 if squares == 0.0 else math.fsum(shares) ** 2 / (len(shares) * squares)


def alone_seconds(
    hardware: HardwareProfile, num_prompt_tokens: int, num_output_tokens: int
) -> float:
    """Return the seconds that a request takes on an idle machine, without noise or a cached prefix.

    Chunks of at most 8,192 tokens, then decodes at the middle of their contexts.
    """
    seconds, past = 0.0, 0
    while past < num_prompt_tokens:
        chunk = float(min(_CHUNK_TOKENS, num_prompt_tokens - past))
        seconds += hardware.seconds(
            StepFeatures(
                num_prefill_tokens=chunk,
                chunk_past_tokens=chunk * past,
                chunk_squared_tokens=chunk * chunk,
                num_chunks=1.0,
                num_prompt_logits=float(past + chunk >= num_prompt_tokens),
            )
        )
        past += int(chunk)
    context = num_prompt_tokens + num_output_tokens / 2.0
    decode = StepFeatures(num_decode_requests=1.0, decode_context_tokens=context)
    return seconds + (num_output_tokens - 1) * hardware.seconds(decode)


def burst_recovery_s(
    requests: Sequence[SimulatedRequest], demand_s: Sequence[float]
) -> tuple[bool, float | None]:
    """Return whether there was a burst, and how long promises took to be kept again after it.

    Arrivals are put into bins of 10 s; the burst is the bin whose requests demand the most machine
    seconds, if that is at least twice the mean. The time counts from the burst's end to the start
    of the first of 3 bins in a row (empty ones count) in which 90 % of the offered requests met
    every target; None if there are none before the last arrival.
    """
    start_at = requests[0].arrived_at
    index = [int((each.arrived_at - start_at) / BURST_BIN_S) for each in requests]
    num_bins = max(index) + 1
    demand = np.bincount(index, weights=demand_s, minlength=num_bins)
    offered = np.bincount(index, minlength=num_bins)
    kept = np.bincount(index, weights=[each.is_kept for each in requests], minlength=num_bins)
    burst = int(demand.argmax())
    if demand[burst] < _BURST_FACTOR * demand.mean():
        return False, None
    is_well = kept >= _RECOVERED * offered
    for first in range(burst + 1, num_bins - _RECOVERED_BINS + 1):
        if is_well[first : first + _RECOVERED_BINS].all():
            return True, (first - burst - 1) * BURST_BIN_S
    return True, None


def _grouped(
    requests: Iterable[SimulatedRequest], key: Callable[[SimulatedRequest], str]
) -> dict[str, list[SimulatedRequest]]:
    groups: dict[str, list[SimulatedRequest]] = {}
    for each in requests:
        groups.setdefault(key(each), []).append(each)
    return groups


def _shares(amounts: Mapping[str, float]) -> dict[str, float]:
    total = sum(amounts.values())
    return {name: _per(amount, total) for name, amount in amounts.items()}


def _per(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0
