"""Warm-up: time a short sweep of real steps before the first request, as the cost model's prior.

Owns the made-up requests of the sweep. Drives the same runner the loop will drive; nothing of it
reaches telemetry.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from costmodel.features import StepFeatures
from costmodel.prior import SweepShape
from engine.blocks import num_blocks_for
from engine.clock import Clock
from engine.config import EngineConfig
from engine.ports import ModelRunner
from engine.request import Request
from engine.step import StepPlan, StepWork, WorkKind

# Each shape is repeated until its timings add up to this, at most so many times: short steps are
# noisy and cheap to repeat, long ones are neither.
_ENOUGH_S = 0.5
_MAX_REPEATS = 3


def run_sweep(
    runner: ModelRunner,
    config: EngineConfig,
    clock: Clock,
    shapes: Iterable[SweepShape],
) -> list[tuple[StepFeatures, float]]:
    """Execute every shape that the pool holds and return (features, median seconds) for each.

    The very first execution is not timed: it pays for lazy set-up, not for work.
    """
    samples: list[tuple[StepFeatures, float]] = []
    is_first = True
    for shape in shapes:
        plan, requests = _plan_of(shape, config.block_size)
        if sum(len(request.block_table) for request in requests.values()) > config.num_blocks:
            continue
        if is_first:
            runner.execute(plan, requests)
            is_first = False
        timings: list[float] = []
        while len(timings) < _MAX_REPEATS and sum(timings) < _ENOUGH_S:
            started_at = clock.now()
            runner.execute(plan, requests)
            timings.append(clock.now() - started_at)
        samples.append((StepFeatures.of(plan.work), statistics.median(timings)))
        for request_id in requests:
            runner.forget(request_id)
    return samples


def _plan_of(shape: SweepShape, block_size: int) -> tuple[StepPlan, Mapping[str, Request]]:
    """Make requests in the middle of their life whose next step has this shape."""
    requests: dict[str, Request] = {}
    work: list[StepWork] = []
    next_block = 0

    def add(kind: WorkKind, num_tokens: int, num_computed: int, num_prompt: int) -> None:
        nonlocal next_block
        request = Request(f"warmup-{len(requests)}", (0,) * num_prompt, 1, 0.0)
        if kind is WorkKind.DECODE:
            request.output_token_ids.append(0)
        num_blocks = num_blocks_for(num_computed + num_tokens, block_size)
        request.block_table = list(range(next_block, next_block + num_blocks))
        request.num_computed_tokens = num_computed
        next_block += num_blocks
        requests[request.request_id] = request
        work.append(StepWork(request.request_id, kind, num_tokens, num_computed))

    for _ in range(shape.num_decodes):
        context = shape.num_context_tokens
        add(WorkKind.DECODE, 1, context - 1, context - 1)
    if shape.num_chunk_tokens:
        end = shape.num_past_tokens + shape.num_chunk_tokens
        add(WorkKind.PREFILL, shape.num_chunk_tokens, shape.num_past_tokens, end)
    return StepPlan(work=tuple(work)), requests
