"""Servers to measure: one running elsewhere, or `paceline serve` as a child process.

Owns the life of the child: command line, readiness, end by its own process id. Must not send load.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

POLL_INTERVAL_S = 0.25
STOP_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 15
MAIN_WITHOUT_SCRIPT = "from controller.cli.main import main; main()"

Sleep = Callable[[float], Awaitable[None]]
Spawn = Callable[..., subprocess.Popen[bytes]]


class ServerError(RuntimeError):
    """A server did not come up; the message names the cause and shows the end of its log."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """A policy to measure: its name in the table, its flags, whether requests carry promises."""

    label: str
    serve_flags: tuple[str, ...]
    has_promises: bool = False


SERVER_CONFIGS = {
    "whole": ServerConfig("whole prompt", ("--policy", "whole")),
    "static-256": ServerConfig(
        "static 256", ("--policy", "static", "--max-num-batched-tokens", "256")
    ),
    "static-128": ServerConfig(
        "static 128", ("--policy", "static", "--max-num-batched-tokens", "128")
    ),
    "slo": ServerConfig("SLO planner", ("--policy", "slo"), has_promises=True),
}
"""The configurations of the spike, in the order of the table."""

REFERENCE_CONFIG = "static-128"
"""What the others are compared with."""


def serve_command(
    model: str, config: ServerConfig, port: int, database: Path, extra: Sequence[str] = ()
) -> list[str]:
    """Return the command line that serves `model` under `config` on a loopback port.

    The database is one of its own, so that a measurement never mixes with an operator's history.
    """
    script = Path(sys.executable).with_name("paceline")
    program = str(script) if script.exists() else shutil.which("paceline")
    # A checkout that was not installed has no script; this is what the script does.
    head = [program] if program else [sys.executable, "-c", MAIN_WITHOUT_SCRIPT]
    return [
        *head,
        "serve",
        model,
        "--served-model-name",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--db",
        f"sqlite:///{database}",
        *config.serve_flags,
        *extra,
    ]


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def wait_until_ready(
    http: httpx.AsyncClient,
    *,
    max_polls: int,
    has_ended: Callable[[], bool] = lambda: False,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Poll `/ready` up to `max_polls` times, `POLL_INTERVAL_S` apart, until it answers 200.

    ServerError if it never does, or as soon as `has_ended()` says that nobody will answer any more.
    """
    last = "no answer"
    for poll_no in range(max_polls):
        if poll_no > 0:
            await sleep(POLL_INTERVAL_S)
        if has_ended():
            raise ServerError("the server ended before it was ready")
        try:
            response = await http.get("/ready")
        except httpx.HTTPError as exc:
            last = f"{type(exc).__name__}: {exc}"
        else:
            if response.status_code == httpx.codes.OK:
                return
            last = f"HTTP {response.status_code} {response.text[:200]}"
    raise ServerError(f"{http.base_url} is not ready: {last}")


@contextlib.asynccontextmanager
async def running_server(
    command: Callable[[int, Path], list[str]],
    ready_timeout_s: float,
    *,
    spawn: Spawn = subprocess.Popen,
) -> AsyncIterator[str]:
    """Run `command(port, database)` until it is ready, yield its base URL, end it afterwards.

    ServerError, with the end of its log, if it is not ready within `ready_timeout_s` seconds.
    """
    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        log_path = Path(folder) / "server.log"
        with log_path.open("wb") as log:
            # Its own session: Ctrl-C reaches the benchmark, which then ends the server in order.
            process = spawn(
                command(port, Path(folder) / "bench.db"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            try:
                async with httpx.AsyncClient(base_url=base_url, trust_env=False) as http:
                    await wait_until_ready(
                        http,
                        max_polls=max(1, round(ready_timeout_s / POLL_INTERVAL_S)),
                        has_ended=lambda: process.poll() is not None,
                    )
            except ServerError as exc:
                code = process.poll()
                state = "still running" if code is None else f"exit code {code}"
                raise ServerError(f"{exc} ({state})\n{log_tail(log_path)}") from exc
            yield base_url
        finally:
            await asyncio.to_thread(stop, process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End `process`: ask, wait `STOP_TIMEOUT_S` seconds, then insist."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def log_tail(path: Path) -> str:
    """Return the last lines of a log."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])
