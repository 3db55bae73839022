"""Sizes of pools follow the memory that there really is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.device.memory import (
    GIB,
    default_host_pool_bytes,
    default_pool_bytes,
    host_available_bytes,
    in_words,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KIB = 1024


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB available and no control groups."""
    write(tmp_path, "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable:  {8 * GIB // KIB} kB\n")
    return tmp_path


def test_the_kernels_estimate(root: Path) -> None:
    assert host_available_bytes(root) == 8 * GIB


def test_a_machine_that_tells_nothing_is_asked_otherwise(tmp_path: Path) -> None:
    assert host_available_bytes(tmp_path) > 0


def test_a_container_of_the_second_version(root: Path) -> None:
    # Inside of a container the path may name a place that is not mounted.
    write(root, "proc/self/cgroup", "0::/docker/abc\n")
    write(root, "sys/fs/cgroup/memory.max", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{GIB}\n")
    write(root, "sys/fs/cgroup/memory.stat", f"anon 5\ninactive_file {GIB // 4}\n")
    assert host_available_bytes(root) == GIB + GIB // 4


def test_the_tightest_of_nested_groups_counts(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/a/b\n")
    for group, limit in (("a", f"{3 * GIB}"), ("a/b", "max")):
        write(root, f"sys/fs/cgroup/{group}/memory.max", f"{limit}\n")
        write(root, f"sys/fs/cgroup/{group}/memory.current", f"{GIB}\n")
    assert host_available_bytes(root) == 2 * GIB


@pytest.mark.parametrize(("limit", "expected"), [(4 * GIB, 3 * GIB), (2**63 - 4096, 8 * GIB)])
def test_a_group_of_the_first_version(root: Path, limit: int, expected: int) -> None:
    write(root, "proc/self/cgroup", "3:cpu,cpuacct:/x\n2:memory:/x\n")
    write(root, "sys/fs/cgroup/memory/x/memory.limit_in_bytes", f"{limit}\n")
    write(root, "sys/fs/cgroup/memory/x/memory.usage_in_bytes", f"{GIB}\n")
    assert host_available_bytes(root) == expected


def test_a_group_that_is_full_leaves_nothing(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", f"{GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{2 * GIB}\n")
    assert host_available_bytes(root) == 0


@pytest.mark.parametrize(
    ("device", "available", "expected"),
    [(CPU, 16 * GIB, GIB), (CPU, GIB, GIB // 2), (CPU, 0, 0), (CUDA, 10 * GIB, 7 * GIB)],
)
def test_the_default_pool(device: torch.device, available: int, expected: int) -> None:
    assert default_pool_bytes(device, available) == expected


@pytest.mark.parametrize(
    ("device", "pool", "left", "expected"),
    [
        (CUDA, 60 * GIB, 100 * GIB, 4 * GIB),
        (CUDA, 60 * GIB, 8 * GIB, 2 * GIB),
        (CPU, GIB, 16 * GIB, GIB // 2),
        (CPU, GIB, GIB, GIB // 4),
        (CPU, GIB, 0, 0),
    ],
)
def test_the_default_host_pool(device: torch.device, pool: int, left: int, expected: int) -> None:
    assert default_host_pool_bytes(device, pool, left) == expected


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (12 << 20, "12 MiB"),
        (GIB + GIB // 2, "1.5 GiB"),
        (140 * GIB, "140 GiB"),
        (2000 * GIB, "2,000 GiB"),
    ],
)
def test_sizes_in_words(num_bytes: int, words: str) -> None:
    assert in_words(num_bytes) == words
