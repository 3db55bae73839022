"""The machine's own limit: what a step has to read and multiply, and how fast the device can.

Owns two measurements of the device and the arithmetic of a step's weight (roofline model: Williams,
Waterman, Patterson, CACM 52(4), 2009). Must not time a step or know how one is executed. The limit
is a bound from below: whatever a forward reads twice, or multiplies in vain, is not in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.clock import Clock, MonotonicClock
from engine.device.kv_cache import LayerGeometry
from engine.step import StepWork

CPU_BUFFER_BYTES = 512 << 20
CUDA_BUFFER_BYTES = 4 << 30
"""Far beyond any cache, so that a pass over it is a pass over memory."""

_NUM_PASSES = 7
_COLUMNS = 1024
_CPU_SIZES = (1024, 2048)
_CUDA_SIZES = (4096, 8192)


@dataclass(frozen=True, slots=True)
class StepWeight:
    """What one step cannot avoid: bytes of weights and KV moved, and multiply-adds."""

    num_bytes: int
    num_multiply_adds: int


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What the device can do: bytes read per second, multiply-adds per second."""

    bytes_per_s: float
    multiply_adds_per_s: float

    def limit_s(self, weight: StepWeight) -> float:
        """Return the least seconds that a step of this weight can take: the larger of reading and
        multiplying, as if they overlapped completely.
        """
        return max(
            weight.num_bytes / self.bytes_per_s,
            weight.num_multiply_adds / self.multiply_adds_per_s,
        )


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that are used together: their number, and their size in bytes."""

    num_parameters: int = 0
    num_bytes: int = 0

    def plus(self, parameter: torch.Tensor) -> ParameterGroup:
        """Return the group with one more tensor in it."""
        return ParameterGroup(
            self.num_parameters + parameter.numel(),
            self.num_bytes + parameter.numel() * parameter.element_size(),
        )


@dataclass(frozen=True, slots=True)
class ModelWeight:
    """A decoder's parameters by how a step uses them.

    `matrices` are read once per step and multiplied with every token, `vectors` (norms, biases)
    only read. Of `experts` a token uses `experts_per_token` of `num_experts`. `head` is the output
    projection, read and multiplied only where logits are wanted, tied to the embedding or not.
    `embedding_row_bytes` are gathered per token. `kv_itemsize` is bytes per cached number.
    """

    matrices: ParameterGroup
    vectors: ParameterGroup
    head: ParameterGroup
    embedding_row_bytes: int
    layers: tuple[LayerGeometry, ...]
    kv_itemsize: int
    experts: ParameterGroup = ParameterGroup()
    num_experts: int = 1
    experts_per_token: int = 1


def weigh_model(module: nn.Module, layers: Sequence[LayerGeometry]) -> ModelWeight:
    """Sort the parameters of a transformers model; `layers` are its `DecoderModel.layers`."""
    any_module: Any = module
    embedding = any_module.get_input_embeddings().weight
    head = any_module.get_output_embeddings()
    head_weight = None if head is None else head.weight
    gathered = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    matrices = vectors = experts = ParameterGroup()
    for name, parameter in module.named_parameters():
        if id(parameter) in gathered or parameter is head_weight:
            continue
        if ".experts." in name:
            experts = experts.plus(parameter)
        elif parameter.dim() > 1:
            matrices = matrices.plus(parameter)
        else:
            vectors = vectors.plus(parameter)
    num_experts, per_token = _experts(any_module.config.get_text_config())
    return ModelWeight(
        matrices=matrices,
        vectors=vectors,
        head=ParameterGroup() if head_weight is None else ParameterGroup().plus(head_weight),
        embedding_row_bytes=int(embedding.shape[1]) * embedding.element_size(),
        layers=tuple(layers),
        kv_itemsize=embedding.element_size(),
        experts=experts,
        num_experts=num_experts,
        experts_per_token=per_token,
    )


def _experts(config: Any) -> tuple[int, int]:
    """Return (experts, experts per token) under whatever name the family gives them; (1, 1)."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        count = getattr(config, name, None)
        if count:
            return int(count), int(getattr(config, "num_experts_per_tok", 1))
    return 1, 1


