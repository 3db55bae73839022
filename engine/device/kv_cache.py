"""`PagedKvCache`: the paged key and value tensors of every layer, and their copies in host memory.

Owns the memory of the pool on the device and of what is swapped out, how a step writes and how
blocks move. Which block belongs to whom is `engine.blocks`' business.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.device.transfer import IntArray, to_device

# Blocks on their way to or from host memory are packed on the device, this much at a time.
_MAX_PACKED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one attention layer asks of its cache and of a backend.

    Head widths of keys and values may differ (MLA). `num_heads` counts query heads (0 where nobody
    asked), `softcap` is as in `AttentionCall`.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None
    num_heads: int = 0
    softcap: float | None = None

    def num_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token's key and value take in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


class PagedKvCache:
    """Keys and values as (num_blocks, block_size, num_kv_heads, head_dim), one pair per layer.

    The layout is flash-attn's for `block_table`. A slot is `block * block_size + offset`.
    `num_host_blocks` blocks of host memory, pinned where the device is CUDA, take what is swapped
    out: one row per block, holding the keys and values of all layers one after the other.
    """

    def __init__(
        self,
        layers: tuple[LayerGeometry, ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        self.layers = layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self._device = device

        def pages(layer: LayerGeometry, width: int) -> torch.Tensor:
            # Zeros, not empty: padded reads of never-written slots must stay finite.
            shape = (num_blocks, block_size, layer.num_kv_heads, width)
            return torch.zeros(shape, dtype=dtype, device=device)

        self.keys = [pages(layer, layer.key_dim) for layer in layers]
        self.values = [pages(layer, layer.value_dim) for layer in layers]
        self._block_bytes = num_bytes_per_block(layers, block_size, dtype)
        self._host = torch.empty(
            (num_host_blocks, self._block_bytes // dtype.itemsize),
            dtype=dtype,
            # Copies from and to pageable memory are never asynchronous.
            pin_memory=device.type == "cuda" and num_host_blocks > 0,
        )

    def write(
        self, layer_idx: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store `key` and `value` of shape (num_tokens, num_kv_heads, head_dim) at `slots`."""
        self.keys[layer_idx].flatten(0, 1).index_copy_(0, slots, key)
        self.values[layer_idx].flatten(0, 1).index_copy_(0, slots, value)

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy `blocks` of all layers to `host_blocks` (same length; ValueError otherwise).

        On CUDA nothing waits: the copies are on the current stream, before whatever writes the
        blocks next, and `copy_in` on the same stream comes after them.
        """
        for part, host_part in self._parts(blocks, host_blocks):
            index = to_device(part, self._device)
            packed = torch.cat(
                [pages.flatten(1).index_select(0, index) for pages in self._tensors()], dim=1
            )
            for start, stop, host_start in _runs(host_part):
                host = self._host[host_start : host_start + stop - start]
                host.copy_(packed[start:stop], non_blocking=True)

    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy `host_blocks` back to `blocks` (same length; ValueError otherwise), all layers."""
        for part, host_part in self._parts(blocks, host_blocks):
            index = to_device(part, self._device)
            packed = torch.empty(
                (len(part), self._host.shape[1]), dtype=self._host.dtype, device=self._device
            )
            for start, stop, host_start in _runs(host_part):
                host = self._host[host_start : host_start + stop - start]
                packed[start:stop].copy_(host, non_blocking=True)
            offset = 0
            for pages in self._tensors():
                rows = pages.flatten(1)
                width = rows.shape[1]
                rows.index_copy_(0, index, packed[:, offset : offset + width])
                offset += width

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.keys
        yield from self.values

    def _parts(
        self, blocks: Sequence[int], host_blocks: Sequence[int]
    ) -> Iterator[tuple[IntArray, IntArray]]:
        """Pair the blocks, sorted by host block, in parts of bounded size.

        Sorted, because neighbours in host memory then share one copy; bounded, because a part is
        packed in device memory on its way.
        """
        pairs = np.array((blocks, host_blocks), dtype=np.int64)
        # An index out of range would end a CUDA context, with every request in it.
        for name, index, count in zip(
            ("blocks", "host blocks"), pairs, (self.num_blocks, self.num_host_blocks), strict=True
        ):
            if index.size and not 0 <= index.min() <= index.max() < count:
                raise ValueError(f"{name} must lie in 0..{count - 1}, got {index.tolist()}")
        pairs = pairs[:, np.argsort(pairs[1], kind="stable")]
        step = max(1, _MAX_PACKED_BYTES // self._block_bytes)
        for start in range(0, pairs.shape[1], step):
            part = pairs[:, start : start + step]
            yield part[0], part[1]


def _runs(host_blocks: IntArray) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, first host block) of every stretch of consecutive host blocks."""
    breaks = np.flatnonzero(np.diff(host_blocks) != 1) + 1
    bounds = [0, *breaks.tolist(), len(host_blocks)]
    for start, stop in itertools.pairwise(bounds):
        yield start, stop, int(host_blocks[start])


def num_bytes_per_block(
    layers: tuple[LayerGeometry, ...], block_size: int, dtype: torch.dtype
) -> int:
    """Return the bytes that one block takes over all layers, on the device or in host memory."""
    return block_size * sum(layer.num_bytes_per_token(dtype) for layer in layers)


def num_blocks_within(
    num_bytes: int, layers: tuple[LayerGeometry, ...], block_size: int, dtype: torch.dtype
) -> int:
    """Return how many blocks of `block_size` tokens fit into `num_bytes` over all layers."""
    return num_bytes // num_bytes_per_block(layers, block_size, dtype)
