"""How much memory there really is, and what of it the KV pool and the host pool take by default.

Owns numbers of bytes. Must not allocate any of them.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

GIB = 1 << 30
# A pool on the host competes with everything else there; one on a card has it to itself but for
# the activations of a step.
_CPU_POOL_BYTES = GIB
_CPU_POOL_SHARE = 0.5
_CUDA_POOL_SHARE = 0.7
_HOST_POOL_BYTES = 4 * GIB
_HOST_POOL_SHARE = 0.25
# cgroup v1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT = 1 << 60


def available_bytes(device: torch.device) -> int:
    """Return the bytes that can still be had on `device`: a card's, or the host's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return host_available_bytes()


def host_available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that a process can still have on this host.

    The kernel's own estimate (`MemAvailable`: free plus what it can reclaim), or less where a
    control group bounds us; `root` is where /proc and /sys are found.
    """
    bounds = [_mem_available(root), *_cgroup_rooms(root)]
    known = [bound for bound in bounds if bound is not None]
    if known:
        return max(0, min(known))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_pool_bytes(device: torch.device, available: int) -> int:
    """Return the KV pool's size: 1 GiB on a CPU, or half of what is there; 70 % on a card."""
    if device.type == "cuda":
        return int(available * _CUDA_POOL_SHARE)
    return min(_CPU_POOL_BYTES, int(available * _CPU_POOL_SHARE))


def default_host_pool_bytes(device: torch.device, pool_bytes: int, host_available: int) -> int:
    """Return the size of the host pool that takes the KV of preempted requests.

    `host_available` is what the host has left beside the KV pool. On a card 4 GiB; on a CPU, where
    both pools are the same memory, half the KV pool. A quarter of what is left at most.
    """
    wanted = _HOST_POOL_BYTES if device.type == "cuda" else pool_bytes // 2
    return max(0, min(wanted, int(host_available * _HOST_POOL_SHARE)))


def in_words(num_bytes: int) -> str:
    """Return a size as a person reads it: `1.5 GiB`, `12 MiB`, `480 bytes`."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return (
                f"{num_bytes / unit:.3g} {name}"
                if num_bytes < 1000 * unit
                else (f"{num_bytes / unit:,.0f} {name}")
            )
    return f"{num_bytes} bytes"


def _mem_available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _cgroup_rooms(root: Path) -> list[int]:
    """Return what each control group around this process has left; empty without any limit."""
    rooms: list[int | None] = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        names = ("memory.max", "memory.current", "inactive_file")
        mount = root / "sys/fs/cgroup"
        if number != "0" or controllers:
            if "memory" not in controllers.split(","):
                continue
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount /= "memory"
        # In a container the path may name a place outside of what is mounted: the mount itself is
        # then our own group, and always the last to be asked.
        folder = mount / path.lstrip("/")
        groups = [group for group in (folder, *folder.parents) if group.is_relative_to(mount)]
        rooms += [_room(group, *names) for group in groups]
    return [room for room in rooms if room is not None]


def _room(group: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    """Return limit - usage + file pages that the kernel can drop, None where nothing is limited."""
    limit, usage = "".join(_lines(group / limit_name)), "".join(_lines(group / usage_name))
    if not (limit.isdigit() and usage.isdigit()) or int(limit) >= _NO_LIMIT:
        return None
    reclaimable = 0
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == reclaimable_name:
            reclaimable = int(value)
    return int(limit) - int(usage) + reclaimable


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
