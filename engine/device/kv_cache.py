"""`PagedKvCache`: the paged key and value tensors of every layer, and how a step writes them.

Owns the memory of the pool on the device. Which block belongs to whom is `engine.blocks`' business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    """

    def __init__(
        self,
        layers: tuple[LayerGeometry, ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.num_blocks = num_blocks
        self.block_size = block_size

        def pages(layer: LayerGeometry, width: int) -> torch.Tensor:
            # Zeros, not empty: padded reads of never-written slots must stay finite.
            shape = (num_blocks, block_size, layer.num_kv_heads, width)
            return torch.zeros(shape, dtype=dtype, device=device)

        self.keys = [pages(layer, layer.key_dim) for layer in layers]
        self.values = [pages(layer, layer.value_dim) for layer in layers]

    def write(
        self, layer_idx: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store `key` and `value` of shape (num_tokens, num_kv_heads, head_dim) at `slots`."""
        self.keys[layer_idx].flatten(0, 1).index_copy_(0, slots, key)
        self.values[layer_idx].flatten(0, 1).index_copy_(0, slots, value)


def num_blocks_within(
    num_bytes: int, layers: tuple[LayerGeometry, ...], block_size: int, dtype: torch.dtype
) -> int:
    """Return how many blocks of `block_size` tokens fit into `num_bytes` over all layers."""
    per_token = sum(layer.num_bytes_per_token(dtype) for layer in layers)
    return num_bytes // (per_token * block_size)


def default_kv_bytes(device: torch.device) -> int:
    """Return a pool size in bytes: 1 GiB on CPU, 70 % of what is free on a CUDA device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.7)
    return 1 << 30
