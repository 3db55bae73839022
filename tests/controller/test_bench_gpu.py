"""The trial of a device: the whole command on a CPU with toy sizes, and its parts by themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.bench.gpu.__main__ import PARTS, Trial, main
from controller.bench.gpu.exactness import same_prefix
from controller.bench.gpu.rows import Row, TimeBox, Verdict, line_of, table
from engine.clock import VirtualClock

ROOT = Path(__file__).resolve().parents[2]
# Everything that the project needs elsewhere, and what a bare machine with torch lacks.
BLOCKED = [
    "alembic",
    "accelerate",
    "fastapi",
    "gguf",
    "hypothesis",
    "openai",
    "optuna",
    "pandas",
    "prometheus_client",
    "psycopg",
    "pydantic",
    "pydantic_settings",
    "pytest",
    "sqlalchemy",
    "starlette",
    "uvicorn",
]
CODE = f"""
import socket, sys
for name in {BLOCKED!r}:
    sys.modules[name] = None
def refuse(*arguments):
    raise OSError("the trial must download nothing")
socket.socket.connect = refuse
from controller.bench.gpu.__main__ import main
code = main(["--device", "cpu", "--tiny"])
sys.exit(code)
"""


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The command's output and its JSON file, from a machine with nothing else installed."""
    folder = tmp_path_factory.mktemp("gpu")
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        env={**os.environ, "OUT": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "gpu.json").read_text(encoding="utf-8"))


@pytest.mark.device
def test_the_whole_command_runs_on_a_bare_machine(dry_run: Any) -> None:
    output, result = dry_run
    assert result["passed"] is True
    assert result["facts"]["tiny"] is True
    assert set(result["parts"]) == set(PARTS)
    assert "verdict" in output
    assert "Traceback" not in output


@pytest.mark.device
def test_every_comparison_is_made(dry_run: Any) -> None:
    _, result = dry_run
    rows = result["parts"]["exactness"]["rows"]
    passed = {row["what"] for row in rows if row["verdict"] == "ok"}
    for family in ("llama", "qwen2", "mistral", "gemma3_text", "gemma2"):
        assert f"{family}, float32: greedy tokens" in passed
        assert f"{family}, reference, bfloat16: logits" in passed
    assert {"reference, bfloat16: conformance", "reference, float32: conformance"} <= passed
    refused = {row["what"] for row in rows if row["verdict"] == "refused"}
    assert "torch_varlen, bfloat16: conformance" in refused
    tokens = next(r for r in rows if r["what"] == "llama, float32: greedy tokens")["numbers"]
    assert tokens["equal"] == tokens["compared"] == 6


@pytest.mark.device
def test_steps_the_spike_and_predictions_are_measured(dry_run: Any) -> None:
    _, result = dry_run
    parts = {
        name: {row["what"]: row["numbers"] for row in part["rows"]}
        for name, part in result["parts"].items()
    }
    speed = parts["speed"]
    assert speed["float32: the device"]["bytes_per_s"] > 0
    for what in ("prefill of 64", "4 decodes at 64"):
        step = speed[f"reference: {what}"]
        assert step["tokens_per_s"] > 0
        assert step["share_of_limit"] == pytest.approx(step["limit_s"] / step["step_s"])
    for name in ("whole prompts", "static 32", "slo, TPOT 3x normal"):
        spike = parts["spike"][name]
        assert 0 < spike["normal_gap_s"] <= spike["largest_gap_s"]
    # Chunks take several steps, and every one of them a first token's time.
    assert (
        parts["spike"]["static 32"]["long_ttft_s"] > parts["spike"]["whole prompts"]["long_ttft_s"]
    )
    assert parts["learning"]["prior from the sweep"]["shapes"] >= 8
    assert parts["learning"]["online"]["steps"] == 60
    assert parts["learning"]["online"]["mape"] > 0.0
    assert parts["learning"]["planner"]["median_s"] > 0


