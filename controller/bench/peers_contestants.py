"""Who can be measured: our server, transformers' continuous batching, any server with the API.

Owns how each contestant is started, awaited and ended, and that all get the same number type,
device and threads. Must not measure. Each is started for its turn and ended after it, so that
nothing of one can burn a core while another is measured; a server at a URL is not ours to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from controller.bench.client import LoadClient, StreamClient, open_http
from controller.bench.peers_child import ChildClient, running_child
from controller.bench.rounds import Contestant
from controller.bench.servers import (
    POLL_INTERVAL_S,
    SERVER_CONFIGS,
    ServerError,
    running_server,
    serve_command,
)
from controller.bench.spike import PromiseRule
from engine.clock import MonotonicClock

TRANSFORMERS = "transformers"
TRANSFORMERS_MODULE = "engine.device.peer_transformers"
PEER_SETTINGS = ("sdpa", "eager", "sdpa-128", "sdpa-compiled")
"""Names of the settings that the peer's process knows (`engine/device/peer_transformers.py`)."""

DEFAULT_PEER_SETTINGS = ("sdpa", "eager")
"""What is tried when nothing else is asked for; compiling takes minutes at every start."""

FactsListener = Callable[[str, dict[str, Any]], None]
"""Hears a contestant's key and what it said about itself once it was ready."""


@dataclass(frozen=True, slots=True)
class Equipment:
    """What every contestant is given: number type, device, threads (None = torch's own choice)."""

    model: str
    dtype: str = "float32"
    device: str = "cpu"
    num_threads: int | None = None
    ready_timeout_s: float = 900.0

    def environment(self) -> dict[str, str]:
        """Return the environment of a child process, its thread pools bounded if asked for."""
        if self.num_threads is None:
            return dict(os.environ)
        bound = str(self.num_threads)
        return {**os.environ, "OMP_NUM_THREADS": bound, "MKL_NUM_THREADS": bound}


def our_server(
    config_key: str,
    equipment: Equipment,
    rule: PromiseRule,
    extra: Sequence[str] = (),
    api_key: str | None = None,
) -> Contestant:
    """Return `paceline serve` under one of `SERVER_CONFIGS`, started for each turn."""
    config = SERVER_CONFIGS[config_key]
    flags = ("--dtype", equipment.dtype, "--device", equipment.device, *extra)

    @contextlib.asynccontextmanager
    async def open_client() -> AsyncIterator[StreamClient]:
        def command(port: int, database: Path) -> list[str]:
            return serve_command(equipment.model, config, port, database, flags)

        def spawn(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
            return subprocess.Popen(words, env=equipment.environment(), **options)  # noqa: S603 - our own command line

        async with (
            running_server(command, equipment.ready_timeout_s, spawn=spawn) as base_url,
            open_http(base_url, api_key) as http,
        ):
            yield LoadClient(http, MonotonicClock(), equipment.model)

    return Contestant(
        f"paceline-{config_key}",
        f"paceline, {config.label}",
        rule if config.has_promises else PromiseRule(),
        open_client,
    )


def transformers_peer(
    setting: str,
    equipment: Equipment,
    on_facts: FactsListener = lambda key, facts: None,
) -> Contestant:
    """Return transformers' continuous batching in a process of its own, started for each turn."""
    key = f"{TRANSFORMERS}-{setting}"
    command = [
        sys.executable, "-m", TRANSFORMERS_MODULE, equipment.model, "--settings", setting,
        "--dtype", equipment.dtype, "--device", equipment.device,
    ]  # fmt: skip

    @contextlib.asynccontextmanager
    async def open_client() -> AsyncIterator[StreamClient]:
        clock = MonotonicClock()
        async with running_child(
            command, equipment.ready_timeout_s, clock, equipment.environment()
        ) as running:
            on_facts(key, running.facts)
            yield ChildClient(running.child, clock)

    return Contestant(key, f"transformers, {setting}", PromiseRule(), open_client)


def url_server(url: str, name: str, equipment: Equipment, api_key: str | None = None) -> Contestant:
    """Return a server that is already running, reached over the OpenAI completions API.

    Its model is the first that `/v1/models` names: whoever started it chose the weights.
    """

    @contextlib.asynccontextmanager
    async def open_client() -> AsyncIterator[StreamClient]:
        async with open_http(url, api_key) as http:
            max_polls = max(1, round(equipment.ready_timeout_s / POLL_INTERVAL_S))
            model = await first_model(http, max_polls=max_polls)
            yield LoadClient(http, MonotonicClock(), model)

    return Contestant(name, name, PromiseRule(), open_client)


async def first_model(
    http: httpx.AsyncClient,
    *,
    max_polls: int,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> str:
    """Return the first model's id, polling `/v1/models` until it answers; ServerError if never."""
    last = "no answer"
    for poll_no in range(max_polls):
        if poll_no > 0:
            await sleep(POLL_INTERVAL_S)
        try:
            response = await http.get("/v1/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except httpx.HTTPError as exc:
            last = f"{type(exc).__name__}: {exc}"
        except (ValueError, KeyError, IndexError, TypeError):
            last = "/v1/models names no model"
    raise ServerError(f"{http.base_url} is not ready: {last}")


def parse_peer(word: str) -> tuple[str | None, str]:
    """Return (URL, name) of `--peer`, URL None for transformers; ValueError says what is wrong."""
    if word == TRANSFORMERS:
        return None, TRANSFORMERS
    url, separator, name = word.rpartition("=")
    if not separator or not name or not url.startswith(("http://", "https://")):
        raise ValueError(f"{word!r}: expected {TRANSFORMERS} or URL=name (http://…:8001=vllm)")
    return url, name
