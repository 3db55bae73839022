"""Warm-up: the steps of the sweep, and what moving KV to host memory is found to cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from controller.policy.on_time import predict_alone
from controller.runtime.warmup import run_sweep, settle_in, sweep_shapes, time_swap
from costmodel.features import StepFeatures
from costmodel.prior import SweepShape, fit_prior
from costmodel.synthetic import ACCELERATOR, TWO_CORES, SyntheticDevice
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


class RecordingRunner(CopyingRunner):
    """Takes a second a chunk, and remembers what it was given."""

    def __init__(self) -> None:
        super().__init__(is_asynchronous=False)
        self.plans: list[tuple[StepPlan, dict[str, Request]]] = []

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        self.plans.append((plan, dict(requests)))
        self.clock.advance(1.0 * len(plan.work))
        return StepOutput()


def test_the_sweep_runs_what_its_features_say() -> None:
    runner = RecordingRunner()
    config = EngineConfig(num_blocks=64)
    shapes = [SweepShape(10, 0, 0, 0, num_chunks=3), SweepShape(8, 16, 2, 5, is_end=False)]
    samples = run_sweep(runner, config, runner.clock, shapes)
    assert [latency_s for _, latency_s in samples] == [3.0, 3.0]
    # The first execution is repeated: it pays for lazy set-up.
    (several, _), (going_on, requests) = runner.plans[1:]
    assert StepFeatures.of(several.work, 3) == samples[0][0]
    assert StepFeatures.of(going_on.work) == samples[1][0]
    chunk = going_on.work[-1]
    assert chunk.num_context_tokens == requests[chunk.request_id].num_prompt_tokens - 1
    blocks = [block for request in requests.values() for block in request.block_table]
    assert len(blocks) == len(set(blocks))


def test_a_thread_settles_in_with_one_small_step_that_nobody_remembers() -> None:
    runner = RecordingRunner()
    settle_in(runner, 16)
    ((plan, requests),) = runner.plans
    assert StepFeatures.of(plan.work)[:2] == (1.0, 0.0)
    (request,) = requests.values()
    assert request.block_table == [0]
    assert runner.forgotten == [request.request_id]


class DeviceRunner(CopyingRunner):
    """Takes what a make-believe device takes."""

    def __init__(self, device: SyntheticDevice) -> None:
        super().__init__(is_asynchronous=False)
        self.device = device

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        self.clock.advance(self.device.latency_s(StepFeatures.of(plan.work)))
        return StepOutput()


def _sweep(device: SyntheticDevice, config: EngineConfig) -> list[tuple[StepFeatures, float]]:
    runner = DeviceRunner(device)
    return run_sweep(runner, config, runner.clock, sweep_shapes(config))


def test_long_chunks_are_timed_as_far_as_a_step_allows() -> None:
    def longest(config: EngineConfig) -> float:
        return max(features.num_prefill_tokens for features, _ in _sweep(ACCELERATOR, config))

    assert longest(EngineConfig(num_blocks=4000, max_model_len=32_768)) == 8192.0
    assert longest(EngineConfig(num_blocks=4000, max_model_len=1000)) == 1000.0
    assert longest(EngineConfig(num_blocks=4000, max_num_batched_tokens=400)) == 400.0
    # The pool holds 1,600 tokens.
    assert longest(EngineConfig(num_blocks=100, max_model_len=32_768)) == 512.0


def test_long_chunks_are_left_out_where_they_take_long() -> None:
    config = EngineConfig(num_blocks=4000, max_model_len=32_768)
    assert max(features.num_prefill_tokens for features, _ in _sweep(TWO_CORES, config)) == 512.0
    # Nothing to foresee by.
    runner = DeviceRunner(ACCELERATOR)
    long, decode = SweepShape(2048, 0, 0, 0), SweepShape(0, 0, 1, 16)
    assert run_sweep(runner, config, runner.clock, [long]) == []
    assert len(run_sweep(runner, config, runner.clock, [decode, long])) == 1


@pytest.mark.parametrize("device", [ACCELERATOR, TWO_CORES])
def test_long_prompts_are_foretold_by_the_sweep_alone(device: SyntheticDevice) -> None:
    model = fit_prior(_sweep(device, EngineConfig(num_blocks=4000, max_model_len=32_768)))
    for num_prompt in (512, 1024, 2048, 4096, 8192):
        whole = SweepShape(num_prompt, 0, 0, 0).features()
        foretold_s = float(predict_alone(model, np.array([float(num_prompt)]), 8192)[0])
        assert 0.8 < foretold_s / device.latency_s(whole) < 1.1


def test_long_contexts_are_timed_within_half_of_the_pool() -> None:
    def longest(config: EngineConfig) -> tuple[float, float, float]:
        sweep = _sweep(ACCELERATOR, config)
        alone = [f for f, _ in sweep if f.num_prefill_tokens == 0.0]
        beside = [f for f, _ in sweep if f.num_prefill_tokens and f.num_decode_requests]
        return (
            max(features.decode_context_tokens for features in alone),
            max(features.decode_context_tokens for features in beside),
            max(
                f.chunk_past_tokens / f.num_prefill_tokens for f, _ in sweep if f.chunk_past_tokens
            ),
        )

    # 16 decodes at 8,192 tokens, 3 at 65,536; a chunk of 256 that ends there.
    large = EngineConfig(num_blocks=25_000, max_model_len=131_072)
    assert longest(large) == (3 * 65_536.0, 3 * 65_536.0, 65_536.0 - 256.0)
    medium = EngineConfig(num_blocks=25_000, max_model_len=32_768)
    assert longest(medium) == (16 * 8192.0, 16 * 8192.0, 8192.0 - 256.0)
    # The pool holds 8,000 tokens, or a step few.
    assert longest(EngineConfig(num_blocks=500, max_model_len=32_768))[2] <= 2048.0
    few = EngineConfig(num_blocks=25_000, max_model_len=32_768, max_num_seqs=2)
    assert longest(few)[:2] == (2 * 8192.0, 8192.0)


def test_long_contexts_are_left_out_where_they_take_long() -> None:
    config = EngineConfig(num_blocks=25_000, max_model_len=131_072)
    slow = _sweep(TWO_CORES, config)
    assert max(latency_s for _, latency_s in slow) < 2.0
    assert max(features.decode_context_tokens for features, _ in slow) < 65_536.0
    assert max(features.chunk_past_tokens for features, _ in slow) < 256.0 * 8192.0


@pytest.mark.parametrize("num_decodes", [2, 6, 16])
def test_decodes_at_long_contexts_are_foretold_by_the_sweep_alone(num_decodes: int) -> None:
    config = EngineConfig(num_blocks=25_000, max_model_len=131_072)
    rng = np.random.default_rng(3)
    noisy = [
        (features, latency_s * float(1.0 + 0.03 * rng.standard_normal()))
        for features, latency_s in _sweep(ACCELERATOR, config)
    ]
    model = fit_prior(noisy)
    for context in (30_000.0, 100_000.0, 250_000.0):
        for chunk in (0.0, 300.0):
            step = StepFeatures(chunk, float(num_decodes), context, 0.0, chunk**2, chunk > 0.0)
            foretold_s = float(model.predict(step.to_array()[None]).mean_s[0])
            assert 0.85 < foretold_s / ACCELERATOR.latency_s(step) < 1.15
