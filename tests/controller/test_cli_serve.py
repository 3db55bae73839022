"""`paceline serve`: flags from settings, one-line errors, a real start and stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from controller.cli.main import app
from controller.cli.serve import _listen
from controller.config import Settings
from tests.tiny_llama import save_tiny_llama

COMMAND = [sys.executable, "-c", "from controller.cli.main import main; main()"]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"PACELINE_{name.upper()}", raising=False)
    monkeypatch.chdir(tmp_path)


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["serve", *words], env={"COLUMNS": "200"})


def test_every_setting_has_an_option_with_its_default() -> None:
    text = invoke("--help").output
    for name in ("--max-num-batched-tokens", "--slo-class", "--no-warmup", "--lenient-slo"):
        assert name in text
    assert "(default: 8000)" in text
    assert "(default: sqlite:///paceline.db)" in text


def test_events_do_not_wait_for_acknowledgements() -> None:
    # With Nagle's algorithm every small write on a connection in use may take 40 ms.
    async def accepted_has_no_delay() -> bool:
        listener = _listen(Settings(port=0))
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            option = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            found.set_result(bool(option))

        async with await asyncio.start_server(on_client, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await asyncio.wait_for(found, 10)

    assert asyncio.run(accepted_has_no_delay())


def test_only_given_flags_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PORT", "1234")
    monkeypatch.setenv("PACELINE_MAX_NUM_SEQS", "3")
    result = invoke(
        "here",
        "--max-num-seqs",
        "4",
        "--no-warmup",
        "--slo-class",
        "a:ttft_ms=5",
        "--print-settings",
    )
    shown = json.loads(result.output)
    assert (shown["model"], shown["port"], shown["max_num_seqs"]) == ("here", 1234, 4)
    assert shown["is_warmup_enabled"] is False
    assert shown["slo_class"][0]["slo"]["ttft_s"] == 0.005


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--port", "70000"], "port"),
        (["--policy", "magic"], "policy"),
        (["--slo-class", "a:ttft=1"], "unknown key 'ttft'"),
        (["--max-num-seqs", "many"], "max_num_seqs"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--db", "mysql://x"], "--db"),
        (["--db", "sqlite:///no/such/folder/p.db"], "--db"),
        (["./no-such-model"], "./no-such-model: no such directory"),
        (["."], "config"),
    ],
)
def test_a_start_that_cannot_work_is_one_line_and_exit_code_2(words: list[str], names: str) -> None:
    words = words if "--port" in words else [*words, "--port", "0"]
    result = invoke(*words)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert line.startswith("paceline: error: ")
    assert names in line
    assert "Traceback" not in result.output + result.stderr


def test_a_taken_port_is_named_before_anything_is_loaded() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = invoke("no-such-model", "--port", str(port))
    assert result.exit_code == 2
    assert f"port {port} on 127.0.0.1" in result.stderr
    assert "--port" in result.stderr


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_llama(path, num_words=60, vocab_size=64, max_len=256)
    return path


@pytest.mark.device
@pytest.mark.parametrize("policy", ["slo", "static", "whole", "edf-shed-32"])
def test_a_real_server_from_banner_to_flushed_telemetry(
    model_folder: Path, tmp_path: Path, policy: str
) -> None:
    database = f"sqlite:///{tmp_path / 'p.db'}"
    server = subprocess.Popen(
        [*COMMAND, "serve", str(model_folder), "--port", "0", "--db", database,
         "--policy", policy, "--served-model-name", "tiny", "--kv-cache-memory-bytes", "1000000",
         "--enforce-eager", *(["--swap-space", "0", "--no-enable-prefix-caching"]
                              if policy == "whole" else ["--swap-space", "0.0001"])],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONWARNINGS": "error"},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        banner = []
        for line in server.stdout:
            banner.append(line)
            if line.strip().startswith("metrics"):
                break
        text = "".join(banner)
        for word in ("tiny", "float32", "reference", "KV pool", f"{policy}:", "p.db"):
            assert word in text
        reuse = text.split("KV reuse", 1)[1].split("\n", 1)[0].strip()
        if policy == "whole":
            assert reuse == "prefix cache off; preempted requests are computed again"
        else:
            assert reuse.startswith("prefix cache on; host memory for ")
        url = text.split("API", 1)[1].split()[0]
        answer = httpx.post(
            f"{url}/completions",
            json={"model": "tiny", "prompt": "w1 w2 w3", "max_tokens": 4, "ignore_eos": True},
            headers={"x-slo-ttft-ms": "60000"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert answer.json()["slo"]["ttft_met"] is True
        request_id = answer.headers["x-request-id"]
    finally:
        server.send_signal(signal.SIGTERM)
        rest = server.communicate(timeout=60)[0]
    assert server.returncode == 0
    assert rest.strip().endswith("paceline: stopped")
    shown = CliRunner().invoke(app, ["telemetry", "request", request_id, "--db", database])
    assert shown.exit_code == 0
    assert "token 4" in shown.output
    summary = CliRunner().invoke(app, ["telemetry", "summary", "--db", database, "--json"])
    assert json.loads(summary.output)


# A load that never ends; whoever ends in order would wait for its thread, or abort in it.
NEVER_LOADED = """
import atexit, threading
from controller.runtime import wiring
from controller.cli.main import main
atexit.register(print, "in order")
def build_runtime(settings, progress, *owner):
    print("loading", flush=True)
    threading.Event().wait()
wiring.build_runtime = build_runtime
main()
"""


# A device that takes a step and never answers.
HANGS = """
import threading
from controller.runtime import service, wiring
from controller.cli.main import main
build = wiring.build_runtime
def build_runtime(settings, progress, *owner):
    runtime = build(settings, progress, *owner)
    def execute(plan, requests):
        print("inside", flush=True)
        threading.Event().wait()
    runtime.engine.runner.execute = execute
    runtime.service._last_step_s = 0.0
    return runtime
wiring.build_runtime = build_runtime
main()
"""


@pytest.mark.device
def test_a_server_whose_device_hangs_ends_with_its_own_exit_code(
    model_folder: Path, tmp_path: Path
) -> None:
    database = f"sqlite:///{tmp_path / 'p.db'}"
    server = subprocess.Popen(
        [sys.executable, "-c", HANGS, "serve", str(model_folder), "--port", "0", "--no-warmup",
         "--db", database, "--kv-cache-memory-bytes", "1000000", "--drain-timeout-s", "0.1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        lines = iter(server.stdout)
        url = next(line.split()[1] for line in lines if line.split()[:1] == ["API"])
        body = b'{"prompt": "w1", "stream": true}'
        host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            assert "inside\n" in lines
            server.send_signal(signal.SIGTERM)
            err = server.communicate(timeout=60)[1]
    finally:
        server.kill()
    assert server.returncode == 1
    failure = "the engine hangs: a step did not end within 0 s"
    assert err.splitlines()[-1] == f"paceline: error: {failure}"
    shown = CliRunner().invoke(app, ["telemetry", "events", "--db", database, "--json"])
    last = json.loads(shown.output)[-1]
    assert (last["kind"], last["numbers"]["message"]) == ("engine_stopped", failure)


def test_a_signal_while_loading_ends_at_once(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", NEVER_LOADED, "serve", "demo", "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "loading\n"
    finally:
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=60)
    assert server.returncode == 2
    assert (out, err) == ("", "paceline: error: stopped while loading\n")
