"""What a device's error means: lost for good, out of memory with numbers, or nothing of the sort.

Owns the reading of error codes and messages. Must not retry: the loop does.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.device.memory import available_bytes, in_words
from engine.ports import DeviceLostError

# CUDA errors after which the context answers every call with the same error ("the process must be
# terminated and relaunched", CUDA Runtime API, cudaError): no device, ECC, illegal address, launch
# timeout, assert, hardware stack, illegal instruction, misaligned address, address space, program
# counter, launch failure, and others of their kind.
_LOST_CODES = frozenset({46, 100, 101, 214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719})
_CUDA_OUT_OF_MEMORY = 2
_LOST_TEXT = re.compile(
    r"device-side assert|illegal memory access|illegal instruction|misaligned address"
    r"|unspecified launch failure|uncorrectable .*ECC|hardware stack error"
    r"|launch timed out|GPU is lost|no CUDA-capable device|devices? .*unavailable",
    re.IGNORECASE,
)
_MEMORY_TEXT = re.compile(
    r"out of memory|DefaultCPUAllocator|not enough memory|ALLOC_FAILED|cannot allocate memory",
    re.IGNORECASE,
)
_CUDA_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


class StepMemoryError(RuntimeError):
    """The device had no memory for this step; a smaller one may fit."""


@contextmanager
def explained(device: torch.device, what: str) -> Iterator[None]:
    """Raise DeviceLostError or StepMemoryError in place of what `device` threw; the rest passes.

    `what` describes the step in numbers. Out of memory, everything that the failed step still held
    is let go first, the traceback's locals included, so that a smaller step finds the room.
    """
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        if is_out_of_memory(error, text):
            traceback.clear_frames(error.__traceback__)
            message = _memory_message(text, device, what)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            raise StepMemoryError(message) from error
        if is_lost(error, text, device):
            raise DeviceLostError(f"{device} is lost: {text[:300]}") from error
        raise


def is_out_of_memory(error: Exception, text: str) -> bool:
    """Whether `error` says that memory could not be had, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if getattr(error, "error_code", None) == _CUDA_OUT_OF_MEMORY:
        return True
    return isinstance(error, RuntimeError) and bool(_MEMORY_TEXT.search(text))


def is_lost(error: Exception, text: str, device: torch.device) -> bool:
    """Whether the device can compute nothing any more.

    torch.AcceleratorError carries the runtime's code. Libraries on top of it (cuBLAS, NCCL) only
    say that they failed: then a tiny computation tells.
    """
    if not isinstance(error, RuntimeError):
        return False
    code = getattr(error, "error_code", None)
    if code in _LOST_CODES or _LOST_TEXT.search(text):
        return True
    is_suspect = isinstance(error, torch.AcceleratorError) or "CUDA error" in text
    return is_suspect and not _answers(device)


def _answers(device: torch.device) -> bool:
    try:
        return bool((torch.ones(1, device=device) + 1).cpu()[0] == 2)
    except RuntimeError:
        return False


def _memory_message(text: str, device: torch.device, what: str) -> str:
    asked = _CUDA_ASKED.search(text)
    size = in_words(round(float(asked[1]) * _UNITS[asked[2].lower()])) if asked else "memory"
    try:
        free = f"{in_words(_free_bytes(device))} free"
    except (RuntimeError, ValueError, OSError):
        free = "an unknown amount free"
    return (
        f"out of memory on {device}: a step of {what} asked for {size} with {free};"
        " lower --max-num-batched-tokens, --max-num-seqs or --kv-cache-memory-bytes"
    )


def _free_bytes(device: torch.device) -> int:
    """Bytes that can be had: what the device has free plus what torch's allocator holds idle."""
    idle = 0
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_bytes(device) + int(idle)
