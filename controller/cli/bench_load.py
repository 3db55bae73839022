"""`paceline bench load`: the SLO planner and static budgets under a mixed open-loop load.

Owns options and output of this command. Must not measure, and must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from controller.bench.load_classes import parse_classes
from controller.bench.load_contestants import (
    DEFAULT_POLICIES,
    PROBE_POLICY,
    StartedServers,
    policy_config,
)
from controller.bench.load_replay import Replayed, replay
from controller.bench.load_report import (
    render_agreement,
    render_attainment,
    render_deciles,
    render_latencies,
    render_notes,
    render_replay_notes,
    to_json,
)
from controller.bench.load_rounds import (
    Calibration,
    LoadSession,
    LoadTerms,
    TurnListener,
    calibrate_load,
    measure_loads,
)
from controller.bench.load_rows import rows_of
from controller.bench.load_run import LoadError
from controller.bench.load_traffic import LoadTraffic, parse_arrivals
from controller.bench.load_validity import MAX_STEP_RATIO
from controller.bench.scenario import DEFAULT_VOCAB_SIZE
from controller.bench.servers import ServerError
from controller.bench.spike import SpikeError
from controller.cli.output import out_folder_exists, progress_bar, wide_console
from controller.policy.policies import POLICY_NAMES
from engine.clock import Clock, MonotonicClock

DEFAULT_LOADS = "0.6,1,1.4"


def load(
    serve: Annotated[str, typer.Option(help="Model to serve, one policy after another.")] = "demo",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"static-N, or one of {', '.join(POLICY_NAMES)} (N tokens per step). Repeatable."
            f" Default: {', '.join(DEFAULT_POLICIES)}."
        ),
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="Offered requests per second, such as 0.5,1,1.5.")
    ] = None,
    load_factors: Annotated[
        str | None,
        typer.Option(
            "--load",
            help=f"Multiples of the knee, which is measured first. Default: {DEFAULT_LOADS}.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all policies, in turn.")] = 2,
    duration: Annotated[
        float, typer.Option(min=1, help="Seconds of arrivals at each rate.")
    ] = 60.0,
    drain: Annotated[
        float,
        typer.Option(min=0, help="Seconds after the last arrival until streams are cut off."),
    ] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals, lengths, prompts.")] = 0,
    arrivals: Annotated[
        str, typer.Option(help="poisson, gamma:CV² or square:SECONDS.")
    ] = "poisson",
    load_class: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            help="NAME:share=…,prompt=P50/P99,output=P50/P99,ttft=…,tpot=…,weight=…,"
            "on_infeasible=…, targets as multiples of the normal step. Repeatable."
            " Default: chat, batch and long.",
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Trace file whose arrivals and lengths are replayed.")
    ] = None,
    length_scale: Annotated[
        float, typer.Option(min=1e-4, help="Multiply every length by this.")
    ] = 1.0,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Cut requests down to this context, in tokens.")
    ] = None,
    max_step_ratio: Annotated[
        float,
        typer.Option(
            min=1, help="Factor by which a server's normal step may differ from the calibrated one."
        ),
    ] = MAX_STEP_RATIO,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Then simulate the same arrivals and compare.")
    ] = False,
    serve_option: Annotated[
        list[str] | None,
        typer.Option(help="One more word of the serve command line. Repeatable."),
    ] = None,
    ready_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds a server may take to load.")
    ] = 900.0,
    vocab_size: Annotated[
        int, typer.Option(min=256, help="Prompt ids stay below this.")
    ] = DEFAULT_VOCAB_SIZE,
    keep: Annotated[
        Path | None, typer.Option(help="Keep each server's database in this new folder.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write everything measured as JSON.")] = None,
) -> None:
    """Mixed classes arrive whatever becomes of the answers: who keeps more promises?"""
    if rates is not None and load_factors is not None:
        raise typer.BadParameter("give --rates or --load, not both", param_hint="--rates")
    given = (
        _numbers(load_factors or DEFAULT_LOADS, "--load")
        if rates is None
        else _numbers(rates, "--rates")
    )
    out_folder_exists(out)
    words = tuple(serve_option or ())
    if simulate and any(word.split("=")[0] == "--db" for word in words):
        raise typer.BadParameter(
            "--simulate reads the database that each server has of its own: leave --db out, and"
            " keep them with --keep FOLDER",
            param_hint="--serve-option",
        )
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise typer.BadParameter(
            f"{keep} is there already: name a folder that is new or empty", param_hint="--keep"
        )
    keys = list(dict.fromkeys(policy or DEFAULT_POLICIES))
    try:
        for key in keys:
            policy_config(key)
        kind, shape = parse_arrivals(arrivals)
        traffic = LoadTraffic(
            parse_classes(load_class or ()), kind, shape, trace, length_scale, max_model_len
        )
        # A trace that cannot be read should not cost the start of a server.
        traffic.workload(1.0 if rates is None else given[0], duration, seed)
    except (ValueError, OSError) as exc:
        raise typer.BadParameter(str(exc)) from exc
    plan = _Plan(
        keys,
        traffic,
        given,
        rates is not None,
        rounds,
        duration,
        drain,
        seed,
        vocab_size,
        max_step_ratio,
    )
    about: dict[str, Any] = {
        "model": serve,
        "policies": keys,
        "load": list(given) if rates is None else None,
        "num_cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }

    def write(session: LoadSession, replayed: Replayed | None = None) -> None:
        """Keep what has been measured so far: it took long."""
        if out is not None:
            payload = to_json(session, replayed, about)
            out.write_text(json.dumps(payload, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    clock = MonotonicClock()
    with _folder(keep) as folder:
        servers = StartedServers(serve, traffic.classes, folder, clock, words, ready_timeout)
        try:
            session = asyncio.run(_measure(servers, plan, clock, write))
        except (ServerError, SpikeError, LoadError) as exc:
            typer.echo(f"INVALID: nothing could be measured: {exc}", err=True)
            raise typer.Exit(1) from exc
        replayed = _replay(session, servers) if simulate else None
    _print(session, replayed, serve)
    if keep is not None:
        typer.echo(f"{len(list(keep.glob('*.db')))} databases are kept in {keep}", err=True)
    write(session, replayed)
    if any(result.violations for result in session.results):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The options of one invocation; `given` are rates, or multiples of the knee."""

    keys: list[str]
    traffic: LoadTraffic
    given: tuple[float, ...]
    is_rates: bool
    num_rounds: int
    duration_s: float
    drain_s: float
    seed: int
    vocab_size: int
    max_step_ratio: float

    def terms(self, calibration: Calibration) -> LoadTerms:
        """Return what is asked of every contestant on the machine that was calibrated."""
        knee = 1.0 if calibration.knee_rate is None else calibration.knee_rate
        return LoadTerms(
            traffic=self.traffic,
            rates=tuple(knee * each for each in self.given),
            num_rounds=self.num_rounds,
            duration_s=self.duration_s,
            drain_s=self.drain_s,
            seed=self.seed,
            vocab_size=self.vocab_size,
            max_step_ratio=self.max_step_ratio,
        )


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Make the folder for the servers' databases: `keep`, or one that goes when all is done."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="paceline-load-") as folder:
            yield Path(folder)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise typer.BadParameter(f"{keep}: {exc.strerror}", param_hint="--keep") from exc
    yield keep


