"""`DeviceTimedRunner`: what the device itself took for each step, beside the host's clock.

Owns two CUDA events in a step, whose places the runner knows. Must not wait for more than the step
does: a step has ended when its results are on the host, and by then both events have passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from engine.device.runner import StepSpan
from engine.ports import ModelRunner
from engine.request import Request
from engine.step import StepOutput, StepPlan


class SpanRunner(ModelRunner, Protocol):
    """A runner that tells its `span` of a step's two ends on the device."""

    span: StepSpan | None


class _EventSpan:
    """Two events on the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch

    def begin(self) -> None:
        self._start.record(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        self._end.record(torch.cuda.current_stream(self._device))

    def seconds(self) -> float:
        # The step's own wait came after the end: this one is over at once.
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1000


class DeviceTimedRunner:
    """A `ModelRunner` around another; `device_s` grows by one number per executed step.

    From when the inputs have arrived on the device to when its last copy back has ended, pauses
    between launches included: what a step took longer than that, the host spent before and after.
    """

    def __init__(self, inner: SpanRunner, device: torch.device) -> None:
        self._inner = inner
        self._span = _EventSpan(device)
        self.device_s: list[float] = []

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        """Execute, with an event at either end of what the device does."""
        self._inner.span = self._span
        try:
            output = self._inner.execute(plan, requests)
        finally:
            self._inner.span = None
        self.device_s.append(self._span.seconds())
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
