"""Real steps against the clock: how long a step takes, how much of it is the model's forward, and
how close that comes to the machine's limit.

Owns the made-up requests and the timing. Must not decide a step or know a planner. Run as
`python -m engine.device.step_timing MODEL` it measures a list of shapes when it reads a line and
writes JSON lines.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import nn

from engine.blocks import num_blocks_for
from engine.clock import Clock, MonotonicClock
from engine.device.attention.choice import choose_backend
from engine.device.demo import prepare_demo
from engine.device.json_lines import LineWriter, claim_stdout, error_line
from engine.device.model import DecoderModel, load_model
from engine.device.roofline import (
    MachineLimits,
    measure_bandwidth,
    measure_multiply_adds,
    weigh_model,
    weigh_step,
)
from engine.device.runner import TorchRunner
from engine.ports import ModelRunner
from engine.request import Request
from engine.step import StepPlan, StepWork, WorkKind

DECODE_BATCHES = (1, 2, 4, 8, 16)
DECODE_CONTEXTS = (16, 256, 1024)
PREFILL_CHUNKS = (128, 512, 1024)

_MIN_STEPS = 5
_MAX_STEPS = 25
_ENOUGH_S = 0.7
"""Steps of one shape are repeated until they add up to this, within the bounds above."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Either `num_decodes` decodes at a context of `num_context` tokens, or one whole prompt of
    `num_chunk` tokens.
    """

    num_decodes: int = 0
    num_context: int = 0
    num_chunk: int = 0

    @property
    def num_slots(self) -> int:
        """KV slots that its requests need while their steps are timed."""
        if self.num_chunk:
            return self.num_chunk
        return self.num_decodes * (self.num_context + 2 * _MAX_STEPS + 2)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Medians over the timed steps of one shape, in seconds.

    `overhead_s` is the step less its forward, measured within the same steps: inputs, sampling, the
    copy of the tokens. None, like `forward_s`, where the forward was not seen (a recorded graph).
    `limit_s` is the machine's bound for the step and `share` the part of it reached: limit / step.
    """

    shape: StepShape
    num_steps: int
    step_s: float
    forward_s: float | None
    overhead_s: float | None
    num_bytes: int
    num_multiply_adds: int
    limit_s: float
    share: float


def default_shapes() -> tuple[StepShape, ...]:
    """Return decodes of every batch at every context, then prompts."""
    decodes = [
        StepShape(num_decodes=batch, num_context=context)
        for context in DECODE_CONTEXTS
        for batch in DECODE_BATCHES
    ]
    return (*decodes, *(StepShape(num_chunk=chunk) for chunk in PREFILL_CHUNKS))


class Batch:
    """Requests in the middle of their life, one step after another.

    Every step computes a token more than the one before, as a server's do: what a runner caches of
    a request may help it here only as far as it would help there.
    """

    def __init__(self, shape: StepShape, block_size: int, vocab_size: int) -> None:
        self._shape = shape
        self._block_size = block_size
        # Any tokens will do, as long as they differ: zeros would gather one row of the embedding,
        # which is often all zeros itself.
        self._ids = random.Random(0)  # noqa: S311 - prompts, not secrets
        self._vocab = range(vocab_size)
        self._num_made = 0
        self._next_block = 0
        self.requests: dict[str, Request] = {}
        for _ in range(shape.num_decodes):
            self._add(num_prompt=shape.num_context - 1, num_more=2 * _MAX_STEPS + 2)

    def _add(self, num_prompt: int, num_more: int) -> Request:
        prompt = tuple(self._ids.choices(self._vocab, k=num_prompt))
        request = Request(f"timed-{self._num_made}", prompt, num_more, 0.0)
        self._num_made += 1
        num_blocks = num_blocks_for(num_prompt + num_more, self._block_size)
        request.block_table = list(range(self._next_block, self._next_block + num_blocks))
        self._next_block += num_blocks
        self.requests[request.request_id] = request
        return request

    def next_plan(self) -> StepPlan:
        """Return the next step's plan; the requests are as the plan finds them."""
        if self._shape.num_chunk:
            # A prompt is computed once: every step gets a request of its own, on the same blocks.
            self.requests.clear()
            self._next_block = 0
            request = self._add(num_prompt=self._shape.num_chunk, num_more=0)
            work = StepWork(request.request_id, WorkKind.PREFILL, self._shape.num_chunk, 0)
            return StepPlan(work=(work,))
        for request in self.requests.values():
            request.num_computed_tokens = request.num_known_tokens
            request.output_token_ids.append(self._ids.choice(self._vocab))
        return StepPlan(
            work=tuple(
                StepWork(request.request_id, WorkKind.DECODE, 1, request.num_computed_tokens)
                for request in self.requests.values()
            )
        )


class ForwardWatch:
    """Times the model's forward inside a step by hooks on the model itself.

    On CUDA it waits for the device before and after, which a step does not: steps that are watched
    are not the ones whose time is quoted.
    """

    def __init__(self, module: nn.Module, clock: Clock, device: torch.device) -> None:
        self._module = module
        self._clock = clock
        self._device = device
        self._started_at = 0.0
        self._seconds = 0.0
        self._num_calls = 0

    def watch(self, run: Callable[[], object]) -> float | None:
        """Run and return the seconds spent in forwards; None if there was none to see."""
        self._seconds, self._num_calls = 0.0, 0
        handles = (
            self._module.register_forward_pre_hook(self._start),
            self._module.register_forward_hook(self._end),
        )
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        return self._seconds if self._num_calls else None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock.now()

    def _start(self, module: nn.Module, inputs: object) -> None:
        self._started_at = self._now()

    def _end(self, module: nn.Module, inputs: object, output: object) -> None:
        self._seconds += self._now() - self._started_at
        self._num_calls += 1


