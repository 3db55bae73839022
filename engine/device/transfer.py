"""Between host arrays and device tensors: one asynchronous copy each way, one wait.

Owns pinning and the only wait of a step. Must not know what the numbers mean. On a CPU everything
here is a view or a plain copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]


def to_device(array: AnyArray, device: torch.device) -> torch.Tensor:
    """Return `array` on `device` without waiting for it; the array may be changed afterwards.

    On CUDA it goes through pinned memory of torch's caching allocator, which keeps the memory until
    the copy is done.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host.to(device, copy=True)
    return host.pin_memory().to(device, non_blocking=True)


def to_host(
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    on_queued: Callable[[], None] | None = None,
) -> list[AnyArray]:
    """Start one copy per tensor, wait once for all that `device` was given to do, return arrays.

    Waits also where `tensors` is empty: a step's time is that of its work. `on_queued` is called
    between the copies and the wait.
    """
    on_queued = on_queued or (lambda: None)
    if device.type != "cuda":
        arrays = [tensor.detach().cpu().numpy() for tensor in tensors]
        on_queued()
        return arrays
    hosts = []
    for tensor in tensors:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        hosts.append(host.copy_(tensor, non_blocking=True))
    on_queued()
    torch.cuda.current_stream(device).synchronize()
    return [host.numpy() for host in hosts]


class StepBuffer:
    """A staging buffer of one integer type that is filled and sent to the device once per step.

    Kept between steps and grown by doubling. On CUDA it is pinned, and filled again only once the
    copy of the step before is done.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._is_cuda = device.type == "cuda"
        # Sections start on cache lines: kernels may want aligned pointers.
        self._unit = 64 // dtype.itemsize
        self._host = torch.empty(0, dtype=dtype)
        self._copied: torch.cuda.Event | None = None

    def send(self, arrays: Sequence[AnyArray]) -> list[torch.Tensor]:
        """Return the arrays on the device, in this buffer's type and their own shapes.

        They are views of one tensor that nobody writes again.
        """
        starts = [0]
        for array in arrays:
            starts.append(starts[-1] + -(-array.size // self._unit) * self._unit)
        if self._copied is not None:
            self._copied.synchronize()
        if starts[-1] > self._host.numel():
            self._host = torch.empty(2 * starts[-1], dtype=self._dtype, pin_memory=self._is_cuda)
        host = self._host.numpy()
        for start, array in zip(starts, arrays, strict=False):
            np.copyto(host[start : start + array.size], array.ravel(), casting="same_kind")
        sent = self._host[: starts[-1]].to(self._device, non_blocking=True, copy=True)
        if self._is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            self._copied.record(torch.cuda.current_stream(self._device))
        return [
            sent[start : start + array.size].view(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]
