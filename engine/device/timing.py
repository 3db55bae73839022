"""`DeviceTimedRunner`: what the device itself took for each step, beside the host's clock.

Owns two CUDA events around a step. Must not wait for more than the step does: a step has ended when
its results are on the host, and by then both events have passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.ports import ModelRunner
from engine.request import Request
from engine.step import StepOutput, StepPlan


class DeviceTimedRunner:
    """A `ModelRunner` around another; `device_s` grows by one number per executed step.

    From when the device could begin to when its last kernel or copy had ended, pauses between
    launches included: what a step took longer than that, the host spent before and after.
    """

    def __init__(self, inner: ModelRunner, device: torch.device) -> None:
        self._inner = inner
        self._device = device
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.device_s: list[float] = []

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        """Execute between two events."""
        stream = torch.cuda.current_stream(self._device)
        self._start.record(stream)
        output = self._inner.execute(plan, requests)
        self._end.record(stream)
        # Nothing was launched after the step's own wait: this one is over at once.
        self._end.synchronize()
        self.device_s.append(float(self._start.elapsed_time(self._end)) / 1000)
        return output

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Pass it on."""
        self._inner.swap_out(blocks, host_blocks)

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Pass it on."""
        self._inner.swap_in(host_blocks, blocks)

    def forget(self, request_id: str) -> None:
        """Pass it on."""
        self._inner.forget(request_id)
