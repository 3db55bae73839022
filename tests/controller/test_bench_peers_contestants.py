"""Who is measured and how: command lines, environments, and the command around them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from controller.bench import peers_contestants
from controller.bench.client import LoadClient
from controller.bench.peers_contestants import (
    Equipment,
    first_model,
    our_server,
    parse_peer,
    transformers_peer,
    url_server,
)
from controller.bench.rounds import Contestant
from controller.bench.servers import POLL_INTERVAL_S, ServerError
from controller.bench.spike import PromiseRule
from controller.cli import bench_peers
from controller.cli.bench import app
from engine.clock import VirtualClock
from tests.controller.bench_double import VirtualServer

EQUIPMENT = Equipment("tiny", "bfloat16", "cpu", 3, 10.0)
SMALL = ["--num-requests", "4", "--concurrency", "2", "--output-len", "4", "--input-len", "8"]


def test_everybody_gets_the_same_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    env = EQUIPMENT.environment()
    assert (env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"]) == ("3", "3")
    assert Equipment("tiny").environment()["OMP_NUM_THREADS"] == "7"


def test_ours_and_the_peer_are_started_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    @contextlib.asynccontextmanager
    async def child(
        command: list[str], timeout_s: float, clock: Any, env: dict[str, str]
    ) -> AsyncIterator[Any]:
        started.append((command, env))
        raise ServerError("far enough")
        yield  # pragma: no cover - makes this a generator

    @contextlib.asynccontextmanager
    async def server(command: Any, timeout_s: float, *, spawn: Any) -> AsyncIterator[str]:
        started.append((command(8123, Path("/tmp/b.db")), {}))
        raise ServerError("far enough")
        yield  # pragma: no cover - makes this a generator

    monkeypatch.setattr(peers_contestants, "running_child", child)
    monkeypatch.setattr(peers_contestants, "running_server", server)

    async def open_both() -> None:
        for contestant in (
            transformers_peer("eager", EQUIPMENT),
            our_server("slo", EQUIPMENT, PromiseRule(3.0), ["--block-size", "32"]),
        ):
            with pytest.raises(ServerError, match="far enough"):
                async with contestant.open_client():
                    pass

    asyncio.run(open_both())
    (peer, env), (ours, _) = started
    assert env["OMP_NUM_THREADS"] == "3"
    for command in (peer, ours):
        assert "--dtype bfloat16 --device cpu" in " ".join(command)
    assert peer[1:6] == ["-m", peers_contestants.TRANSFORMERS_MODULE, "tiny", "--settings", "eager"]
    assert " ".join(ours).endswith("--policy slo --dtype bfloat16 --device cpu --block-size 32")


def test_promises_go_to_the_planner_that_keeps_them() -> None:
    rule = PromiseRule(3.0)
    assert our_server("slo", EQUIPMENT, rule).rule == rule
    assert our_server("static-128", EQUIPMENT, rule).rule == PromiseRule()
    assert transformers_peer("sdpa", EQUIPMENT).rule == PromiseRule()
    assert url_server("http://x", "vllm", EQUIPMENT).rule == PromiseRule()


def models(*answers: httpx.Response | Exception) -> httpx.AsyncClient:
    queue = list(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/models"
        answer = queue.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://test")


def test_a_server_at_a_url_is_asked_for_its_model_until_it_answers() -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    http = models(
        httpx.ConnectError("refused"),
        httpx.Response(503),
        httpx.Response(200, json={"data": []}),
        httpx.Response(200, json={"data": [{"id": "qwen"}]}),
    )
    assert asyncio.run(first_model(http, max_polls=4, sleep=sleep)) == "qwen"
    assert pauses == [POLL_INTERVAL_S] * 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (httpx.ConnectError("refused"), "ConnectError: refused"),
        (httpx.Response(200, json=[]), "names no model"),
        (httpx.Response(200, text="<html>"), "names no model"),
        (httpx.Response(404), "404 Not Found"),
    ],
)
def test_a_server_that_never_names_a_model_is_an_error(
    answer: httpx.Response | Exception, reason: str
) -> None:
    with pytest.raises(ServerError, match=reason):
        asyncio.run(first_model(models(answer), max_polls=1))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("transformers", (None, "transformers")),
        ("http://127.0.0.1:8001=vllm", ("http://127.0.0.1:8001", "vllm")),
        ("https://x/a?b=c=it", ("https://x/a?b=c", "it")),
    ],
)
def test_peers_by_name(word: str, expected: tuple[str | None, str]) -> None:
    assert parse_peer(word) == expected


@pytest.mark.parametrize("word", ["vllm", "127.0.0.1:8001=vllm", "http://127.0.0.1:8001", "=x"])
def test_a_peer_that_makes_no_sense_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="URL=name"):
        parse_peer(word)


def virtual(key: str, **fault: Any) -> Contestant:
    @contextlib.asynccontextmanager
    async def open_client() -> AsyncIterator[LoadClient]:
        server = VirtualServer(VirtualClock(), **fault)
        async with httpx.AsyncClient(transport=server, base_url="http://test") as http:
            yield LoadClient(http, server.clock, "demo")

    return Contestant(key, key, PromiseRule(), open_client)


@pytest.fixture
def contestants(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Virtual servers instead of real ones; their faults can be set per key."""
    faults: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(
        bench_peers,
        "our_server",
        lambda key, *_: virtual(f"paceline-{key}", **faults.get("ours", {})),
    )

    def peer(setting: str, equipment: Equipment, on_facts: Any) -> Contestant:
        on_facts(f"transformers-{setting}", {"attention": setting})
        return virtual(f"transformers-{setting}", **faults.get(setting, {}))

    monkeypatch.setattr(bench_peers, "transformers_peer", peer)
    return faults