def _numbers(text: str, hint: str) -> tuple[float, ...]:
    """Read positive numbers with commas between, each once, in order."""
    try:
        values = tuple(dict.fromkeys(float(word) for word in text.split(",")))
    except ValueError:
        values = ()
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise typer.BadParameter(f"must be positive numbers, got {text!r}", param_hint=hint)
    return values


async def _measure(
    servers: StartedServers, plan: _Plan, clock: Clock, on_turn: TurnListener
) -> LoadSession:
    """Calibrate on one server, then measure all of them."""
    contestants = servers.contestants(plan.keys)
    with progress_bar("load") as on_stage:
        on_stage("calibrating", 0, 1)
        async with servers.open(PROBE_POLICY, servers.folder / "calibration.db") as client:
            calibration = await calibrate_load(
                client, plan.traffic, plan.seed, plan.vocab_size, has_knee=not plan.is_rates
            )
        return await measure_loads(
            contestants,
            plan.terms(calibration),
            calibration,
            clock,
            on_stage=on_stage,
            on_turn=on_turn,
        )


def _replay(session: LoadSession, servers: StartedServers) -> Replayed:
    """Simulate what was measured, with a progress bar."""
    with progress_bar("simulation") as on_stage:
        return replay(session, servers.history_of, on_stage)


def _print(session: LoadSession, replayed: Replayed | None, model: str) -> None:
    """Print tables and notes."""
    rows = rows_of(session)
    calibration = session.calibration
    knee = "" if calibration.knee_rate is None else f", knee {calibration.knee_rate:.2f}/s"
    title = (
        f"Mixed load on {model}: normal step {calibration.normal_s * 1000:.0f} ms{knee};"
        " * is the best static budget at that rate"
    )
    console = wide_console()
    console.print(render_attainment(session, rows, title))
    console.print(render_latencies(rows))
    console.print(render_deciles(rows))
    for note in render_notes(session, rows):
        console.print(note, markup=False, soft_wrap=True)
    if replayed is not None:
        console.print(render_agreement(replayed))
        for note in render_replay_notes(replayed):
            console.print(note, markup=False, soft_wrap=True)
