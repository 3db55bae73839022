"""`paceline bench costmodel`: how well the learners predict steps, and what that costs.

Owns options and output of the command. Must not measure, and must not import torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.cli.output import out_folder_exists, progress_bar, wide_console
from engine.clock import MonotonicClock

if TYPE_CHECKING:
    from controller.bench.costmodel_steps import StepSeries
    from store.queries import TelemetryReader


def costmodel(
    db: Annotated[
        str | None, typer.Option("--db", help="Database with stored steps, for --run.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            help="Replay the steps of this server run. 'last' = the newest that has some."
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Record steps of a server under a mixed load into this new database."),
    ] = None,
    record_seconds: Annotated[
        float, typer.Option(min=5, help="With --record: how long the load lasts.")
    ] = 90.0,
    serve: Annotated[str, typer.Option(help="With --record: the model.")] = "demo",
    measured: Annotated[
        Path | None, typer.Option(help="Table of measured times (splitwise-sim's perf_model.csv).")
    ] = None,
    measured_model: Annotated[str, typer.Option(help="Model in that table.")] = "llama2-70b",
    synthetic: Annotated[bool, typer.Option(help="Replay synthetic devices.")] = True,
    steps: Annotated[
        int, typer.Option(min=100, help="Steps of a synthetic or measured series.")
    ] = 2000,
    noise: Annotated[float, typer.Option(min=0, max=1, help="Noise of synthetic steps.")] = 0.03,
    outliers: Annotated[
        float, typer.Option(min=0, max=0.2, help="Share of synthetic outliers, ×1000.")
    ] = 0.005,
    blind: Annotated[
        bool,
        typer.Option("--blind", help="Also replay each series without chunk and logit counts."),
    ] = False,
    learner: Annotated[
        list[str] | None,
        typer.Option(help="recursive, refitted or windowed. Repeatable. Default: all."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of series and load.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write everything measured as JSON.")] = None,
) -> None:
    """Which learner predicts steps best, how soon, and how soon again after a change of speed?

    A goal that was missed is named below the tables; the exit code is 0 all the same.
    """
    from controller.bench.costmodel import LEARNERS, measure
    from controller.bench.costmodel_report import render_notes, render_tables, to_json
    from controller.bench.costmodel_steps import (
        DEVICES,
        SourceError,
        measured_series,
        synthetic_series,
    )

    chosen = list(dict.fromkeys(learner or LEARNERS))
    for name in chosen:
        if name not in LEARNERS:
            raise typer.BadParameter(
                f"unknown learner {name!r}: choose from {', '.join(LEARNERS)}",
                param_hint="--learner",
            )
    out_folder_exists(out)
    series: list[StepSeries] = []
    try:
        if record is not None:
            series.append(_recorded(record, serve, record_seconds, seed))
        if run is not None:
            series.append(_stored(db, run))
        if measured is not None:
            series += measured_series(measured, measured_model, steps, seed)
    except (SourceError, OSError) as exc:
        typer.echo(f"paceline: {exc}", err=True)
        raise typer.Exit(2) from exc
    if synthetic:
        series += [
            synthetic_series(name, steps, noise=noise, outlier_share=outliers, seed=seed)
            for name in DEVICES
        ]
    if blind:
        series = [each for one in series for each in (one, one.blinded())]
    if not series:
        raise typer.BadParameter("nothing to replay: give --run, --record or --measured")
    clock = MonotonicClock()
    rows = []
    with progress_bar("replay") as on_stage:
        for index, (one, name) in enumerate((one, name) for one in series for name in chosen):
            on_stage(f"{one.name}, {name}", index, len(series) * len(chosen))
            rows.append(measure(one, name, clock))
    console = wide_console()
    for table in render_tables(rows):
        console.print(table)
    for note in render_notes(rows):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        about: dict[str, Any] = {
            "num_cpus": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "seed": seed,
            "noise": noise,
            "outlier_share": outliers,
        }
        payload = to_json(rows, about)
        out.write_text(json.dumps(payload, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _stored(db: str | None, run: str) -> StepSeries:
    """Return the series of a stored run; SourceError if there is none."""
    from controller.bench.costmodel_steps import SourceError, stored_series
    from controller.simulation.stored import NEWEST
    from store.errors import StoreError
    from store.queries import TelemetryReader

    url = db or os.environ.get("PACELINE_DB") or "sqlite:///paceline.db"
    try:
        reader = TelemetryReader.open(url)
        try:
            if run in NEWEST:
                run = _newest(reader)
            return stored_series(reader, run)
        finally:
            reader.close()
    except StoreError as exc:
        raise SourceError(f"--db: {exc}") from exc


def _newest(reader: TelemetryReader) -> str:
    """Return the newest run with steps (one that has only just begun has nothing to replay);
    SourceError if there is none.
    """
    from controller.bench.costmodel_steps import SourceError
    from controller.simulation.stored import MAX_RUNS

    for run in reader.runs(limit=MAX_RUNS):
        run_id: str = run["run_id"]
        if reader.steps(run_id=run_id, limit=1).rows:
            return run_id
    raise SourceError("the database holds no run with steps")


def _recorded(path: Path, model: str, duration_s: float, seed: int) -> StepSeries:
    """Serve `model` under a mixed load, with `path` as its database, and return its steps."""
    from controller.bench.client import LoadClient, open_http
    from controller.bench.costmodel_load import send_mixed
    from controller.bench.costmodel_steps import SourceError
    from controller.bench.servers import SERVER_CONFIGS, ServerError, running_server, serve_command

    if path.exists():
        raise SourceError(f"{path} exists already: replay it with --db and --run last")
    if not path.parent.is_dir():
        raise SourceError(f"{path.parent} is not a directory")

    def command(port: int, _database: Path) -> list[str]:
        # Its database outlives the server: it is what is wanted.
        return serve_command(model, SERVER_CONFIGS["slo"], port, path.resolve())

    async def record() -> tuple[int, int]:
        clock = MonotonicClock()
        with progress_bar("record") as on_stage:
            async with running_server(command, 900.0) as base_url, open_http(base_url) as http:
                client = LoadClient(http, clock, model)
                return await send_mixed(client, clock, duration_s, seed, on_stage)

    try:
        num_sent, num_failed = asyncio.run(record())
    except ServerError as exc:
        raise SourceError(str(exc)) from exc
    typer.echo(f"recorded {num_sent} requests ({num_failed} failed or refused) in {path}", err=True)
    return _stored(f"sqlite:///{path.resolve()}", "last")
