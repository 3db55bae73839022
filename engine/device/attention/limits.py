"""What FlashAttention-2's paged kernels can do, as refusals that name the flag to change.

Owns the limits that flash-attn's own build and torch's share. Must not import either.

Source: `mha_varlen_fwd` of flash-attn 2.8: dtypes float16 and bfloat16, head widths up to 256 and
divisible by 8 and the same for keys and values, query heads a multiple of key heads, paged block
sizes divisible by 256, compute capability 8.0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.device.attention.base import UnsupportedByBackendError
from engine.device.kv_cache import LayerGeometry

BLOCK_SIZE_DIVISOR = 256
MAX_HEAD_DIM = 256
HEAD_DIM_DIVISOR = 8
_MIN_CAPABILITY = (8, 0)
_HALVES = (torch.float16, torch.bfloat16)
_USE_REFERENCE = "use --attention-backend reference"


def check_device(name: str, cache_dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedByBackendError unless `device` is a recent enough GPU and the dtype half."""
    if device.type != "cuda":
        raise UnsupportedByBackendError(
            f"attention backend {name} needs a CUDA device, not {device.type}: {_USE_REFERENCE}"
        )
    if cache_dtype not in _HALVES:
        raise UnsupportedByBackendError(
            f"attention backend {name} computes in float16 or bfloat16, not"
            f" {str(cache_dtype).removeprefix('torch.')}: use --dtype bfloat16, or"
            " --attention-backend reference"
        )
    # Without a device (a dry run) there is nothing to ask.
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_CAPABILITY:
            raise UnsupportedByBackendError(
                f"attention backend {name} needs compute capability 8.0, this device has"
                f" {capability[0]}.{capability[1]}: {_USE_REFERENCE}"
            )


def check_block_size(name: str, block_size: int) -> None:
    """Raise UnsupportedByBackendError unless the block size divides by 256."""
    if block_size < 1 or block_size % BLOCK_SIZE_DIVISOR:
        raise UnsupportedByBackendError(
            f"--block-size {block_size}: {name} wants a multiple of {BLOCK_SIZE_DIVISOR}"
            f" for paged keys and values; use --block-size {BLOCK_SIZE_DIVISOR} or leave it out"
        )


def check_layers(name: str, layers: Sequence[LayerGeometry], *, has_softcap: bool) -> None:
    """Raise UnsupportedByBackendError on a layer that the kernel cannot compute."""
    for index, layer in enumerate(layers):
        reason = _refusal(layer, has_softcap)
        if reason is not None:
            raise UnsupportedByBackendError(
                f"attention backend {name} cannot compute layer {index}: {reason}; {_USE_REFERENCE}"
            )


def _refusal(layer: LayerGeometry, has_softcap: bool) -> str | None:
    if layer.value_dim != layer.key_dim:
        return f"values are {layer.value_dim} wide, keys {layer.key_dim}"
    if layer.key_dim > MAX_HEAD_DIM:
        return f"heads are {layer.key_dim} wide, at most {MAX_HEAD_DIM} can be"
    if layer.key_dim % HEAD_DIM_DIVISOR:
        return f"heads are {layer.key_dim} wide, no multiple of {HEAD_DIM_DIVISOR}"
    if layer.num_heads % layer.num_kv_heads:
        return f"{layer.num_heads} query heads do not share {layer.num_kv_heads} key heads evenly"
    if layer.softcap is not None and not has_softcap:
        return f"it soft-caps scores at {layer.softcap:g}"
    return None
