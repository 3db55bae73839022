"""The `flash_attn` backend: FlashAttention-2's varlen kernel over paged keys and values (CUDA).

Signature: flash-attn 2.8 `flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
max_seqlen_k, …, softmax_scale, causal, window_size, softcap, …, block_table)`; with a
`block_table`, k and v are (num_blocks, block_size, num_kv_heads, head_dim) and causal masks align
bottom-right. Must not be imported for its limits: those are in `limits.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

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

__all__ = ["BLOCK_SIZE_DIVISOR", "FlashAttention", "is_available"]


def is_available() -> bool:
    """Whether a CUDA device and the flash-attn package are here."""
    return torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None


class FlashAttention:
    """One kernel call per layer for the whole mixed batch.

    `kernel` is `flash_attn.flash_attn_varlen_func` unless one is handed in (tests record calls);
    UnsupportedByBackendError if the package cannot be imported.
    """

    name = "flash_attn"
    default_block_size = BLOCK_SIZE_DIVISOR
    is_capturable = True

    def __init__(self, kernel: Callable[..., Any] | None = None) -> None:
        if kernel is None:
            kernel = _import_kernel()
        self._kernel = kernel

    def check(
        self,
        block_size: int,
        cache_dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[LayerGeometry] = (),
    ) -> None:
        """Raise UnsupportedByBackendError naming the flag to change."""
        check_device(self.name, cache_dtype, device)
        check_block_size(self.name, block_size)
        check_layers(self.name, layers, has_softcap=True)

    def attend(
        self, query: torch.Tensor, cache: PagedKvCache, inputs: StepInputs, call: AttentionCall
    ) -> torch.Tensor:
        """Return (num_tokens, num_heads, value_dim)."""
        window = call.sliding_window
        output: torch.Tensor = self._kernel(
            query.contiguous(),
            cache.keys[call.layer_idx],
            cache.values[call.layer_idx],
            cu_seqlens_q=inputs.cu_seqlens_q,
            cu_seqlens_k=inputs.cu_seqlens_k,
            max_seqlen_q=inputs.max_seqlen_q,
            max_seqlen_k=inputs.max_seqlen_k,
            softmax_scale=call.scale,
            causal=True,
            # (left, right) exclusive of the token itself: W tokens including it are W-1 to the
            # left.
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=0.0 if call.softcap is None else call.softcap,
            block_table=inputs.block_table,
        )
        return output


def _import_kernel() -> Callable[..., Any]:
    try:
        from flash_attn import flash_attn_varlen_func  # heavy, and only where it exists
    except Exception as error:
        # A wheel for another torch has undefined symbols; what else it trips over is its own.
        line = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise UnsupportedByBackendError(
            f"attention backend flash_attn: the flash-attn package cannot be used with torch"
            f" {torch.__version__} ({line}): install it anew, or use --attention-backend"
            " torch_varlen"
        ) from error
    kernel: Callable[..., Any] = flash_attn_varlen_func
    return kernel