def weigh_step(model: ModelWeight, work: Iterable[StepWork], num_sampled: int) -> StepWeight:
    """Return what a step with this work has to read and multiply.

    `num_sampled` rows need logits. Weights are read once for the whole step. A layer reads the keys
    and values of each request once and writes those of its new tokens; a window bounds what it
    reads. A query multiplies with every key that it may see and sums as many values.
    """
    share = model.experts_per_token / model.num_experts
    num_tokens = num_kv = attention = 0
    for item in work:
        num_tokens += item.num_tokens
        for layer in model.layers:
            width = layer.num_kv_heads * (layer.key_dim + layer.value_dim)
            num_kv += width * (num_keys_read(item, layer) + item.num_tokens)
            attention += (
                layer.num_heads * (layer.key_dim + layer.value_dim) * num_scores(item, layer)
            )
    # Under even routing an expert is left out by all T tokens with probability (1 - share)^T.
    share_read = 1 - (1 - share) ** num_tokens
    num_bytes = (
        model.matrices.num_bytes
        + model.vectors.num_bytes
        + round(share_read * model.experts.num_bytes)
        + (model.head.num_bytes if num_sampled else 0)
        + num_tokens * model.embedding_row_bytes
        + num_kv * model.kv_itemsize
    )
    per_token = model.matrices.num_parameters + round(share * model.experts.num_parameters)
    return StepWeight(
        num_bytes=num_bytes,
        num_multiply_adds=num_tokens * per_token
        + num_sampled * model.head.num_parameters
        + attention,
    )


def num_keys_read(item: StepWork, layer: LayerGeometry) -> int:
    """Return how many positions of the cache one layer has to read for a request's work."""
    past = item.num_computed_tokens
    # The first query of the chunk sees itself and W-1 before it.
    in_sight = past if layer.sliding_window is None else min(past, layer.sliding_window - 1)
    return in_sight + item.num_tokens


def num_scores(item: StepWork, layer: LayerGeometry) -> int:
    """Return how many (query, key) pairs one layer has to score for a request's work: query i of
    the chunk sees the past and i+1 of the chunk, at most the window.
    """
    past, chunk, window = item.num_computed_tokens, item.num_tokens, layer.sliding_window
    if window is None or past + chunk <= window:
        return chunk * past + chunk * (chunk + 1) // 2
    num_growing = max(0, min(chunk, window - past))
    growing = num_growing * past + num_growing * (num_growing + 1) // 2
    return growing + (chunk - num_growing) * window


def measure_bandwidth(
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    num_bytes: int | None = None,
    clock: Clock | None = None,
) -> float:
    """Return the bytes per second of the best of several streaming reads of one large buffer.

    The reads are those of a step: a matrix times one vector and times two, and a sum. `num_bytes`
    is the buffer's size (512 MiB on a CPU, 4 GiB or a quarter of what is free on CUDA).
    """
    device = torch.device(device)
    size = num_bytes or _buffer_bytes(device)
    num_rows = max(1, size // (dtype.itemsize * _COLUMNS))
    # Ones: denormals or NaN could take other paths, and pages that were never written none at all.
    matrix = torch.ones((num_rows, _COLUMNS), dtype=dtype, device=device)
    vector = torch.ones(_COLUMNS, dtype=dtype, device=device)
    pair = torch.ones((_COLUMNS, 2), dtype=dtype, device=device)
    reads: tuple[Callable[[], object], ...] = (
        lambda: torch.mv(matrix, vector),
        lambda: torch.mm(matrix, pair),
        matrix.sum,
    )
    seconds = min(best_s(read, device, _NUM_PASSES, clock) for read in reads)
    return matrix.numel() * dtype.itemsize / seconds


def measure_multiply_adds(
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    sizes: Sequence[int] | None = None,
    clock: Clock | None = None,
) -> float:
    """Return the multiply-adds per second of the best of several large square products."""
    device = torch.device(device)
    rates = []
    for size in sizes or (_CUDA_SIZES if device.type == "cuda" else _CPU_SIZES):
        # Random numbers: a chip that multiplies ones draws less power, and clocks higher.
        left = torch.randn((size, size), device=device).to(dtype)
        right = torch.randn((size, size), device=device).to(dtype)
        product = functools.partial(torch.mm, left, right)
        seconds = best_s(product, device, _NUM_PASSES, clock)
        rates.append(size**3 / seconds)
    return max(rates)


def best_s(
    run: Callable[[], object], device: torch.device, num_runs: int, clock: Clock | None = None
) -> float:
    """Return the seconds of the fastest of `num_runs` runs, after one that is not timed.

    On CUDA the device times itself between two events; elsewhere `clock` does.
    """
    run()
    if device.type == "cuda":
        return min(_event_s(run, device) for _ in range(num_runs))
    clock = clock or MonotonicClock()
    best = float("inf")
    for _ in range(num_runs):
        started_at = clock.now()
        run()
        best = min(best, clock.now() - started_at)
    return best


def _event_s(run: Callable[[], object], device: torch.device) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
    stream = torch.cuda.current_stream(device)
    start.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _buffer_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_BUFFER_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return min(CUDA_BUFFER_BYTES, free // 4)
