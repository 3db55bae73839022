"""Starting, awaiting and ending the servers that are measured."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from controller.bench.servers import (
    POLL_INTERVAL_S,
    REFERENCE_CONFIG,
    SERVER_CONFIGS,
    ServerError,
    free_port,
    running_server,
    serve_command,
    wait_until_ready,
)
from controller.cli.bench import app, bench

TINY_SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
os.write(int(sys.argv[2]), b"listening")
server.serve_forever()
"""


def test_the_four_policies_and_their_flags() -> None:
    flags = {key: config.serve_flags for key, config in SERVER_CONFIGS.items()}
    assert flags == {
        "whole": ("--policy", "whole"),
        "static-256": ("--policy", "static", "--max-num-batched-tokens", "256"),
        "static-128": ("--policy", "static", "--max-num-batched-tokens", "128"),
        "slo": ("--policy", "slo"),
    }
    assert [key for key, config in SERVER_CONFIGS.items() if config.has_promises] == ["slo"]
    assert REFERENCE_CONFIG in SERVER_CONFIGS


def test_the_serve_command() -> None:
    command = serve_command(
        "demo", SERVER_CONFIGS["static-128"], 8123, Path("/tmp/x/bench.db"), ["--dtype", "float32"]
    )
    words = " ".join(command)
    assert " serve demo --served-model-name demo --host 127.0.0.1 --port 8123 " in words
    assert "--db sqlite:////tmp/x/bench.db" in words
    assert words.endswith("--policy static --max-num-batched-tokens 128 --dtype float32")


def wait_with(statuses: list[int | None], **kwargs: Any) -> list[float]:
    """Poll a server that answers `statuses` in turn (None = no connection); return the sleeps."""
    answers = iter(statuses)
    slept: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/ready"
        status = next(answers)
        if status is None:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(status, text="loading")

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def run() -> None:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await wait_until_ready(http, sleep=sleep, **kwargs)

    asyncio.run(run())
    return slept


def test_readiness_is_awaited() -> None:
    assert wait_with([None, 503, 503, 200], max_polls=4) == [POLL_INTERVAL_S] * 3


def test_a_server_that_never_gets_ready_is_named_with_its_last_answer() -> None:
    with pytest.raises(ServerError, match="http://test is not ready: HTTP 503 loading"):
        wait_with([None, 503], max_polls=2)


def test_a_server_that_ended_is_not_waited_for() -> None:
    with pytest.raises(ServerError, match="ended before it was ready"):
        wait_with([], max_polls=5, has_ended=lambda: True)


@pytest.fixture
def termination() -> Iterator[None]:
    """Puts back what SIGTERM did before."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("is_terminated", [False, True])
@pytest.mark.usefixtures("termination")
def test_a_child_is_ended_when_the_measurement_is_over(is_terminated: bool) -> None:
    children: list[subprocess.Popen[bytes]] = []
    read_fd, write_fd = os.pipe()

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        kwargs["pass_fds"] = (write_fd,)
        child: subprocess.Popen[bytes] = subprocess.Popen(*args, **kwargs)
        os.read(read_fd, 9)  # blocks until the child listens
        children.append(child)
        return child

    async def run() -> None:
        def command(port: int, database: Path) -> list[str]:
            return [sys.executable, "-c", TINY_SERVER, str(port), str(write_fd)]

        async with running_server(command, ready_timeout_s=60.0, spawn=start) as base_url:
            assert base_url.startswith("http://127.0.0.1:")
            assert children[0].poll() is None
            if is_terminated:
                signal.raise_signal(signal.SIGTERM)
                await asyncio.Event().wait()

    bench()
    try:
        with pytest.raises(KeyboardInterrupt) if is_terminated else contextlib.nullcontext():
            asyncio.run(run())
    finally:
        os.close(read_fd)
        os.close(write_fd)
    assert children[0].returncode == -15


def test_a_child_that_fails_shows_the_end_of_its_log() -> None:
    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        child: subprocess.Popen[bytes] = subprocess.Popen(*args, **kwargs)
        child.wait()
        return child

    async def run() -> None:
        def command(port: int, database: Path) -> list[str]:
            return [sys.executable, "-c", "import sys; print('no such model'); sys.exit(2)"]

        async with running_server(command, ready_timeout_s=60.0, spawn=start):
            raise AssertionError("it never was ready")

    with pytest.raises(ServerError, match=r"(?s)exit code 2.*no such model"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "http://127.0.0.1:1", "--serve", "demo"], "not both"),
        (["--serve", "demo", "--config", "best"], "unknown configuration 'best'"),
        (["--short-max-tokens", "5"], "must exceed warm_tokens"),
        (["--out", "/nonexistent/folder/spike.json"], "is not a directory"),
    ],
)
def test_wrong_usage_exits_with_2(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["spike", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())


def test_a_server_that_is_not_there_exits_with_1_and_says_so() -> None:
    port = free_port()
    result = CliRunner().invoke(app, ["spike", "--url", f"http://127.0.0.1:{port}"])
    assert result.exit_code == 1
    assert f"INVALID running server, round 1: http://127.0.0.1:{port} is not ready" in result.output
