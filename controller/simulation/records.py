"""What a simulation leaves behind: a record per request, counts over steps, a hash of all events.

Owns the frozen results and the listener that gathers them. Must not judge a promise by itself or
change a request.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np

from controller.policy.slo import Promise
from engine.request import FinishReason, Request
from engine.step import StepReport, WorkKind

_STEP: Final = struct.Struct("<qdd")
_SERVED: Final = frozenset({FinishReason.STOP, FinishReason.LENGTH})


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


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Counts over all steps of a simulation.

    `busy_s` is virtual time within steps. `bindings` counts steps by the constraint that set their
    budget. Planner times are real microseconds per call (P50, P99, mean over all calls), which no
    hash covers. `mape` and `coverage` are the cost model's over its last 500 steps, `num_refits`
    the refits of a window of them.
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


class Recorder:
    """Gathers records and the hash; the last listener of a step, after promises were told."""

    def __init__(self, output_lengths: dict[str, int], stretch: Stretch) -> None:
        self._stretch = stretch
        # Of unfinished requests: what has been recorded is dropped from it.
        self._wanted = output_lengths
        self._hash = blake2b(digest_size=16)
        self.requests: list[SimulatedRequest] = []
        self.num_steps = 0
        self.busy_s = 0.0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_preemptions = 0
        self.num_swapped_blocks = 0
        self.max_running = 0
        self.max_waiting = 0
        self.max_blocks_used = 0
        self.bindings: dict[str, int] = {}

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Take one step's report."""
        plan, stretch = report.plan, self._stretch
        events, decode = [], WorkKind.DECODE
        num_all = num_decodes = 0
        for request_id, kind, num_tokens, _ in plan.work:
            events.append(f"{request_id}:{num_tokens}")
            num_all += num_tokens
            num_decodes += kind is decode
        events += [f"{a.request_id}={a.action}/{a.reason}" for a in plan.admissions]
        events += [f"{p.request_id}!{p.method}" for p in plan.preemptions]
        for request_id in report.finished:
            request = requests[request_id]
            events.append(f"{request_id}.{request.finish_reason}")
            record = self._record(request)
            if stretch.first <= record.index < stretch.last:
                self.requests.append(record)
        update = self._hash.update
        update(_STEP.pack(report.step_no, report.started_at, report.duration_s))
        update(",".join(events).encode())
        if not stretch.from_s <= report.started_at < stretch.until_s:
            return
        self.num_steps += report.is_executed
        self.busy_s += report.duration_s
        self.num_decode_tokens += num_decodes
        self.num_prefill_tokens += num_all - num_decodes
        self.num_preemptions += len(plan.preemptions)
        self.num_swapped_blocks += report.num_swapped_blocks
        self.max_running = max(self.max_running, report.num_running)
        self.max_waiting = max(self.max_waiting, report.num_waiting)
        self.max_blocks_used = max(self.max_blocks_used, report.num_blocks_used)
        if plan.decision is not None and plan.work:
            binding = plan.decision.binding_constraint
            self.bindings[binding] = self.bindings.get(binding, 0) + 1

    @property
    def is_done(self) -> bool:
        """Whether everybody who counts has ended."""
        return len(self.requests) == self._stretch.last - self._stretch.first

    @property
    def event_hash(self) -> str:
        """The hash of everything heard so far, in hex digits."""
        return self._hash.hexdigest()

    def _record(self, request: Request) -> SimulatedRequest:
        promise = request.promise
        assert isinstance(promise, Promise)  # noqa: S101 - every simulated request has one
        judged = promise.judge()
        admission = request.admission
        ended_at = request.finished_at
        assert ended_at is not None  # noqa: S101 - it has ended
        started_at = request.first_scheduled_at
        return SimulatedRequest(
            index=int(request.request_id),
            slo_class=promise.slo_class.name,
            arrived_at=request.arrived_at,
            num_prompt_tokens=request.num_prompt_tokens,
            num_wanted_tokens=self._wanted.pop(request.request_id),
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens,
            decision="" if admission is None else admission.action.value,
            reason="" if admission is None else admission.reason,
            is_degraded=promise.is_degraded,
            finish_reason="" if request.finish_reason is None else request.finish_reason.value,
            first_token_at=request.first_token_at,
            ended_at=ended_at,
            wait_s=(ended_at if started_at is None else started_at) - request.arrived_at,
            ttft_s=judged.ttft_s,
            tpot_s=judged.tpot_s,
            e2e_s=judged.e2e_s,
            longest_gap_s=judged.longest_gap_s,
            fluidity=judged.fluidity,
            num_preemptions=request.num_preemptions,
            predicted_ttft_s=None if admission is None else admission.predicted_ttft_s,
            ttft_target_s=promise.slo.ttft_s,
            tpot_target_s=promise.slo.tpot_s,
            is_ttft_met=judged.is_ttft_met,
            is_tpot_met=judged.is_tpot_met,
            attained=judged.attained,
        )

    def summary(self, planner_s: Sequence[float], mape: float, coverage: float) -> StepSummary:
        """Return the counts, with planner seconds per call and the cost model's quality."""
        micros = np.array(planner_s if len(planner_s) else [0.0]) * 1e6
        p50, p99 = np.percentile(micros, (50, 99)).tolist()
        return StepSummary(
            num_steps=self.num_steps,
            busy_s=self.busy_s,
            num_prefill_tokens=self.num_prefill_tokens,
            num_decode_tokens=self.num_decode_tokens,
            num_preemptions=self.num_preemptions,
            num_swapped_blocks=self.num_swapped_blocks,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_blocks_used=self.max_blocks_used,
            bindings=dict(sorted(self.bindings.items())),
            planner_us_mean=float(micros.mean()),
            planner_us_p50=p50,
            planner_us_p99=p99,
            mape=mape,
            coverage=coverage,
        )