@pytest.mark.parametrize("has_torch", [True, False])
def test_make_gpu_installs_nothing_where_torch_is(tmp_path: Path, has_torch: bool) -> None:
    # A stand-in for python3: it notes what it is asked, and fails the look at its packages or not.
    python, log = tmp_path / "python", tmp_path / "log"
    status = 0 if has_torch else 1
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\ncase "$1" in -c) exit {status};; esac\n', encoding="utf-8"
    )
    python.chmod(0o755)
    stamp = tmp_path / "venv" / ".serve"
    (stamp.parent / "bin").mkdir(parents=True)
    (stamp.parent / "bin" / "python").symlink_to(python)
    stamp.touch()
    done = subprocess.run(
        ["make", "gpu", f"PYTHON={python}", f"VENV={stamp.parent}", "ARGS=--tiny"],
        cwd=ROOT,
        env={**os.environ, "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    asked = log.read_text(encoding="utf-8").splitlines()
    assert asked[0].startswith("-c import sys, numpy, torch, transformers")
    assert asked[1:] == ["-m controller.bench.gpu --tiny"]
    assert ("installing" in done.stdout) is False


def test_a_device_that_is_not_here_is_said_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--device", "cuda:99", "--out", str(tmp_path / "gpu.json")]) == 2
    assert "--device cuda:99: not here" in capsys.readouterr().out
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.parametrize("arguments", [["--parts", "dancing"], ["--nonsense"]])
def test_a_wrong_flag_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def rows_then_crash() -> Iterator[Row]:
    yield Row("one", "fine", Verdict.OK)
    raise RuntimeError("CUDA error:\n an illegal memory access")


def test_a_part_that_crashes_keeps_its_rows_and_stops_nobody(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "gpu.json"
    trial = Trial(out, {"device": "toy"}, VirtualClock())
    trial.run("speed", rows_then_crash)
    trial.run("spike", lambda: iter([Row("two", "measured", numbers={"x": 1.5})]))
    assert not trial.is_passed
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [row["verdict"] for row in result["parts"]["speed"]["rows"]] == ["ok", "FAILED"]
    assert "illegal memory access" in result["parts"]["speed"]["rows"][1]["text"]
    assert result["parts"]["spike"]["rows"][0]["numbers"] == {"x": 1.5}
    assert result["passed"] is False


def test_the_file_is_written_after_every_part(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    trial = Trial(out, {}, VirtualClock())
    trial.run("exactness", lambda: iter([Row("a", "b", Verdict.OK)]))
    assert json.loads(out.read_text(encoding="utf-8"))["passed"] is True
    trial.run("speed", lambda: iter([Row("a", "b", Verdict.OFF)]))
    assert json.loads(out.read_text(encoding="utf-8"))["passed"] is False


@pytest.mark.parametrize("verdict", Verdict)
def test_only_wrong_and_failed_rows_fail_the_trial(verdict: Verdict) -> None:
    assert verdict.is_bad == (verdict in (Verdict.OFF, Verdict.FAILED))


def test_a_time_box_is_shared_by_what_is_left() -> None:
    clock = VirtualClock()
    box = TimeBox(clock, 10.0)
    clock.advance(4.0)
    assert (box.spent_s, box.left_s, box.is_over) == (4.0, 6.0, False)
    assert box.part(0.5).left_s == 3.0
    clock.advance(7.0)
    assert (box.left_s, box.is_over) == (0.0, True)


def test_the_table_is_aligned() -> None:
    text = table({"a": [Row("short", "1", Verdict.OK)], "longer": [Row("x", "22", Verdict.OFF)]})
    lines = text.splitlines()
    assert lines[0].split() == ["part", "what", "result", "verdict"]
    column = lines[0].index("verdict")
    assert [line[column:] for line in lines[2:]] == ["ok", "OFF"]


@pytest.mark.parametrize(
    ("a", "b", "share"),
    [((), (), 1.0), ((1, 2), (1, 2), 1.0), ((1, 2, 3, 4), (1, 2, 9, 4), 0.5), ((1,), (), 0.0)],
)
def test_same_prefix(a: tuple[int, ...], b: tuple[int, ...], share: float) -> None:
    assert same_prefix(a, b) == share


def test_an_error_is_one_short_line() -> None:
    assert line_of(ValueError("a\n  b")) == "ValueError: a b"
    assert len(line_of(ValueError("x" * 999))) == 300
