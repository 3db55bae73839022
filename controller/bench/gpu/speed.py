"""How fast a step is, against what the device could do.

Owns which steps are timed and in which order. Every time is the wall time of a whole step: inputs,
forward, sampling and the copy back.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from controller.bench.gpu.rows import Number, Row, TimeBox, Verdict, line_of
from controller.bench.gpu.sizes import TrialSizes
from controller.runtime.warmup import run_sweep
from costmodel.prior import SweepShape
from engine.blocks import num_blocks_for
from engine.clock import Clock
from engine.config import EngineConfig
from engine.step import StepWork, WorkKind

if TYPE_CHECKING:
    from engine.device.trial import DeviceTrial, LargeTrial, Timed, TrialRunner


def measure_speed(
    trial: DeviceTrial,
    large: LargeTrial,
    sizes: TrialSizes,
    box: TimeBox,
    clock: Clock,
    backends: Sequence[str],
) -> Iterator[Row]:
    """Yield the device's limits, then one row per timed step, for every backend, with graphs and
    without.
    """
    bytes_per_s, multiply_adds_per_s = large.measure()
    yield Row(
        f"{large.dtype}: the device",
        f"reads {bytes_per_s / 1e9:,.0f} GB/s, multiplies {2e-12 * multiply_adds_per_s:,.1f}"
        " TFLOP/s",
        numbers={"bytes_per_s": bytes_per_s, "multiply_adds_per_s": multiply_adds_per_s},
    )
    shape = large.shape
    yield Row(
        f"{large.dtype}: the model",
        f"{shape.num_layers} layers of {shape.hidden_size}, {shape.num_heads} heads on"
        f" {shape.num_kv_heads}, vocabulary {shape.vocab_size:,}",
    )
    contestants = [
        (backend, with_graphs)
        for backend in backends
        if trial.refusal(backend, large.dtype) is None
        for with_graphs in ((True, False) if trial.is_cuda else (False,))
    ]
    for index, (backend, with_graphs) in enumerate(contestants):
        # Whoever is left shares what is left: a slow backend cannot starve a later one.
        share = box.part(1.0 / (len(contestants) - index))
        yield from _contestant(trial, large, backend, with_graphs, sizes, share, clock)


def _contestant(
    trial: DeviceTrial,
    large: LargeTrial,
    backend: str,
    with_graphs: bool,
    sizes: TrialSizes,
    box: TimeBox,
    clock: Clock,
) -> Iterator[Row]:
    name = f"{backend}{', graphs' if with_graphs else ''}"
    started = TimeBox(clock, 0.0)
    try:
        made = large.runner(backend, sizes.max_batch, sizes.max_context, with_graphs=with_graphs)
    except ValueError as error:
        yield Row(name, str(error), Verdict.REFUSED)
        return
    except Exception as error:
        yield Row(name, line_of(error), Verdict.FAILED)
        return
    if with_graphs and not made.graph_sizes:
        yield Row(name, made.graphs_off or "no graphs", Verdict.REFUSED)
        return
    pool_tokens = made.num_blocks * made.block_size
    text = f"pool of {pool_tokens:,} tokens in blocks of {made.block_size}"
    if with_graphs:
        text += f"; {len(made.graph_sizes)} graphs made in {started.spent_s:.1f} s"
    numbers = {"pool_tokens": pool_tokens, "graphs": len(made.graph_sizes),
               "setup_s": started.spent_s}  # fmt: skip
    yield Row(f"{name}: set-up", text, numbers=numbers)
    config = EngineConfig(
        block_size=made.block_size,
        num_blocks=made.num_blocks,
        max_model_len=sizes.max_context,
        max_num_seqs=sizes.max_batch,
        max_num_batched_tokens=max(sizes.max_batched_tokens, sizes.max_batch),
    )
    timed = trial.timed(made)
    for step in _shapes(sizes, decodes_only=with_graphs):
        what = f"{name}: {_name(step)}"
        if box.is_over:
            yield Row(what, "no time left", Verdict.SKIPPED)
            continue
        try:
            yield _time(large, made, timed, step, config, sizes, clock, what)
        except Exception as error:
            yield Row(what, line_of(error), Verdict.FAILED)
            # After a fault the device may be gone; the other contestants find out for themselves.
            return


def _time(
    large: LargeTrial,
    made: TrialRunner,
    timed: Timed | None,
    step: SweepShape,
    config: EngineConfig,
    sizes: TrialSizes,
    clock: Clock,
    what: str,
) -> Row:
    work = _work(step)
    needed = sum(num_blocks_for(item.num_context_tokens, made.block_size) for item in work)
    if needed > made.num_blocks:
        return Row(what, f"needs {needed} blocks of {made.num_blocks}", Verdict.SKIPPED)
    if timed is not None:
        timed.device_s.clear()
    samples = run_sweep(timed or made.runner, config, clock, (step,) * sizes.repeats)
    seconds = statistics.median(latency_s for _, latency_s in samples)
    limit_s = large.limit_s(work, len(work))
    num_tokens = step.num_chunk_tokens + step.num_decodes
    numbers: dict[str, Number] = {
        "chunk_tokens": step.num_chunk_tokens,
        "decodes": step.num_decodes,
        "context_tokens": step.num_context_tokens,
        "step_s": seconds,
        "tokens_per_s": num_tokens / seconds,
        "limit_s": limit_s,
        "share_of_limit": None if limit_s is None else limit_s / seconds,
    }
    text = f"{seconds * 1e3:,.2f} ms, {num_tokens / seconds:,.0f} tokens/s"
    if timed is not None:
        # The first execution pays for what is lazy.
        device_s = statistics.median(timed.device_s[1:])
        numbers["device_s"] = device_s
        text += f"; device {device_s * 1e3:,.2f} ms"
    if limit_s is not None:
        text += f"; limit {limit_s * 1e3:,.2f} ms, {limit_s / seconds:.0%} of it reached"
    return Row(what, text, numbers=numbers)


def _shapes(sizes: TrialSizes, *, decodes_only: bool) -> list[SweepShape]:
    """Return the steps to time, those first that tell most: short contexts, then long ones."""
    prefills = [SweepShape(tokens, 0, 0, 0) for tokens in sizes.prefill_tokens]
    decodes = [
        SweepShape(0, 0, batch, context)
        for context, batch in itertools.product(sizes.decode_contexts, sizes.decode_batches)
    ]
    return decodes if decodes_only else [*prefills, *decodes]


def _name(step: SweepShape) -> str:
    if step.num_chunk_tokens:
        return f"prefill of {step.num_chunk_tokens}"
    return f"{step.num_decodes} decodes at {step.num_context_tokens}"


def _work(step: SweepShape) -> list[StepWork]:
    work = [
        StepWork(f"d{index}", WorkKind.DECODE, 1, step.num_context_tokens - 1)
        for index in range(step.num_decodes)
    ]
    if step.num_chunk_tokens:
        chunk, past = step.num_chunk_tokens, step.num_past_tokens
        work.append(StepWork("chunk", WorkKind.PREFILL, chunk, past))
    return work