def test_the_whole_command(contestants: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    contestants["sdpa"] = {"prefill_token_s": 0.01}
    out = tmp_path / "peers.json"
    done = CliRunner().invoke(app, ["peers", *SMALL, "--rounds", "2", "--out", str(out)])
    assert done.exit_code == 0, done.output
    payload = json.loads(out.read_text())
    assert payload["reference"] == "paceline-slo"
    # The trial found the other setting faster, so that one was measured.
    assert [row["key"] for row in payload["trial"]["rows"]] == [
        "transformers-sdpa",
        "transformers-eager",
    ]
    keys = ["paceline-slo", "transformers-eager"]
    assert [row["key"] for row in payload["closed"]["rows"]] == keys
    assert [row["key"] for row in payload["spike"]["rows"]] == keys
    assert [row["num_valid"] for row in payload["closed"]["rows"]] == [2, 2]
    assert payload["contestants"]["transformers-eager"] == {"attention": "eager"}
    assert payload["closed"]["agreement"][0]["num_equal"] == 8
    assert "trial of transformers-sdpa" in done.output
    assert "8 of 8 greedy texts are the same" in done.output


def test_markdown_holds_ratios_only(contestants: dict[str, dict[str, Any]]) -> None:
    words = ["peers", *SMALL, "--peer-setting", "sdpa", "--rounds", "1", "--markdown"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "| contestant | paceline is …× as fast | rounds |" in done.output
    assert "| long TTFT vs paceline |" in done.output
    assert "trial" not in done.output
    assert "tokens/s  " not in done.output


def test_an_invalid_run_fails_the_command(contestants: dict[str, dict[str, Any]]) -> None:
    contestants["ours"] = {"stop_after": 2}
    words = ["peers", *SMALL, "--peer-setting", "sdpa", "--rounds", "1", "--no-spike"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "INVALID paceline-slo, round 1" in done.output


def test_a_peer_that_cannot_run_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def peer(setting: str, equipment: Equipment, on_facts: Any) -> Contestant:
        @contextlib.asynccontextmanager
        async def open_client() -> AsyncIterator[LoadClient]:
            raise ServerError(f"the peer cannot run: no {setting} here")
            yield  # pragma: no cover - makes this a generator

        return Contestant(setting, setting, PromiseRule(), open_client)

    monkeypatch.setattr(bench_peers, "transformers_peer", peer)
    done = CliRunner().invoke(app, ["peers", *SMALL])
    assert done.exit_code == 1
    assert "no setting of the peer runs" in done.output
    assert "no sdpa here" in done.output
    assert "no eager here" in done.output


@pytest.mark.parametrize(
    "words",
    [
        ["--peer", "vllm"],
        ["--peer-setting", "flash"],
        ["--config", "none"],
        ["--num-requests", "1"],
        ["--out", "/no/such/folder/x.json"],
        ["--short-max-tokens", "3"],
    ],
)
def test_wrong_usage_is_exit_code_2(words: list[str]) -> None:
    assert CliRunner().invoke(app, ["peers", *words]).exit_code == 2
