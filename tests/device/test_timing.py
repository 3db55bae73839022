"""The device's own timing of a step, with events that keep a made-up time."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from engine.device.attention.reference import ReferenceAttention
from engine.device.runner import TorchRunner
from engine.device.timing import DeviceTimedRunner
from engine.request import Request
from engine.step import StepOutput, StepPlan, StepWork, WorkKind

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
    """A runner whose steps take 5 ms of the device's time, and the host 2 ms before and after."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.span: Any = None
        self.calls: list[Any] = []

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        self.device.now_ms += 2.0
        self.span.begin()
        self.device.now_ms += 5.0
        self.device.log.append("execute")
        self.span.end()
        self.device.now_ms += 2.0
        return StepOutput(())

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self.calls.append(("out", blocks, host_blocks))

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        self.calls.append(("in", host_blocks, blocks))

    def forget(self, request_id: str) -> None:
        self.calls.append(("forget", request_id))


def test_a_runner_tells_of_the_ends_of_what_the_device_does(
    tiny: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = TorchRunner(tiny.served, ReferenceAttention(), 4, 16, seed=0)
    log: list[str] = []

    def logged(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def run(*arguments: Any, **keywords: Any) -> Any:
            log.append(name)
            return inner(*arguments, **keywords)

        monkeypatch.setattr(owner, name, run)

    for owner, name in (
        (runner._inputs, "build"),
        (runner, "_logits"),
        (runner._sampler, "start"),
        (runner._sampler, "finish"),
    ):
        logged(owner, name)
    request = make_request("r", [5, 6, 7], 2)
    request.block_table = [0]
    plan = StepPlan(work=(StepWork("r", WorkKind.PREFILL, 3, 0),))
    expected = runner.execute(plan, {"r": request})
    log.clear()
    runner.span = types.SimpleNamespace(
        begin=lambda: log.append("begin"), end=lambda: log.append("end")
    )
    assert runner.execute(plan, {"r": request}) == expected
    assert log == ["build", "begin", "_logits", "start", "end", "finish"]


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
    assert inner.span is None
    runner.swap_out([1], [2])
    runner.swap_in([2], [3])
    runner.forget("r")
    assert inner.calls == [("out", [1], [2]), ("in", [2], [3]), ("forget", "r")]
