"""`paceline bench …`: benchmarks over HTTP.

Owns options and output of the benchmark commands. Must not measure, and must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import secrets
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import typer

from controller.bench.client import LoadClient, StreamClient, open_http
from controller.bench.report import render_markdown, render_notes, render_table, rows_of, to_json
from controller.bench.rounds import Contestant, SpikeSession, measure_rounds
from controller.bench.scenario import DEFAULT_VOCAB_SIZE, PromptSource, SpikeScenario
from controller.bench.servers import (
    SERVER_CONFIGS,
    ServerConfig,
    running_server,
    serve_command,
    wait_until_ready,
)
from controller.bench.spike import PromiseRule
from controller.cli.bench_costmodel import costmodel
from controller.cli.bench_goals import goals
from controller.cli.bench_load import load
from controller.cli.bench_peers import peers
from controller.cli.bench_roofline import roofline
from controller.cli.output import out_folder_exists, progress_bar, wide_console
from engine.clock import MonotonicClock

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_MODEL = "demo"
app = typer.Typer(help="Measure servers, peers and this machine.", no_args_is_help=True)
app.command("costmodel")(costmodel)
app.command("goals")(goals)
app.command("load")(load)
app.command("peers")(peers)
app.command("roofline")(roofline)


@app.callback()
def bench() -> None:
    """Measure servers, peers and this machine."""
    if threading.current_thread() is threading.main_thread():
        # Who asks a measurement to end means its servers, too; they run in sessions of their own.
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


@app.command()
def spike(
    url: Annotated[
        str | None, typer.Option(help=f"Server to measure. Default: {DEFAULT_URL}.")
    ] = None,
    model: Annotated[str, typer.Option(help="Name of the model on that server.")] = DEFAULT_MODEL,
    api_key: Annotated[
        str | None, typer.Option(envvar="PACELINE_API_KEY", help="Key of that server.")
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(help="Start servers for this model instead, one policy after another."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(help=f"With --serve: {', '.join(SERVER_CONFIGS)}. Repeatable. Default: all."),
    ] = None,
    serve_option: Annotated[
        list[str] | None,
        typer.Option(help="With --serve: one more word of the serve command line. Repeatable."),
    ] = None,
    ready_timeout: Annotated[
        float, typer.Option(min=1, help="With --serve: seconds a server may take to load.")
    ] = 900.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all policies, in turn.")] = 1,
    slo: Annotated[
        bool, typer.Option(help="Send x-slo-tpot-ms (only to the SLO planner with --serve).")
    ] = True,
    tpot_factor: Annotated[
        float, typer.Option(min=0.1, help="x-slo-tpot-ms as a multiple of the normal gap.")
    ] = 3.0,
    long_ttft_ms: Annotated[
        float | None, typer.Option(min=0.001, help="x-slo-ttft-ms of the long prompt.")
    ] = None,
    num_short: Annotated[int, typer.Option(min=1, help="Short requests.")] = 7,
    short_max_tokens: Annotated[
        int, typer.Option(min=2, help="Output of a short request; doubled until it outlasts.")
    ] = 64,
    long_prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the spike.")] = 1024,
    vocab_size: Annotated[
        int, typer.Option(min=256, help="Prompt ids stay below this.")
    ] = DEFAULT_VOCAB_SIZE,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the prompts. Default: new ones every time.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write everything measured as JSON.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the ratios as a Markdown table.")
    ] = False,
) -> None:
    """Seven short requests decode, one long prompt arrives: who notices, and how much?"""
    if serve is not None and url is not None:
        raise typer.BadParameter("give --url or --serve, not both", param_hint="--serve")
    try:
        scenario = SpikeScenario(
            num_short=num_short,
            short_max_tokens=short_max_tokens,
            long_prompt_tokens=long_prompt_tokens,
        )
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    out_folder_exists(out)
    rule = PromiseRule(
        tpot_factor if slo else None, None if long_ttft_ms is None else long_ttft_ms / 1000
    )
    if serve is None:
        contestants = [_running(url or DEFAULT_URL, model, api_key, rule)]
    else:
        contestants = [
            _started(key, serve, api_key, serve_option or [], rule, ready_timeout)
            for key in _chosen_configs(config)
        ]
    # A fixed seed would meet its own prompts in the prefix cache of a server that keeps running.
    seed = secrets.randbits(32) if seed is None else seed
    prompts = PromptSource(seed, vocab_size)
    session = asyncio.run(_with_progress(contestants, scenario, prompts, rounds))
    about = {
        "model": serve or model,
        "server": "started" if serve else url or DEFAULT_URL,
        "seed": seed,
        "tpot_factor": rule.tpot_factor,
        "long_ttft_ms": long_ttft_ms,
        "num_cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    _print(session, about, is_markdown=markdown)
    if out is not None:
        payload = to_json(session, rows_of(session), about)
        out.write_text(json.dumps(payload, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if any(result.violations for result in session.results):
        raise typer.Exit(1)


def _chosen_configs(config: list[str] | None) -> list[str]:
    """Return the keys of the configurations to measure, each checked."""
    chosen = config or list(SERVER_CONFIGS)
    for key in chosen:
        if key not in SERVER_CONFIGS:
            raise typer.BadParameter(
                f"unknown configuration {key!r}: choose from {', '.join(SERVER_CONFIGS)}",
                param_hint="--config",
            )
    return list(dict.fromkeys(chosen))


def _running(url: str, model: str, api_key: str | None, rule: PromiseRule) -> Contestant:
    """Return a server that is already running."""

    @contextlib.asynccontextmanager
    async def open_client() -> AsyncIterator[StreamClient]:
        async with open_http(url, api_key) as http:
            await wait_until_ready(http, max_polls=1)
            yield LoadClient(http, MonotonicClock(), model)

    return Contestant("running", "running server", rule, open_client)


def _started(
    key: str,
    model: str,
    api_key: str | None,
    extra: list[str],
    rule: PromiseRule,
    ready_timeout_s: float,
) -> Contestant:
    """Return a server that is started for each of its spikes and ended afterwards."""
    config: ServerConfig = SERVER_CONFIGS[key]

    @contextlib.asynccontextmanager
    async def open_client() -> AsyncIterator[StreamClient]:
        def command(port: int, database: Path) -> list[str]:
            return serve_command(model, config, port, database, extra)

        async with (
            running_server(command, ready_timeout_s) as base_url,
            open_http(base_url, api_key) as http,
        ):
            yield LoadClient(http, MonotonicClock(), model)

    return Contestant(
        key, config.label, rule if config.has_promises else PromiseRule(), open_client
    )


async def _with_progress(
    contestants: list[Contestant], scenario: SpikeScenario, prompts: PromptSource, rounds: int
) -> SpikeSession:
    """Measure, with a progress bar on the terminal if there is one."""
    with progress_bar("spike") as on_stage:
        return await measure_rounds(contestants, scenario, prompts, rounds, on_stage)


def _print(session: SpikeSession, about: dict[str, Any], *, is_markdown: bool) -> None:
    """Print the table and its notes."""
    rows = rows_of(session)
    scenario = session.scenario
    title = (
        f"Spike on {about['model']}: {scenario.num_short} requests decode, a prompt of"
        f" {scenario.long_prompt_tokens} tokens arrives"
    )
    console = wide_console()
    if is_markdown:
        console.print(render_markdown(rows), markup=False, soft_wrap=True)
    else:
        console.print(render_table(rows, title))
    for note in render_notes(session, rows):
        console.print(note, markup=False, soft_wrap=True)
