"""Doubles of the CUDA kernels: they check their arguments against the documented contract, then
compute the answer from those arguments alone in plain torch. A wrong argument is an error here, or
a wrong token in whatever runs through the double.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from engine.device.attention.flash_attn import FlashAttention
from engine.device.attention.limits import check_layers
from engine.device.attention.torch_varlen import TorchVarlenAttention
from engine.device.kv_cache import LayerGeometry


def attend(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    lengths_q: list[int],
    scale: float,
    window: tuple[int, int],
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attention as flash-attn documents it: the mask is aligned to the bottom right corner, and
    query i sees keys from i + Lk - Lq - left to i + Lk - Lq + right (-1: no bound)."""
    left, right = window
    outputs = []
    first = 0
    for length, few_k, few_v in zip(lengths_q, keys, values, strict=True):
        q = query[first : first + length]
        first += length
        group = q.shape[1] // few_k.shape[1]
        k, v = few_k.repeat_interleave(group, dim=1), few_v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        place = torch.arange(length)[:, None] + len(k) - length
        j = torch.arange(len(k))[None, :]
        is_seen = torch.ones(length, len(k), dtype=torch.bool)
        if left >= 0:
            is_seen &= j >= place - left
        if right >= 0:
            is_seen &= j <= place + right
        scores = scores.masked_fill(~is_seen, -math.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v))
    return torch.cat(outputs)


def check_cumulative(tensor: Any, total: int | None) -> list[int]:
    """Check a `cu_seqlens` tensor and return the lengths."""
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype is torch.int32
    assert tensor.dim() == 1
    assert tensor.is_contiguous()
    ends: list[int] = tensor.tolist()
    assert ends[0] == 0
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    assert min(lengths) > 0
    assert total is None or ends[-1] == total
    return lengths


def check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    assert q.dim() == 3
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.dtype is k.dtype is v.dtype
    assert q.device == k.device == v.device
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] <= 256
    assert q.shape[1] % k.shape[-2] == 0


def gather(
    pages: torch.Tensor, table: Any, lengths: list[int], block_divisor: int
) -> list[torch.Tensor]:
    """Check a block table and return every request's rows out of the pages."""
    assert isinstance(table, torch.Tensor)
    num_blocks, block_size = pages.shape[:2]
    assert pages.dim() == 4
    assert block_size % block_divisor == 0
    assert table.dtype is torch.int32
    assert table.dim() == 2
    assert table.stride(-1) == 1
    assert table.shape[0] == len(lengths)
    rows = []
    for length, blocks in zip(lengths, table.tolist(), strict=True):
        count = -(-length // block_size)
        assert count <= len(blocks)
        used = blocks[:count]
        assert all(0 <= block < num_blocks for block in used)
        assert len(set(used)) == count
        rows.append(pages[used].flatten(0, 1)[:length])
    return rows


class FlashAttnDouble:
    """`flash_attn.flash_attn_varlen_func` with the signature of version 2.8."""

    def __init__(self, block_divisor: int = 256) -> None:
        self.block_divisor = block_divisor
        self.num_calls = 0

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.num_calls += 1
        check_heads(q, k, v)
        assert dropout_p == 0.0
        assert alibi_slopes is None
        assert not return_attn_probs
        lengths_q = check_cumulative(cu_seqlens_q, q.shape[0])
        lengths_k = check_cumulative(cu_seqlens_k, None)
        assert isinstance(max_seqlen_q, int)
        assert isinstance(max_seqlen_k, int)
        assert max_seqlen_q >= max(lengths_q)
        assert max_seqlen_k >= max(lengths_k)
        left, right = window_size
        return attend(
            q,
            gather(k, block_table, lengths_k, self.block_divisor),
            gather(v, block_table, lengths_k, self.block_divisor),
            lengths_q,
            q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            (left, 0) if causal else (left, right),
            softcap,
        )


class VarlenDouble:
    """`torch.nn.attention.varlen.varlen_attn`; calls must bind to the real one's signature."""

    def __init__(self, block_divisor: int = 256) -> None:
        self.block_divisor = block_divisor
        self.num_calls = 0
        self.__signature__ = inspect.signature(varlen_attn)

    def __call__(self, *args: Any, **keywords: Any) -> torch.Tensor:
        self.num_calls += 1
        bound = self.__signature__.bind(*args, **keywords)
        bound.apply_defaults()
        call = bound.arguments
        q, k, v = call["query"], call["key"], call["value"]
        check_heads(q, k, v)
        assert call["return_aux"] is None
        # The real one raises too.
        assert call["enable_gqa"] or q.shape[1] == k.shape[-2]
        lengths_q = check_cumulative(call["cu_seq_q"], q.shape[0])
        table, used = call["block_table"], call["seqused_k"]
        if table is None:
            assert used is None
            lengths_k = check_cumulative(call["cu_seq_k"], k.shape[0])
            keys, values = list(k.split(lengths_k)), list(v.split(lengths_k))
        else:
            assert used.dtype is torch.int32
            assert used.shape == (len(lengths_q),)
            assert used.is_contiguous()
            lengths_k = used.tolist()
            assert lengths_k == check_cumulative(call["cu_seq_k"], None)
            keys = gather(k, table, lengths_k, self.block_divisor)
            values = gather(v, table, lengths_k, self.block_divisor)
        assert call["max_q"] >= max(lengths_q)
        assert call["max_k"] >= max(lengths_k)
        scale = call["scale"]
        return attend(
            q,
            keys,
            values,
            lengths_q,
            q.shape[-1] ** -0.5 if scale is None else scale,
            call["window_size"],
        )


class FlashAttentionOnCpu(FlashAttention):
    """The backend as it is, but its refusal of this device, dtype and small blocks."""

    def __init__(self, block_divisor: int = 4) -> None:
        self.double = FlashAttnDouble(block_divisor)
        super().__init__(self.double)

    def check(
        self,
        block_size: int,
        cache_dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[LayerGeometry] = (),
    ) -> None:
        check_layers(self.name, layers, has_softcap=True)


class TorchVarlenOnCpu(TorchVarlenAttention):
    """The backend as it is, but its refusal of this device, dtype and small blocks."""

    def __init__(self, is_paged: bool, block_divisor: int = 4) -> None:
        self.double = VarlenDouble(block_divisor)
        super().__init__(self.double, is_paged=is_paged)

    def check(
        self,
        block_size: int,
        cache_dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[LayerGeometry] = (),
    ) -> None:
        check_layers(self.name, layers, has_softcap=False)
