"""`Recorder`: hears every step of a simulation and keeps its records, counts and hash.

Owns that listening. Must not judge a promise by itself or change a request.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

from controller.policy.promise import Promise
from controller.simulation.records import SimulatedRequest, StepSummary, Stretch
from engine.request import Request
from engine.step import StepReport, WorkKind

_STEP: Final = struct.Struct("<qdd")


class _Bound:
    """Steps that one constraint bound, and the virtual seconds within them."""

    __slots__ = ("busy_s", "num_steps")

    def __init__(self) -> None:
        self.num_steps = 0
        self.busy_s = 0.0


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
        self._bound: dict[str, _Bound] = {}

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
            bound = self._bound.get(binding)
            if bound is None:
                bound = self._bound[binding] = _Bound()
            bound.num_steps += 1
            bound.busy_s += report.duration_s

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
        bound = self._bound
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
            bindings={name: bound[name].num_steps for name in sorted(bound)},
            bound_s={name: bound[name].busy_s for name in sorted(bound)},
            planner_us_mean=float(micros.mean()),
            planner_us_p50=p50,
            planner_us_p99=p99,
            mape=mape,
            coverage=coverage,
        )
