"""What is said about timed steps, and what planner and loop cost on a clock that ticks."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from controller.bench.overhead import NUM_RUNNING, PLANNERS, measure_overhead
from controller.bench.peers_child import RunningChild
from controller.bench.peers_contestants import Equipment
from controller.bench.roofline_report import (
    TimedStep,
    bound_by,
    growth_per_unit,
    render_growth,
    render_limits,
    render_overheads,
    render_steps,
    render_steps_markdown,
)
from controller.cli import bench_roofline
from controller.cli.bench import app
from engine.clock import VirtualClock

TICK_S = 2.0**-20
LIMITS = {"bytes_per_s": 10e9, "multiply_adds_per_s": 50e9}


class TickingClock(VirtualClock):
    """Moves on by one tick at every reading."""

    def now(self) -> float:
        self.advance(TICK_S)
        return super().now()


def fields(**changes: Any) -> dict[str, Any]:
    shape = {"num_decodes": 0, "num_context": 0, "num_chunk": 0}
    shape |= {key: changes.pop(key) for key in list(changes) if key in shape}
    numbers = {
        "num_steps": 5, "step_s": 0.1, "forward_s": 0.09, "overhead_s": 0.002,
        "num_bytes": 500_000_000, "num_multiply_adds": 1_000_000_000, "limit_s": 0.05, "share": 0.5,
    }  # fmt: skip
    return {"event": "timing", "name": "steps", "shape": shape, **numbers, **changes}


def decode(batch: int, context: int, **changes: Any) -> TimedStep:
    return TimedStep.of(fields(num_decodes=batch, num_context=context, **changes))


def printed(renderable: Any) -> str:
    stream = io.StringIO()
    Console(width=160, file=stream).print(renderable)
    return stream.getvalue()


def test_steps_in_words() -> None:
    assert decode(1, 16).label == "1 decode, context 16"
    assert decode(8, 256).label == "8 decodes, context 256"
    assert TimedStep.of(fields(num_chunk=512)).label == "prompt of 512"
    with pytest.raises(KeyError):
        TimedStep.of({"shape": {}})


def test_what_the_machine_is_busy_with() -> None:
    assert bound_by(decode(1, 16), LIMITS) == "reading"
    assert bound_by(decode(1, 16, num_multiply_adds=10**11), LIMITS) == "multiplying"


def test_growth_is_the_slope_per_request_and_per_token() -> None:
    batches = [decode(n, 16, step_s=0.05 + 0.01 * n) for n in (1, 2, 4)]
    assert growth_per_unit(batches, "request", "step_s") == pytest.approx(0.01)
    contexts = [decode(4, c, step_s=0.05 + 4 * c * 1e-5) for c in (16, 256, 1024)]
    assert growth_per_unit(contexts, "token", "step_s") == pytest.approx(1e-5)
    assert growth_per_unit(batches[:1], "request", "step_s") is None
    unseen = [decode(n, 16, overhead_s=None) for n in (1, 2)]
    assert growth_per_unit(unseen, "request", "overhead_s") is None


def test_growth_compares_what_can_be_compared() -> None:
    steps = [
        decode(n, c, step_s=0.05 + 0.01 * n + n * c * 1e-5, overhead_s=0.001 * n)
        for c in (16, 256)
        for n in (1, 8)
    ]
    steps.append(TimedStep.of(fields(num_chunk=128, step_s=9.0)))
    per_decode, per_context = render_growth(steps)
    assert per_decode.startswith("one more decode at context 16: 10.16 ms (limit 0.00 ms")
    assert "engine's own 1.000 ms" in per_decode
    assert per_context.startswith("1000 more context tokens at 8 decodes: 10.00 ms")
    assert render_growth(steps[-1:]) == []


def test_the_tables() -> None:
    steps = [decode(8, 256), decode(8, 1024, forward_s=None, overhead_s=None)]
    text = printed(render_steps(steps, LIMITS, "Steps of demo"))
    assert "8 decodes, context 256" in text
    assert "50%" in text
    assert "2.0%" in text
    markdown = render_steps_markdown(steps).splitlines()
    assert markdown[2:] == [
        "| 8 decodes, context 256 | 50% | 2.0% |",
        "| 8 decodes, context 1024 | 50% | – |",
    ]
    assert "10.0 GB/s" in render_limits(LIMITS)


@pytest.mark.parametrize("planner", sorted(PLANNERS))
@pytest.mark.parametrize("has_targets", [True, False])
@pytest.mark.parametrize("num_waiting", [0, 25])
def test_planner_and_loop_while_a_crowd_waits(
    planner: str, has_targets: bool, num_waiting: int
) -> None:
    row = measure_overhead(planner, num_waiting, TickingClock(), has_targets=has_targets)
    assert (row.num_running, row.num_waiting) == (NUM_RUNNING, num_waiting)
    assert row.num_steps == 60
    # The plan lies between two readings that follow each other: nothing else is counted as its own.
    assert row.planner_s == TICK_S
    assert row.loop_s > 0
    assert planner in printed(render_overheads([row]))


class ScriptedChild:
    """Answers one command with the given events."""

    def __init__(self, events: list[dict[str, Any] | None], last_error: str | None = None) -> None:
        self.last_error = last_error
        self._events = events

    def subscribe(self, name: str) -> Any:
        assert name == "steps"
        return self

    async def send(self, **command: Any) -> None:
        assert command == {"name": "steps"}

    async def get(self) -> Any:
        class Event:
            fields = self._events.pop(0)

        return Event


def play(monkeypatch: pytest.MonkeyPatch, child: ScriptedChild) -> list[list[str]]:
    commands: list[list[str]] = []

    @contextlib.asynccontextmanager
    async def running(
        command: list[str], timeout_s: float, clock: Any, env: dict[str, str], *, noun: str
    ) -> AsyncIterator[RunningChild]:
        commands.append(command)
        facts = {"limits": LIMITS, "num_shapes": 2, "dtype": "float32"}
        yield RunningChild(child, facts)  # type: ignore[arg-type]

    monkeypatch.setattr(bench_roofline, "running_child", running)
    return commands


def test_the_whole_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    events: list[dict[str, Any] | None] = [
        fields(num_decodes=1, num_context=16),
        fields(num_chunk=128),
        {"event": "finished"},
    ]
    commands = play(monkeypatch, ScriptedChild(events))
    out = tmp_path / "roofline.json"
    words = ["roofline", "--no-overhead", "--attention-backend", "reference", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert commands[0][1:4] == ["-m", bench_roofline.STEP_TIMING_MODULE, "demo"]
    assert commands[0][-2:] == ["--attention-backend", "reference"]
    payload = json.loads(out.read_text())
    assert [step["num_chunk"] for step in payload["steps"]] == [0, 128]
    assert payload["machine"]["limits"] == LIMITS
    assert "overhead" not in payload
    assert "prompt of 128" in done.output


@pytest.mark.parametrize("last_error", [None, "out of memory"])
def test_a_child_that_breaks_off_is_an_error(
    monkeypatch: pytest.MonkeyPatch, last_error: str | None
) -> None:
    play(monkeypatch, ScriptedChild([fields(num_chunk=128), None], last_error))
    done = CliRunner().invoke(app, ["roofline", "--no-overhead"])
    assert done.exit_code == 1
    assert (last_error or "it ended before it was done") in done.output


def test_a_child_that_cannot_load_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def environment(self: Any) -> dict[str, str]:
        return {"PYTHONPATH": str(tmp_path)}

    # The real child, but of a module that says what a model that cannot be loaded says.
    (tmp_path / "broken.py").write_text(
        'print(\'{"event": "fatal", "error": "ModelLoadError: no such directory"}\')\n'
    )
    monkeypatch.setattr(bench_roofline, "STEP_TIMING_MODULE", "broken")
    monkeypatch.setattr(Equipment, "environment", environment)
    done = CliRunner().invoke(app, ["roofline", "--no-overhead"])
    assert done.exit_code == 1
    # There is no peer here, and nobody should look for one.
    assert "the step timing cannot run: ModelLoadError: no such directory" in done.output
    assert "peer" not in done.output
