"""The same arguments, the same workload: in another process, under another hash seed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Everything that draws, and everything that could iterate over a set or a hash.
SCRIPT = """
import hashlib, sys
from pathlib import Path
from controller.workload.generators import Phase, gamma, poisson, square_wave
from controller.workload.lengths import FixedLengths, LognormalLengths, TraceLengths
from controller.workload.traces import read_trace, write_trace
from controller.workload.transforms import assign_classes, assign_classes_by_length, jitter, merge

mix = {"chat": 0.5, "code": 0.3, "batch": 0.2}
base = poisson(5.0, 60.0, LognormalLengths(1000, 4000, 100, 600), seed=11)
phases = [
    Phase(7.0, 4.0, TraceLengths(base), mix, {"batch": FixedLengths(9000, 9)}),
    Phase(5.0, 9.0, FixedLengths(10, 10)),
]
parts = [
    assign_classes(base, mix, seed=11),
    gamma(5.0, 60.0, TraceLengths(base), seed=11, burstiness=4.0),
    square_wave(phases, 60.0, seed=11),
    assign_classes_by_length(base, mix, seed=11, correlation=0.5),
    jitter(base, 3.0, seed=11),
]
path = Path(sys.argv[1])
write_trace(merge(*parts), path)
assert read_trace(path) == merge(*parts, name=path.stem)
print(hashlib.sha256(path.read_bytes()).hexdigest())
"""


def digest(path: Path, hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_two_processes_make_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    first, second = tmp_path / f"w{suffix}", tmp_path / "again" / f"w{suffix}"
    second.parent.mkdir()
    assert digest(first, "0") == digest(second, "4242")
    assert hashlib.sha256(second.read_bytes()).hexdigest() == digest(first, "1")
    assert first.read_bytes().count(b"\n") > 1000


def test_the_workload_floor_needs_no_heavy_library() -> None:
    code = (
        "import sys, controller.workload.generators, controller.workload.traces\n"
        "heavy = {'torch', 'transformers', 'sklearn', 'sqlalchemy', 'fastapi', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
