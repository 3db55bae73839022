"""Warm-up: what moving KV to host memory is found to cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from controller.runtime.warmup import time_swap
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.request import Request
from engine.step import StepOutput, StepPlan

STEP_S, BLOCK_S = 0.5, 0.001


class CopyingRunner:
    """Copies take `BLOCK_S` a block, at once or, asynchronously, before the next step can end."""

    def __init__(self, *, is_asynchronous: bool) -> None:
        self.clock = VirtualClock()
        self.is_asynchronous = is_asynchronous
        self.pending_s = 0.0
        self.num_copied = 0
        self.written: set[int] = set()
        self.forgotten: list[str] = []

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        self.clock.advance(STEP_S + self.pending_s)
        self.pending_s = 0.0
        for request in requests.values():
            assert not self.written & set(request.block_table)
        return StepOutput()

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self._copy(blocks, host_blocks)

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        self.written.update(blocks)
        self._copy(blocks, host_blocks)

    def _copy(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        assert len(blocks) == len(host_blocks)
        self.num_copied += len(blocks)
        first_use_s = 5.0 if self.num_copied == len(blocks) else 0.0
        if self.is_asynchronous:
            self.pending_s += BLOCK_S * len(blocks) + first_use_s
        else:
            self.clock.advance(BLOCK_S * len(blocks) + first_use_s)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("num_host_blocks", [1, 3, 1000])
def test_a_block_costs_what_its_copy_takes(is_asynchronous: bool, num_host_blocks: int) -> None:
    runner = CopyingRunner(is_asynchronous=is_asynchronous)
    config = EngineConfig(num_blocks=200, num_host_blocks=num_host_blocks)
    assert time_swap(runner, config, runner.clock) == pytest.approx(BLOCK_S)
    assert max(runner.written) < 200
    assert runner.forgotten


@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(200, 0), (1, 8)])
def test_nothing_to_move_has_no_cost(num_blocks: int, num_host_blocks: int) -> None:
    runner = CopyingRunner(is_asynchronous=False)
    config = EngineConfig(num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    assert time_swap(runner, config, runner.clock) is None
    assert runner.num_copied == 0