class StepTimer:
    """Times shapes on one runner."""

    def __init__(
        self,
        model: DecoderModel,
        runner: ModelRunner,
        block_size: int,
        limits: MachineLimits,
        clock: Clock,
    ) -> None:
        self._runner = runner
        self._block_size = block_size
        self._limits = limits
        self._clock = clock
        self._vocab_size = model.vocab_size
        self._weight = weigh_model(model.module, model.layers)
        self._watch = ForwardWatch(model.module, clock, model.device)

    def time(self, shape: StepShape) -> StepTiming:
        """Time one shape: plain steps first, then as many whose forward is watched."""
        batch = Batch(shape, self._block_size, self._vocab_size)
        # The first step pays for lazy set-up.
        self._execute(batch, batch.next_plan())
        plain: list[float] = []
        plan = StepPlan()
        while self._wants_more(plain):
            plan = batch.next_plan()
            plain.append(self._timed(batch, plan))
        forwards: list[float] = []
        overheads: list[float] = []
        for _ in plain:
            seconds, forward_s = self._watched(batch, batch.next_plan())
            if forward_s is not None:
                forwards.append(forward_s)
                overheads.append(seconds - forward_s)
        num_sampled = shape.num_decodes or 1
        weight = weigh_step(self._weight, plan.work, num_sampled)
        step_s = statistics.median(plain)
        limit_s = self._limits.limit_s(weight)
        for request_id in batch.requests:
            self._runner.forget(request_id)
        return StepTiming(
            shape=shape,
            num_steps=len(plain),
            step_s=step_s,
            forward_s=statistics.median(forwards) if forwards else None,
            overhead_s=statistics.median(overheads) if overheads else None,
            num_bytes=weight.num_bytes,
            num_multiply_adds=weight.num_multiply_adds,
            limit_s=limit_s,
            share=limit_s / step_s,
        )

    def _wants_more(self, timings: Sequence[float]) -> bool:
        if len(timings) < _MIN_STEPS:
            return True
        return len(timings) < _MAX_STEPS and sum(timings) < _ENOUGH_S

    def _timed(self, batch: Batch, plan: StepPlan) -> float:
        started_at = self._clock.now()
        self._execute(batch, plan)
        return self._clock.now() - started_at

    def _watched(self, batch: Batch, plan: StepPlan) -> tuple[float, float | None]:
        started_at = self._clock.now()
        forward_s = self._watch.watch(lambda: self._execute(batch, plan))
        return self._clock.now() - started_at, forward_s

    def _execute(self, batch: Batch, plan: StepPlan) -> None:
        self._runner.execute(plan, batch.requests)
        if plan.num_prefill_tokens:
            # The next one is another request; a runner may keep nothing of this one.
            for request_id in batch.requests:
                self._runner.forget(request_id)


def timings_of(
    model: DecoderModel,
    shapes: Sequence[StepShape],
    limits: MachineLimits,
    backend_name: str = "auto",
    clock: Clock | None = None,
) -> Iterator[StepTiming]:
    """Yield the timing of every shape that the model's context holds, on a pool made for them."""
    backend, block_size = choose_backend(
        backend_name, None, model.dtype, model.device, model.layers
    )
    fitting = [
        shape
        for shape in shapes
        if max(shape.num_chunk, shape.num_context + 2 * _MAX_STEPS + 2)
        <= model.max_position_embeddings
    ]
    if not fitting:
        return
    # A block more per request than its tokens fill: every request has blocks of its own.
    num_blocks = max(
        num_blocks_for(shape.num_slots, block_size) + max(1, shape.num_decodes) for shape in fitting
    )
    runner = TorchRunner(model, backend, num_blocks, block_size, seed=0)
    timer = StepTimer(model, runner, block_size, limits, clock or MonotonicClock())
    for shape in fitting:
        yield timer.time(shape)


def serve(source: str, dtype: str, device: str, backend: str, writer: LineWriter) -> None:
    """Load, measure the machine, tell `ready`; then, for every line read, time all shapes."""
    transformers.utils.logging.disable_progress_bar()
    path = str(prepare_demo(lambda done, total, text: None)) if source == "demo" else source
    model = load_model(path, dtype, device)
    limits = MachineLimits(
        measure_bandwidth(model.device, model.dtype),
        measure_multiply_adds(model.device, model.dtype),
    )

    writer.write(
        "ready",
        limits=asdict(limits),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        num_threads=torch.get_num_threads(),
        num_shapes=len(default_shapes()),
        torch=torch.__version__,
    )
    for line in sys.stdin:
        name = json.loads(line)["name"]
        for timing in timings_of(model, default_shapes(), limits, backend):
            writer.write("timing", name=name, **asdict(timing))
        writer.write("finished", name=name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement; returns the exit code, 1 after a `fatal` line."""
    parser = argparse.ArgumentParser(description="time real steps against the machine's limit")
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention-backend", default="auto")
    options: Any = parser.parse_args(arguments)
    writer = claim_stdout()
    try:
        serve(options.model, options.dtype, options.device, options.attention_backend, writer)
    except Exception as error:
        # A model that cannot be loaded, memory that is not there: one line for who measures.
        writer.write("fatal", error=error_line(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
