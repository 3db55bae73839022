"""The device's own timing of a step, with events that keep a made-up time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from engine.device.timing import DeviceTimedRunner
from engine.request import Request
from engine.step import StepOutput, StepPlan

pytestmark = pytest.mark.device


class Device:
    """Queued work moves a clock; an event knows the time at which it was recorded."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.log: list[str] = []

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        device = self

        class Event:
            at_ms = -1.0

            def record(self, stream: object) -> None:
                assert stream == "stream"
                self.at_ms = device.now_ms
                device.log.append("record")

            def synchronize(self) -> None:
                device.log.append("wait")

            def elapsed_time(self, end: Event) -> float:
                return end.at_ms - self.at_ms

        return Event()


class Inner:
    """A runner whose steps take 5 ms of the device's time."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.calls: list[Any] = []

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        self.device.now_ms += 5.0
        self.device.log.append("execute")
        return StepOutput(())

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self.calls.append(("out", blocks, host_blocks))

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        self.calls.append(("in", host_blocks, blocks))

    def forget(self, request_id: str) -> None:
        self.calls.append(("forget", request_id))


def test_a_step_is_timed_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "stream")
    inner = Inner(device)
    runner = DeviceTimedRunner(inner, torch.device("cuda"))
    for _ in range(2):
        assert runner.execute(StepPlan(), {}).tokens == ()
        device.now_ms += 100.0
    assert runner.device_s == [0.005, 0.005]
    assert device.log == ["record", "execute", "record", "wait"] * 2
    runner.swap_out([1], [2])
    runner.swap_in([2], [3])
    runner.forget("r")
    assert inner.calls == [("out", [1], [2]), ("in", [2], [3]), ("forget", "r")]
