"""Timed steps: what is executed is what a server would execute; times come from the clock alone."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from engine.clock import VirtualClock
from engine.device import step_timing
from engine.device.json_lines import LineWriter
from engine.device.roofline import MachineLimits
from engine.device.step_timing import (
    Batch,
    ForwardWatch,
    StepShape,
    StepTimer,
    default_shapes,
    timings_of,
)
from engine.request import Request
from engine.step import StepOutput, StepPlan, WorkKind

pytestmark = pytest.mark.device
LIMITS = MachineLimits(1e9, 1e9)


class TickingClock(VirtualClock):
    """Moves on by one second at every reading."""

    def now(self) -> float:
        self.advance(1.0)
        return super().now()


class SlowRunner:
    """Lets `before + forward + after` seconds pass and calls the model's hooks in between."""

    def __init__(self, clock: VirtualClock, module: torch.nn.Module | None) -> None:
        self._clock = clock
        self._module = module
        self.plans: list[StepPlan] = []
        self.forgotten: list[str] = []

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        for work in plan.work:
            request = requests[work.request_id]
            assert work.num_computed_tokens == request.num_computed_tokens
            assert work.num_context_tokens == request.num_known_tokens
        self.plans.append(plan)
        self._clock.advance(0.25)
        if self._module is not None:
            self._module(torch.zeros(1))
        self._clock.advance(0.5)
        return StepOutput()

    def swap_out(self, blocks: Any, host_blocks: Any) -> None:
        raise AssertionError

    def swap_in(self, host_blocks: Any, blocks: Any) -> None:
        raise AssertionError

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


class SlowModule(torch.nn.Module):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._clock.advance(2.0)
        return x


def timer_on(tiny: Any, runner: SlowRunner, clock: VirtualClock, module: Any) -> StepTimer:
    timer = StepTimer(tiny.served, runner, 4, LIMITS, clock)
    timer._watch = ForwardWatch(module, clock, torch.device("cpu"))
    return timer


def test_a_step_is_its_forward_and_the_engines_own(tiny: Any) -> None:
    clock = VirtualClock()
    module = SlowModule(clock)
    runner = SlowRunner(clock, module)
    timing = timer_on(tiny, runner, clock, module).time(StepShape(num_decodes=2, num_context=9))
    assert (timing.step_s, timing.forward_s, timing.overhead_s) == (2.75, 2.0, 0.75)
    assert timing.num_steps == 5
    # One that pays for set-up, five that are timed, five that are watched.
    assert len(runner.plans) == 11
    assert timing.share == pytest.approx(timing.limit_s / 2.75)
    contexts = [[work.num_context_tokens for work in plan.work] for plan in runner.plans]
    assert contexts == [[9 + i, 9 + i] for i in range(11)]
    assert runner.forgotten == ["timed-0", "timed-1"]
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_a_forward_that_is_not_seen_is_not_guessed(tiny: Any) -> None:
    clock = VirtualClock()
    timing = timer_on(tiny, SlowRunner(clock, None), clock, SlowModule(clock)).time(
        StepShape(num_decodes=1, num_context=3)
    )
    assert (timing.step_s, timing.forward_s, timing.overhead_s) == (0.75, None, None)


def test_a_prompt_is_another_request_every_time(tiny: Any) -> None:
    clock = VirtualClock()
    runner = SlowRunner(clock, None)
    timer_on(tiny, runner, clock, SlowModule(clock)).time(StepShape(num_chunk=7))
    names = [plan.work[0].request_id for plan in runner.plans]
    assert len(set(names)) == len(names)
    assert set(names) <= set(runner.forgotten)
    assert {(w.kind, w.num_tokens) for p in runner.plans for w in p.work} == {(WorkKind.PREFILL, 7)}


def test_no_two_requests_of_a_batch_share_a_block() -> None:
    batch = Batch(StepShape(num_decodes=3, num_context=10), 4, 96)
    blocks = [block for request in batch.requests.values() for block in request.block_table]
    assert len(set(blocks)) == len(blocks)
    for _ in range(50):
        for work in batch.next_plan().work:
            assert work.num_context_tokens <= 4 * len(batch.requests[work.request_id].block_table)


def test_real_steps_of_a_tiny_model(tiny: Any) -> None:
    shapes = [
        StepShape(num_decodes=3, num_context=8),
        StepShape(num_chunk=20),
        # Longer than the model's context: left out.
        StepShape(num_chunk=4096),
    ]
    timings = list(timings_of(tiny.served, shapes, LIMITS, clock=TickingClock()))
    assert [timing.shape for timing in timings] == shapes[:2]
    # Two readings around a plain step, four around a watched one: the hooks saw one forward.
    assert {(t.step_s, t.forward_s, t.overhead_s) for t in timings} == {(1.0, 1.0, 2.0)}
    assert all(timing.num_bytes > 0 for timing in timings)


def test_the_default_shapes() -> None:
    shapes = default_shapes()
    decodes = {(s.num_decodes, s.num_context) for s in shapes if s.num_decodes}
    assert decodes == {(b, c) for b in (1, 2, 4, 8, 16) for c in (16, 256, 1024)}
    assert [s.num_chunk for s in shapes if s.num_chunk] == [128, 512, 1024]


def test_a_model_that_cannot_be_loaded_is_one_fatal_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(step_timing, "claim_stdout", lambda: LineWriter(stream))
    assert step_timing.main(["./no-such-model"]) == 1
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event["event"] == "fatal"
    assert "no such directory" in event["error"]
