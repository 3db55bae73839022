"""`paceline bench roofline`: real steps against the machine's limit, and the engine's own cost.

Owns options and output of the command. Must not measure, and must not import torch: the steps are
timed in a process of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from controller.bench.overhead import PLANNERS, WAITING_COUNTS, Overhead, measure_overhead
from controller.bench.peers_child import running_child
from controller.bench.peers_contestants import Equipment
from controller.bench.roofline_report import (
    TimedStep,
    render_growth,
    render_limits,
    render_overheads,
    render_steps,
    render_steps_markdown,
)
from controller.bench.rounds import StageListener
from controller.bench.servers import ServerError
from controller.cli.output import out_folder_exists, progress_bar, wide_console
from engine.clock import MonotonicClock

STEP_TIMING_MODULE = "engine.device.step_timing"
_NAME = "steps"


def roofline(
    serve: Annotated[str, typer.Option(help="Model whose steps are timed.")] = "demo",
    dtype: Annotated[str, typer.Option(help="Number type of the weights.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    attention_backend: Annotated[str, typer.Option(help="As of paceline serve.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads. Default: torch's own choice.")
    ] = None,
    steps: Annotated[bool, typer.Option(help="Time steps of the model.")] = True,
    overhead: Annotated[bool, typer.Option(help="Time planner and loop against the queue.")] = True,
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds to load.")] = 900.0,
    out: Annotated[Path | None, typer.Option(help="Write everything measured as JSON.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the shares as a Markdown table.")
    ] = False,
) -> None:
    """How close does a step come to what this machine can do, and what is the engine's own part?"""
    out_folder_exists(out)
    equipment = Equipment(serve, dtype, device, threads, ready_timeout)
    console = wide_console()
    payload: dict[str, Any] = {
        "benchmark": "roofline",
        "model": serve,
        "num_cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    if steps:
        try:
            with progress_bar("steps") as on_stage:
                facts, timed = asyncio.run(_time_steps(equipment, attention_backend, on_stage))
        except ServerError as exc:
            typer.echo(f"paceline: {exc}", err=True)
            raise typer.Exit(1) from exc
        payload |= {"machine": facts, "steps": [asdict(step) for step in timed]}
        if markdown:
            console.print(render_steps_markdown(timed), markup=False, soft_wrap=True)
        else:
            title = f"Steps of {serve} in {facts['dtype']}"
            console.print(render_steps(timed, facts["limits"], title))
        console.print(render_limits(facts["limits"]), markup=False, soft_wrap=True)
        for note in render_growth(timed):
            console.print(note, markup=False, soft_wrap=True)
    if overhead:
        with progress_bar("planner and loop") as on_stage:
            rows = _overheads(on_stage)
        payload["overhead"] = [asdict(row) for row in rows]
        console.print(render_overheads(rows))
    if out is not None:
        out.write_text(json.dumps(payload, indent=1, allow_nan=False) + "\n", encoding="utf-8")


async def _time_steps(
    equipment: Equipment, attention_backend: str, on_stage: StageListener
) -> tuple[dict[str, Any], list[TimedStep]]:
    """Return what the child says of the machine, and every timed step."""
    command = [
        sys.executable, "-m", STEP_TIMING_MODULE, equipment.model, "--dtype", equipment.dtype,
        "--device", equipment.device, "--attention-backend", attention_backend,
    ]  # fmt: skip
    timed: list[TimedStep] = []
    async with running_child(
        command,
        equipment.ready_timeout_s,
        MonotonicClock(),
        equipment.environment(),
        noun="the step timing",
    ) as running:
        total = int(running.facts["num_shapes"])
        events = running.child.subscribe(_NAME)
        await running.child.send(name=_NAME)
        while True:
            fields = (await events.get()).fields
            if fields is None:
                reason = running.child.last_error or "it ended before it was done"
                raise ServerError(f"the steps were not timed: {reason}")
            if fields["event"] == "finished":
                return running.facts, timed
            timed.append(TimedStep.of(fields))
            on_stage(timed[-1].label, len(timed), total)


def _overheads(on_stage: StageListener) -> list[Overhead]:
    clock = MonotonicClock()
    crowds = [(p, t, n) for p in PLANNERS for t in (True, False) for n in WAITING_COUNTS]
    rows: list[Overhead] = []
    for planner, has_targets, num_waiting in crowds:
        on_stage(f"{planner}, {num_waiting} waiting", len(rows), len(crowds))
        rows.append(measure_overhead(planner, num_waiting, clock, has_targets=has_targets))
    return rows
