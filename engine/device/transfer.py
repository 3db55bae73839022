"""Between host arrays and device tensors: one asynchronous copy each way, one wait.

Owns pinning and the only wait of a step. Must not know what the numbers mean. On a CPU everything
here is a view or a plain copy.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def to_host(tensors: Sequence[torch.Tensor], device: torch.device) -> list[AnyArray]:
    """Start one copy per tensor, wait once for all that `device` was given to do, return arrays.

    Waits also where `tensors` is empty: a step's time is that of its work.
    """
    if device.type != "cuda":
        return [tensor.detach().cpu().numpy() for tensor in tensors]
    hosts = []
    for tensor in tensors:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        hosts.append(host.copy_(tensor, non_blocking=True))
    torch.cuda.current_stream(device).synchronize()
    return [host.numpy() for host in hosts]
