"""Which attention backend and block size: what was asked for, or the fastest that works here.

Owns the order of preference and the proof at load. Must not know a kernel's limits: backends refuse
for themselves, and `auto` falls through to the next one, `reference` last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from engine.device.attention.base import AttentionBackend, UnsupportedByBackendError
from engine.device.attention.checks import prove
from engine.device.attention.flash_attn import FlashAttention
from engine.device.attention.flash_attn import is_available as has_flash_attn
from engine.device.attention.reference import ReferenceAttention
from engine.device.attention.torch_varlen import TorchVarlenAttention
from engine.device.kv_cache import LayerGeometry

logger = logging.getLogger("paceline")

BACKEND_NAMES = ("auto", "flash_attn", "torch_varlen", "reference")


class Choice(NamedTuple):
    """A backend that has proved itself on the device, and the block size to use with it."""

    backend: AttentionBackend
    block_size: int


def choose_backend(
    name: str,
    block_size: int | None,
    dtype: torch.dtype,
    device: torch.device,
    layers: tuple[LayerGeometry, ...],
) -> Choice:
    """Return the backend called `name`, or for `auto` the first that works: flash_attn,
    torch_varlen over pages, torch_varlen gathering, reference.

    UnsupportedByBackendError says why the named one cannot, with the flag to change. Half-precision
    kernels compute one small batch per kind of layer first, whose result must be right.
    """
    if name not in BACKEND_NAMES:
        raise UnsupportedByBackendError(
            f"--attention-backend {name}: expected one of {', '.join(BACKEND_NAMES)}"
        )
    refusal: UnsupportedByBackendError | None = None
    for make in _candidates(name, device):
        try:
            backend = make()
            size = block_size or backend.default_block_size
            backend.check(size, dtype, device, layers)
            if backend.name != ReferenceAttention.name:
                prove(backend, device, dtype, size, layers)
        except UnsupportedByBackendError as error:
            if name == "auto":
                logger.info("attention: passing over a backend: %s", error)
            # The first one's reason: the second way of torch_varlen differs in its needs only.
            refusal = refusal or error
        else:
            return Choice(backend, size)
    if refusal is None:
        raise UnsupportedByBackendError(f"no attention backend for {device.type}")
    raise refusal


def _candidates(name: str, device: torch.device) -> Iterator[Callable[[], AttentionBackend]]:
    is_auto = name == "auto"
    is_cuda = device.type == "cuda"
    if name == "flash_attn" or (is_auto and is_cuda and has_flash_attn()):
        yield _flash_attn
    if name == "torch_varlen" or (is_auto and is_cuda):
        yield lambda: TorchVarlenAttention(is_paged=True)
        yield lambda: TorchVarlenAttention(is_paged=False)
    if name == "reference" or is_auto:
        yield ReferenceAttention


def _flash_attn() -> AttentionBackend:
    if not has_flash_attn():
        raise UnsupportedByBackendError(
            "--attention-backend flash_attn needs a CUDA device and the flash-attn package:"
            " pip install 'paceline[cuda]', or use --attention-backend torch_varlen"
        )
    return FlashAttention()
