"""The `torch_varlen` backend: torch's own variable-length FlashAttention kernel (CUDA, no install).

Owns two ways to call `torch.nn.attention.varlen.varlen_attn`. Paged: keys and values stay in their
blocks and `block_table` with `seqused_k` (torch 2.13) points at them. Gathered: where this torch
or this device lacks them, the step's keys and values are copied together first, for every layer.
Which one works is seen by trying, not by a version.

The kernel's contract (docstring of torch 2.13): query (T_q, H_q, D); key and value (T_k, H_kv, D),
or (pages, page_size, H_kv, D) with `block_table` (N, pages_per_sequence) int32, which requires
`seqused_k` (N,) int32; `cu_seq_q`, `cu_seq_k` (N+1,) int32; `window_size` (left, right), (-1, 0) is
causal, the mask aligned bottom-right; no soft-capping; one width for keys and values.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from engine.device.attention.base import AttentionCall, UnsupportedByBackendError
from engine.device.attention.limits import (
    BLOCK_SIZE_DIVISOR,
    check_block_size,
    check_device,
    check_layers,
)
from engine.device.inputs import StepInputs
from engine.device.kv_cache import LayerGeometry, PagedKvCache

# Without these the kernel cannot tell where a chunk stands behind its past.
_NEEDED = frozenset({"window_size", "scale", "enable_gqa"})
_PAGED = frozenset({"block_table", "seqused_k"})


def find_kernel() -> Callable[..., Any] | None:
    """Return torch's `varlen_attn` if this torch has one that can be used, else None."""
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return None
    kernel: Callable[..., Any] | None = getattr(module, "varlen_attn", None)
    if kernel is None or not set(inspect.signature(kernel).parameters) >= _NEEDED:
        return None
    return kernel


def takes_pages(kernel: Callable[..., Any]) -> bool:
    """Whether the kernel's signature has what paged keys and values need."""
    return set(inspect.signature(kernel).parameters) >= _PAGED


class TorchVarlenAttention:
    """One kernel call per layer for the whole mixed batch.

    `is_paged` None takes pages if the kernel's signature does. UnsupportedByBackendError if there
    is no kernel, or pages are asked of one that takes none.
    """

    name = "torch_varlen"

    def __init__(
        self, kernel: Callable[..., Any] | None = None, *, is_paged: bool | None = None
    ) -> None:
        kernel = find_kernel() if kernel is None else kernel
        if kernel is None:
            raise UnsupportedByBackendError(
                f"attention backend torch_varlen: torch {torch.__version__} has no varlen_attn"
                " with window_size, scale and enable_gqa; use --attention-backend reference"
            )
        can_page = takes_pages(kernel)
        if is_paged and not can_page:
            raise UnsupportedByBackendError(
                f"varlen_attn of torch {torch.__version__} takes no block_table"
            )
        self._kernel = kernel
        self.is_paged = can_page if is_paged is None else is_paged

    @property
    def default_block_size(self) -> int:
        """256 for pages, which the kernel's tiles demand; small blocks where they are gathered."""
        return BLOCK_SIZE_DIVISOR if self.is_paged else 16

    @property
    def is_capturable(self) -> bool:
        """Pages only: gathering copies as many keys as the step has, which a graph cannot vary."""
        return self.is_paged

    def check(
        self,
        block_size: int,
        cache_dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[LayerGeometry] = (),
    ) -> None:
        """Raise UnsupportedByBackendError naming the flag to change."""
        check_device(self.name, cache_dtype, device)
        if self.is_paged:
            check_block_size(self.name, block_size)
        check_layers(self.name, layers, has_softcap=False)

    def attend(
        self, query: torch.Tensor, cache: PagedKvCache, inputs: StepInputs, call: AttentionCall
    ) -> torch.Tensor:
        """Return (num_tokens, num_heads, value_dim).

        UnsupportedByBackendError on soft-capping: leaving it out would serve another model.
        """
        if call.softcap is not None:
            raise UnsupportedByBackendError(
                f"attention backend {self.name} cannot soft-cap scores (layer {call.layer_idx})"
            )
        keys, values = cache.keys[call.layer_idx], cache.values[call.layer_idx]
        pages: dict[str, torch.Tensor] = {}
        if self.is_paged:
            pages = {
                "seqused_k": _context_lengths(inputs),
                "block_table": inputs.block_table,
            }
        else:
            slots = _context_slots(inputs, cache.block_size)
            keys, values = keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]
        window = call.sliding_window
        output: torch.Tensor = self._kernel(
            query.contiguous(),
            keys,
            values,
            inputs.cu_seqlens_q,
            inputs.cu_seqlens_k,
            inputs.max_seqlen_q,
            inputs.max_seqlen_k,
            scale=call.scale,
            # The window is exclusive of the token itself: W tokens are W-1 to its left.
            window_size=(-1, 0) if window is None else (window - 1, 0),
            enable_gqa=query.shape[1] != cache.keys[call.layer_idx].shape[2],
            **pages,
        )
        return output


def _context_lengths(inputs: StepInputs) -> torch.Tensor:
    """Return the keys of every request, (B,) int32, made on the device once per step."""
    key = (TorchVarlenAttention.name, "seqused_k")
    if key not in inputs.scratch:
        inputs.scratch[key] = inputs.cu_seqlens_k.diff()
    lengths: torch.Tensor = inputs.scratch[key]
    return lengths


def _context_slots(inputs: StepInputs, block_size: int) -> torch.Tensor:
    """Return the cache slots of every key of the step in packed order, made once per step."""
    key = (TorchVarlenAttention.name, "slots")
    if key not in inputs.scratch:
        lengths = inputs.context_lengths
        owner = np.repeat(np.arange(len(lengths)), lengths)
        position = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        block = inputs.host_block_table[owner, position // block_size]
        slots = block.astype(np.int64) * block_size + position % block_size
        inputs.scratch[key] = torch.from_numpy(slots).to(inputs.cu_seqlens_k.device)
    result: torch.Tensor = inputs.scratch[key]
    return result
