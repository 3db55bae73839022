"""The conformance suite: what every `AttentionBackend` must pass on every device it accepts.

Owns the promises of `base.AttentionBackend` as data (`CASES`) and one function that runs a case
against dense float64 attention. A broken promise raises `ConformanceError` with numbers. Must not
know a kernel, and must not measure time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from engine.device.attention.base import (
    AttentionBackend,
    AttentionCall,
    UnsupportedByBackendError,
)
from engine.device.inputs import StepInputs
from engine.device.kv_cache import LayerGeometry, PagedKvCache

# Largest error allowed, in units of the largest value: half precision rounds the probabilities and
# the result; the error grows neither with the context nor with the width.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}

DECODES = ((1, 12), (1, 0), (1, 700), (1, 255), (1, 256), (1, 1), (1, 63))
CHUNKS = ((5, 0), (9, 4), (16, 16), (2, 7), (130, 257), (257, 0), (64, 192))
"""(tokens computed, tokens before) of every request: block edges, tile edges and neither."""


class ConformanceError(AssertionError):
    """A backend broke a promise of the seam."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One packed batch and the layer that attends over it.

    `shapes` holds (tokens computed, tokens before) of every request.
    """

    name: str
    shapes: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 4
    key_dim: int = 64
    value_dim: int = 64
    sliding_window: int | None = None
    softcap: float | None = None

    @property
    def layer(self) -> LayerGeometry:
        """The layer's geometry, as a model's probe would record it."""
        return LayerGeometry(
            num_kv_heads=self.num_kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            sliding_window=self.sliding_window,
            num_heads=self.num_heads,
            softcap=self.softcap,
        )


_MIXED = (*DECODES[:3], *CHUNKS[:5], *DECODES[3:], *CHUNKS[5:])

CASES: tuple[AttentionCase, ...] = (
    AttentionCase("one decode", ((1, 40),)),
    AttentionCase("decodes", DECODES),
    AttentionCase("chunks", CHUNKS),
    AttentionCase("mixed", _MIXED),
    AttentionCase("grouped heads", _MIXED, num_heads=8, num_kv_heads=2),
    AttentionCase("grouped heads, decodes", DECODES, num_heads=14, num_kv_heads=2),
    AttentionCase("one key head", _MIXED, num_heads=4, num_kv_heads=1),
    AttentionCase("wide heads", _MIXED, key_dim=128, value_dim=128),
    AttentionCase("widest heads", _MIXED, key_dim=256, value_dim=256),
    AttentionCase("window of one", _MIXED, sliding_window=1),
    AttentionCase("window", _MIXED, num_heads=8, num_kv_heads=2, sliding_window=11),
    AttentionCase("window of a block", _MIXED, sliding_window=256),
    AttentionCase("window, decodes", DECODES, num_heads=8, num_kv_heads=2, sliding_window=64),
    AttentionCase("window beyond everything", _MIXED, sliding_window=100_000),
    AttentionCase("soft-capped", _MIXED, num_heads=8, num_kv_heads=2, softcap=2.0),
    AttentionCase("soft-capped window", _MIXED, sliding_window=17, softcap=2.0),
    AttentionCase("values narrower than keys", _MIXED, key_dim=96, value_dim=64),
    AttentionCase("odd width", _MIXED, key_dim=12, value_dim=12),
)


class Batch(NamedTuple):
    """What a case attends with; caches are paged, slots of nobody hold NaN."""

    query: torch.Tensor
    cache: PagedKvCache
    inputs: StepInputs
    call: AttentionCall


def check_case(
    backend: AttentionBackend,
    case: AttentionCase,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    seed: int = 0,
) -> float:
    """Run one case and return the largest error in units of the largest value.

    ConformanceError if it is beyond the dtype's tolerance, not finite, or of another shape.
    UnsupportedByBackendError if the backend refuses the case, which breaks no promise.
    """
    backend.check(block_size, dtype, device, (case.layer,))
    batch = make_batch(case, device, dtype, block_size, seed)
    expected = dense_attention(batch)
    output = backend.attend(*batch)
    if output.shape != expected.shape:
        raise ConformanceError(f"{case.name}: shape {tuple(output.shape)}, not {expected.shape}")
    if output.dtype != dtype:
        raise ConformanceError(f"{case.name}: {output.dtype} for {dtype} queries")
    found = output.to(device="cpu", dtype=torch.float64)
    if not bool(torch.isfinite(found).all()):
        raise ConformanceError(f"{case.name}: the output is not finite; what nobody wrote leaks in")
    error = float((found - expected).abs().max() / expected.abs().max())
    if error > TOLERANCES[dtype]:
        raise ConformanceError(
            f"{case.name}: error {error:.2e} of the largest value, at most {TOLERANCES[dtype]:.0e}"
        )
    return error


class Outcome(NamedTuple):
    """What became of one case: an error in units of the largest value, a refusal, or a failure."""

    case: str
    error: float | None = None
    refusal: str | None = None
    failure: str | None = None


def run_cases(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, block_size: int
) -> Iterator[Outcome]:
    """Run every case, one after another; whatever one raises becomes its outcome."""
    for case in CASES:
        try:
            yield Outcome(case.name, error=check_case(backend, case, device, dtype, block_size))
        except UnsupportedByBackendError as error:
            yield Outcome(case.name, refusal=_line(error))
        except Exception as error:
            yield Outcome(case.name, failure=f"{type(error).__name__}: {_line(error)}")


def prove(
    backend: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    layers: tuple[LayerGeometry, ...],
) -> None:
    """Run one small mixed batch per kind of layer; UnsupportedByBackendError if one fails.

    For start-up: a kernel that this build of torch, this driver or this card lacks is found out
    before a request is, and so is one that computes something else.
    """
    shapes = ((1, 300), (1, 2), (70, 33), (3, 0))
    for layer in dict.fromkeys(layers):
        case = AttentionCase(
            name=f"a small batch with {layer.num_heads} heads of {layer.key_dim}",
            shapes=shapes,
            num_heads=layer.num_heads or layer.num_kv_heads,
            num_kv_heads=layer.num_kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            sliding_window=layer.sliding_window,
            softcap=layer.softcap,
        )
        # A second one whose window is really crossed.
        narrow = replace(case, sliding_window=13) if layer.sliding_window is not None else None
        for item in (case, narrow):
            if item is None:
                continue
            try:
                check_case(backend, item, device, dtype, block_size)
            except UnsupportedByBackendError:
                raise
            except Exception as error:
                raise UnsupportedByBackendError(
                    f"attention backend {backend.name} does not work here ({_line(error)[:160]});"
                    " use --attention-backend reference"
                ) from error


def make_batch(
    case: AttentionCase,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    seed: int = 0,
) -> Batch:
    """Return random queries over a paged cache whose blocks are scattered in shuffled order.

    Every slot that belongs to no token of the batch is NaN, in keys and in values; so is a whole
    block that nobody owns.
    """
    generator = torch.Generator().manual_seed(seed)
    queries = np.array([tokens for tokens, _ in case.shapes], dtype=np.int64)
    contexts = np.array([tokens + past for tokens, past in case.shapes], dtype=np.int64)
    num_blocks_of = -(-contexts // block_size)
    num_blocks = int(num_blocks_of.sum()) + 3
    order = torch.randperm(num_blocks, generator=generator).numpy()
    # Table entries beyond a request's blocks name a block of NaN.
    table = np.full((len(queries), int(num_blocks_of.max()) + 1), order[-1], dtype=np.int64)
    first = 0
    for row, count in enumerate(num_blocks_of):
        table[row, :count] = order[first : first + count]
        first += int(count)

    cache = PagedKvCache((case.layer,), num_blocks, block_size, dtype, device)
    owner = np.repeat(np.arange(len(contexts)), contexts)
    position = np.arange(len(owner)) - np.repeat(np.cumsum(contexts) - contexts, contexts)
    slots = table[owner, position // block_size] * block_size + position % block_size
    for pages, width in ((cache.keys[0], case.key_dim), (cache.values[0], case.value_dim)):
        shape = (len(slots), case.num_kv_heads, width)
        known = torch.randn(shape, generator=generator, dtype=torch.float64)
        pages.fill_(math.nan)
        pages.flatten(0, 1)[torch.from_numpy(slots).to(device)] = known.to(device, dtype)

    num_tokens = int(queries.sum())
    query = torch.randn(
        (num_tokens, case.num_heads, case.key_dim), generator=generator, dtype=torch.float64
    )
    is_new = position >= (contexts - queries)[owner]
    cu_q = np.concatenate(([0], np.cumsum(queries)))
    cu_k = np.concatenate(([0], np.cumsum(contexts)))

    def int32(array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(device)

    names = tuple(f"r{row}" for row in range(len(queries)))
    inputs = StepInputs(
        request_ids=names,
        input_ids=torch.zeros((1, num_tokens), dtype=torch.int64, device=device),
        position_ids=torch.from_numpy(position[is_new]).to(device)[None],
        slot_mapping=torch.from_numpy(slots[is_new]).to(device),
        cu_seqlens_q=int32(cu_q),
        cu_seqlens_k=int32(cu_k),
        max_seqlen_q=int(queries.max()),
        max_seqlen_k=int(contexts.max()),
        block_table=int32(table),
        sample_rows=torch.from_numpy(cu_q[1:] - 1).to(device),
        sample_ids=names,
        logit_rows=torch.from_numpy(cu_q[1:] - 1).to(device),
        score_token_ids=torch.zeros(0, dtype=torch.int64, device=device),
        score_spans=(),
        query_lengths=queries,
        context_lengths=contexts,
        host_block_table=table,
    )
    call = AttentionCall(
        0,
        # Sharper than 1/√d: a wrong key must show.
        scale=2.0 / math.sqrt(case.key_dim),
        sliding_window=case.sliding_window,
        softcap=case.softcap,
    )
    return Batch(query.to(device, dtype), cache, inputs, call)


def dense_attention(batch: Batch) -> torch.Tensor:
    """Return softmax(q·kᵀ·scale)·v in float64 on the CPU, request by request, from the formula.

    Shape (num_tokens, num_heads, value_dim). Position p sees the keys j with p - W < j <= p.
    """
    query, cache, inputs, call = batch
    query = query.to(device="cpu", dtype=torch.float64)
    keys = cache.keys[call.layer_idx].flatten(0, 1).to(device="cpu", dtype=torch.float64)
    values = cache.values[call.layer_idx].flatten(0, 1).to(device="cpu", dtype=torch.float64)
    group = query.shape[1] // keys.shape[1]
    outputs = []
    row = 0
    for index, (num_queries, num_keys) in enumerate(
        zip(inputs.query_lengths.tolist(), inputs.context_lengths.tolist(), strict=True)
    ):
        place = np.arange(num_keys)
        table = inputs.host_block_table[index, place // cache.block_size]
        slots = torch.from_numpy(table * cache.block_size + place % cache.block_size)
        k = keys[slots].repeat_interleave(group, dim=1)
        v = values[slots].repeat_interleave(group, dim=1)
        q = query[row : row + num_queries]
        scores = torch.einsum("qhd,khd->hqk", q, k) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        p = torch.arange(num_keys - num_queries, num_keys)[:, None]
        j = torch.arange(num_keys)[None, :]
        is_visible = j <= p
        if call.sliding_window is not None:
            is_visible &= j > p - call.sliding_window
        scores = scores.masked_fill(~is_visible, -math.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1), v))
        row += num_queries
    return torch.cat(outputs)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
