"""CUDA graphs for steps of decodes alone: one recorded forward per padded batch size.

Owns the static buffers that a recorded forward reads, how a step is copied into them, and the
choice between replaying and running. Everything is recorded at load, so no step ever pays for it.
Must not know a request; a runner without graphs computes the same tokens.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.device.attention.base import AttentionBackend
from engine.device.inputs import StepInputs

logger = logging.getLogger("paceline")

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes work on static buffers and returns a function that does it again on whatever they hold."""

# Beyond this many decodes a step's kernels outlast their launches, and a graph gains nothing.
MAX_GRAPH_BATCH = 256
_STEP = 8
# The two runs that are compared use the same kernels; this only has to tell right from wrong.
_TOLERANCE = 0.05


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """Return the padded sizes up to `max_batch`: 1, 2, 4, then multiples of 8, `max_batch` itself.

    At most half of a small batch is padding, at most 7 rows of a large one.
    """
    most = min(max_batch, MAX_GRAPH_BATCH)
    sizes = {size for size in (1, 2, 4, *range(_STEP, most, _STEP)) if size < most}
    return tuple(sorted(sizes | ({most} if most > 0 else set())))


class CudaRecorder:
    """Records into CUDA graphs that share one memory pool (they never run at the same time)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Warm up on a side stream, where lazy set-up may synchronise, then capture."""
        current = torch.cuda.current_stream(self._device)
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch
        side.wait_stream(current)
        with torch.cuda.stream(side):
            run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: another thread may ask CUDA something meanwhile without spoiling this.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()

        def replay() -> None:
            graph.replay()

        return replay


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """What the graphs are made for.

    Up to `max_batch` decodes whose contexts hold at most `max_context` tokens. `scratch_block` is a
    block that no request owns: padded rows write there.
    """

    max_batch: int
    max_context: int
    block_size: int
    scratch_block: int

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest context."""
        return -(-self.max_context // self.block_size)


@dataclass(frozen=True, slots=True)
class GraphRequest:
    """Asks a runner for graphs of up to `max_batch` decodes with contexts of up to `max_context`.

    `record` None records CUDA graphs (tests hand in a double).
    """

    max_batch: int
    max_context: int
    record: Recorder | None = None


def make_graphs(
    request: GraphRequest,
    forward: Callable[[StepInputs], torch.Tensor],
    backend: AttentionBackend,
    block_size: int,
    scratch_block: int,
    device: torch.device,
) -> tuple[DecodeGraphs | None, str | None]:
    """Return recorded graphs, or None and why there are none."""
    if not backend.is_capturable:
        return None, f"attention backend {backend.name} cannot be recorded"
    record = request.record
    if record is None:
        if device.type != "cuda":
            return None, f"no CUDA graphs on {device.type}"
        record = CudaRecorder(device)
    limits = GraphLimits(request.max_batch, request.max_context, block_size, scratch_block)
    graphs = DecodeGraphs(forward, limits, device, record)
    reason = graphs.capture()
    return (graphs, None) if reason is None else (None, reason)


class DecodeGraphs:
    """Recorded forwards of decode-only steps.

    `forward` computes logits (num_tokens, vocab_size) of a `StepInputs` from device memory alone.
    Nothing is recorded before `capture()`.
    """

    def __init__(
        self,
        forward: Callable[[StepInputs], torch.Tensor],
        limits: GraphLimits,
        device: torch.device,
        record: Recorder,
    ) -> None:
        self._forward = forward
        self._limits = limits
        self._record = record
        rows = min(limits.max_batch, MAX_GRAPH_BATCH)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._ids = zeros(1, rows)
        self._positions = zeros(1, rows)
        self._scratch_slot = limits.scratch_block * limits.block_size
        self._slots = zeros(rows) + self._scratch_slot
        self._ends = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._cu_seqlens_k = self._ends.clone()
        # Never -1: entries beyond a context are not read, but they must name a block.
        self._table = zeros(rows, limits.max_blocks, dtype=torch.int32) + limits.scratch_block
        self._rows = torch.arange(rows, device=device)
        self._logits: torch.Tensor | None = None
        self._num_filled = 0
        self._replays: dict[int, Callable[[], None]] = {}
        self._sizes: tuple[int, ...] = ()
        self.num_replayed = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes that are recorded, ascending; empty when graphs are off."""
        return self._sizes

    @torch.inference_mode()
    def capture(self) -> str | None:
        """Record every size, the largest first, and check each against a forward without graph.

        Returns why there are none, or None. Nothing is kept of a failure: a model whose shapes
        depend on its data (experts chosen on the host, say) simply runs without graphs.
        """
        try:
            for size in reversed(batch_sizes(self._limits.max_batch)):
                self._replays[size] = self._capture_one(size)
        except Exception as error:
            self._replays.clear()
            self._logits = None
            line = " ".join(str(error).split())[:200] or type(error).__name__
            logger.warning("CUDA graphs are off: %s", line)
            return line
        self._sizes = tuple(sorted(self._replays))
        return None

    def size_for(self, inputs: StepInputs) -> int | None:
        """Return the padded batch size that this step fits into, or None if it must run."""
        if inputs.max_seqlen_q != 1 or inputs.max_seqlen_k > self._limits.max_context:
            return None
        index = bisect.bisect_left(self._sizes, len(inputs.query_lengths))
        return self._sizes[index] if index < len(self._sizes) else None

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """Return the logits (num_tokens, vocab_size) of every row, or None if it must run.

        The result is a view that the next step overwrites.
        """
        size = self.size_for(inputs)
        if size is None or self._logits is None:
            return None
        num_rows = len(inputs.query_lengths)
        self._fill(inputs, num_rows, size)
        self._replays[size]()
        self.num_replayed += 1
        return self._logits[:num_rows]

    def _fill(self, inputs: StepInputs, num_rows: int, size: int) -> None:
        """Copy a step into the buffers; rows beyond it see one token of the scratch block."""
        self._ids[:, :num_rows].copy_(inputs.input_ids, non_blocking=True)
        self._positions[:, :num_rows].copy_(inputs.position_ids, non_blocking=True)
        self._slots[:num_rows].copy_(inputs.slot_mapping, non_blocking=True)
        self._cu_seqlens_k[: num_rows + 1].copy_(inputs.cu_seqlens_k, non_blocking=True)
        # A table may be wider than any context of the step: blocks reserved ahead.
        width = min(inputs.block_table.shape[1], self._table.shape[1])
        self._table[:num_rows, :width].copy_(inputs.block_table[:, :width], non_blocking=True)
        # Rows that the last step filled and this one does not; those beyond are clean already.
        if num_rows < self._num_filled:
            self._clean(num_rows, self._num_filled)
        self._num_filled = num_rows
        self._end_padding(num_rows, size)

    def _clean(self, start: int, stop: int) -> None:
        """Make rows `start..stop` one token of the scratch block."""
        self._ids[:, start:stop] = 0
        self._positions[:, start:stop] = 0
        self._slots[start:stop] = self._scratch_slot
        self._table[start:stop, :1] = self._limits.scratch_block

    def _end_padding(self, num_rows: int, size: int) -> None:
        """Let every row beyond `num_rows` see one key more than the row before it."""
        if num_rows < size:
            torch.add(
                self._cu_seqlens_k[num_rows : num_rows + 1],
                self._ends[1 : size - num_rows + 1],
                out=self._cu_seqlens_k[num_rows + 1 : size + 1],
            )

    def _capture_one(self, size: int) -> Callable[[], None]:
        static = self._static_inputs(size)
        if self._logits is None:
            # The largest comes first; its logits show how wide and of which dtype all are.
            self._logits = torch.empty_like(self._forward(static))
            static.scratch.clear()
        logits = self._logits

        def run() -> None:
            # What is derived once per step must be derived anew in every replay.
            static.scratch.clear()
            # One copy more, but the logits' own memory goes back to the pool that graphs share.
            logits[:size].copy_(self._forward(static))

        replay = self._record(run)
        static.scratch.clear()
        # Other tokens than were recorded: what was computed on the host would show.
        self._ids[:, :size] = 1
        replay()
        replayed = logits[:size].float()
        expected = self._forward(static).float()
        static.scratch.clear()
        self._clean(0, size)
        error = float((replayed - expected).abs().max())
        largest = float(expected.abs().max())
        if not error <= _TOLERANCE * largest:
            raise RuntimeError(
                f"a replayed forward of {size} decodes is off by {error:.3g} of {largest:.3g}"
            )
        return replay

    def _static_inputs(self, size: int) -> StepInputs:
        names = ("",) * size
        ones = np.ones(size, dtype=np.int64)
        return StepInputs(
            request_ids=names,
            input_ids=self._ids[:, :size],
            position_ids=self._positions[:, :size],
            slot_mapping=self._slots[:size],
            cu_seqlens_q=self._ends[: size + 1],
            cu_seqlens_k=self._cu_seqlens_k[: size + 1],
            max_seqlen_q=1,
            # A number that the graph keeps: it must hold for every step to come.
            max_seqlen_k=self._limits.max_context,
            block_table=self._table[:size],
            sample_rows=self._rows[:size],
            sample_ids=names,
            logit_rows=self._rows[:size],
            score_token_ids=self._rows[:0],
            score_spans=(),
            query_lengths=ones,
            context_lengths=ones,
            host_block_table=np.full((size, 1), self._limits.scratch_block, dtype=np.int64),
        )
