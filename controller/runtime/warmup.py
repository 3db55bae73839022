"""Warm-up: time a short sweep of real steps before the first request, as the cost model's prior,
and what moving KV to host memory takes.

Owns the made-up requests of the sweep. Drives the same runner the loop will drive; nothing of it
reaches telemetry.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from costmodel.features import Regime, StepFeatures
from costmodel.prior import SweepShape, sweep_plan
from engine.blocks import num_blocks_for
from engine.clock import Clock
from engine.config import EngineConfig
from engine.ports import DeviceLostError, ModelRunner
from engine.request import Request
from engine.step import StepPlan, StepWork, WorkKind

logger = logging.getLogger("paceline")

# Each shape is repeated until its timings add up to this, at most so many times: short steps are
# noisy and cheap to repeat, long ones are neither.
_ENOUGH_S = 0.5
_MAX_REPEATS = 3
# Long enough to tell the coefficients apart, short enough to start a server in seconds on a CPU.
_LONGEST_CHUNK = 512
_LONGEST_CONTEXT = 2048
# What a longer chunk takes cannot be told from shorter ones: a floor ends, or the machine slows
# down. Such chunks are timed too, as far as the step allows, where one takes no longer than this.
_LONG_CHUNKS = (2048, 8192)
_LONG_S = 1.0
# Nor can what long contexts cost: of a slope that is told from 1,024 tokens by 3 % of a step
# nothing is right at 100,000. Each of them, in tokens per request, is read by decodes alone, by a
# chunk alone and by decodes beside a chunk, within half of the pool.
_LONG_CONTEXTS = (8192, 65_536)
_MOST_DECODES = 16
_CHUNK_BEHIND, _CHUNK_BESIDE = 256, 512
# As many as a preempted request may hold: enough to stand out beside one step.
_SWAPPED_BLOCKS = 64
# Features that a step's time may grow with: prompt tokens, decodes, their context, chunk·past.
_NUM_GROWING = 4


def sweep_shapes(config: EngineConfig) -> tuple[SweepShape, ...]:
    """Return the steps of a warm-up within the engine's limits, smallest first; the simulator times
    the same.

    The last ones are long chunks and long contexts, which `run_sweep` leaves out on a slow machine.
    """
    shapes = sweep_plan(
        min(config.max_num_batched_tokens, _LONGEST_CHUNK),
        config.max_num_seqs,
        min(config.max_model_len, _LONGEST_CONTEXT),
    )
    most = min(config.max_num_batched_tokens, config.max_model_len)
    longer = sorted({min(size, most) for size in _LONG_CHUNKS if most > _LONGEST_CHUNK})
    chunks = (SweepShape(size, 0, 0, 0) for size in longer)
    return (*shapes, *chunks, *_long_contexts(config))


def _long_contexts(config: EngineConfig) -> Iterator[SweepShape]:
    most = min(config.max_num_batched_tokens, config.max_num_seqs, _MOST_DECODES)
    for context in _LONG_CONTEXTS:
        if context > config.max_model_len:
            return
        # Beside a chunk there is one seat less, and room for its tokens.
        num_held = config.num_blocks * config.block_size // 2 // context
        num_decodes = min(most, num_held)
        behind = min(_CHUNK_BEHIND, config.max_num_batched_tokens)
        yield SweepShape(behind, context - behind, 0, 0, is_end=False)
        if num_decodes < 1:
            continue
        yield SweepShape(0, 0, num_decodes, context)
        beside = min(_CHUNK_BESIDE, config.max_num_batched_tokens - num_decodes)
        num_decodes = min(num_decodes, config.max_num_seqs - 1)
        if beside > 0 and num_decodes > 0:
            yield SweepShape(beside, 0, num_decodes, context)


def run_sweep(
    runner: ModelRunner,
    config: EngineConfig,
    clock: Clock,
    shapes: Iterable[SweepShape],
) -> list[tuple[StepFeatures, float]]:
    """Execute every shape that the pool holds and return (features, least seconds) for each; not
    long ones that may take over a second, by what the shapes before took, or that fail.

    The least of the repeats: what else the machine does can only add to a step, and a prior that is
    too slow refuses promises that nothing would then correct. The very first execution is not
    timed: it pays for lazy set-up, not for work.
    """
    samples: list[tuple[StepFeatures, float]] = []
    is_first = True
    for shape in shapes:
        plan, requests = _plan_of(shape, config.block_size)
        if sum(len(request.block_table) for request in requests.values()) > config.num_blocks:
            continue
        if _is_long(shape) and _foreseen_s(shape.features(), samples) > _LONG_S:
            continue
        if is_first:
            runner.execute(plan, requests)
            is_first = False
        timings: list[float] = []
        try:
            while len(timings) < _MAX_REPEATS and sum(timings) < _ENOUGH_S:
                started_at = clock.now()
                runner.execute(plan, requests)
                timings.append(clock.now() - started_at)
        except Exception as error:
            # The server can do without the long ones, as it can when a client asks for one.
            if isinstance(error, DeviceLostError) or not _is_long(shape):
                raise
            logger.warning("a long warm-up step is left out: %s", " ".join(str(error).split()))
        else:
            samples.append((shape.features(), min(timings)))
        for request_id in requests:
            runner.forget(request_id)
    return samples


def _is_long(shape: SweepShape) -> bool:
    longest = max(shape.num_past_tokens + shape.num_chunk_tokens, shape.num_context_tokens)
    return shape.num_chunk_tokens > _LONGEST_CHUNK or longest > _LONGEST_CONTEXT


def _foreseen_s(features: StepFeatures, samples: Sequence[tuple[StepFeatures, float]]) -> float:
    """Return the seconds of a step by those of a smaller one of its kind, all of which is taken to
    grow like what grows most; the least of them, infinite if there is none. Decodes beside a chunk
    take no longer than both apart.
    """
    if features.regime is Regime.MIXED:
        decodes = StepFeatures(0.0, *features[1:3])
        chunk = features._replace(num_decode_requests=0.0, decode_context_tokens=0.0)
        return _foreseen_s(decodes, samples) + _foreseen_s(chunk, samples)
    wanted = np.array(features[:_NUM_GROWING])
    is_there = wanted > 0.0
    foreseen_s = math.inf
    for sample, latency_s in samples:
        known = np.array(sample[:_NUM_GROWING])
        if ((known > 0.0) == is_there).all():
            growth = float((wanted[is_there] / known[is_there]).max())
            foreseen_s = min(foreseen_s, latency_s * growth)
    return foreseen_s


def time_swap(runner: ModelRunner, config: EngineConfig, clock: Clock) -> float | None:
    """Return the seconds that moving one KV block to host memory, or back, takes.

    None without host blocks. The blocks are nobody's yet: what is copied does not matter. A copy
    may still be under way when the runner returns, so the smallest step is timed with and without
    copies before it: it waits for them. Medians, at least 0; the first round is not counted.
    """
    num_blocks = min(_SWAPPED_BLOCKS, config.num_blocks - 1, config.num_host_blocks)
    if num_blocks < 1:
        return None
    plan, requests = _plan_of(SweepShape(1, 0, 0, 0), config.block_size)
    # The step keeps its own block: nothing is copied over it.
    blocks, host_blocks = range(1, num_blocks + 1), range(num_blocks)
    with_copies: list[float] = []
    without: list[float] = []
    for _ in range(_MAX_REPEATS + 1):
        started_at = clock.now()
        runner.swap_out(blocks, host_blocks)
        runner.swap_in(host_blocks, blocks)
        runner.execute(plan, requests)
        copied_at = clock.now()
        runner.execute(plan, requests)
        with_copies.append(copied_at - started_at)
        without.append(clock.now() - copied_at)
    for request_id in requests:
        runner.forget(request_id)
    copies_s = statistics.median(with_copies[1:]) - statistics.median(without[1:])
    return max(0.0, copies_s) / (2 * num_blocks)


def settle_in(runner: ModelRunner, block_size: int) -> None:
    """Execute the smallest step on the calling thread, before the pool holds anything.

    What a thread's first execution sets up (its pool of OpenMP threads, a device's handles) no
    request should wait for: on two cores its first token came 20 ms late.
    """
    plan, requests = _plan_of(SweepShape(1, 0, 0, 0), block_size)
    runner.execute(plan, requests)
    for request_id in requests:
        runner.forget(request_id)


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
    for chunk in shape.chunks():
        # A prompt that goes on behind its chunk samples nothing.
        end = shape.num_past_tokens + chunk + (0 if shape.is_end else 1)
        add(WorkKind.PREFILL, chunk, shape.num_past_tokens, end)
    return StepPlan(work=tuple(work)), requests
