"""A child that speaks JSON lines: its life, its death, and what is read of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from controller.bench.peers_child import ChildClient, RunningChild, running_child
from controller.bench.scenario import ScenarioRequest
from controller.bench.series import RequestSeries, TokenRead
from controller.bench.servers import ServerError
from engine.clock import VirtualClock

T = TypeVar("T")
REQUEST = ScenarioRequest("short-0", (5, 6, 7), 3)
PREAMBLE = """
import json, sys
def say(**fields): print(json.dumps(fields), flush=True)
"""
READY = PREAMBLE + 'say(event="ready", attention="sdpa")\n'
ECHO = (
    READY
    + """
for line in sys.stdin:
    c = json.loads(line)
    for _ in range(c["max_tokens"]): say(event="tokens", name=c["name"], num_tokens=1)
    say(event="finished", name=c["name"], num_prompt_tokens=len(c["prompt"]),
        num_output_tokens=c["max_tokens"], text=c["name"])
"""
)


class TickingClock(VirtualClock):
    """Moves on by one second at every reading."""

    def now(self) -> float:
        self.advance(1.0)
        return super().now()


def with_child(
    code: str, body: Callable[[RunningChild, TickingClock], Coroutine[Any, Any, T]]
) -> T:
    async def run() -> T:
        clock = TickingClock()
        async with running_child([sys.executable, "-c", code], 60.0, clock) as running:
            return await body(running, clock)

    return asyncio.run(run())


async def stream(running: RunningChild, clock: TickingClock) -> RequestSeries:
    return await ChildClient(running.child, clock).stream(REQUEST)


def test_a_stream_of_a_child() -> None:
    reads: list[TokenRead] = []

    async def body(running: RunningChild, clock: TickingClock) -> RequestSeries:
        assert running.facts == {"attention": "sdpa"}
        return await ChildClient(running.child, clock).stream(REQUEST, reads.append)

    series = with_child(ECHO, body)
    assert series.error is None
    assert series.num_output_tokens == series.server_output_tokens == 3
    assert series.server_prompt_tokens == 3
    assert series.finish_reason == "length"
    assert series.reads == tuple(reads)
    # One reading of the clock before sending, and one per line.
    assert [read.at - series.sent_at for read in reads] == [1.0, 2.0, 3.0]


def test_names_of_one_request_are_told_apart_from_round_to_round() -> None:
    async def body(running: RunningChild, clock: TickingClock) -> list[RequestSeries]:
        client = ChildClient(running.child, clock)
        return list(await asyncio.gather(*(client.stream(REQUEST) for _ in range(3))))

    streams = with_child(ECHO, body)
    assert [series.name for series in streams] == ["short-0"] * 3
    assert len({series.text for series in streams}) == 3
    assert all(series.num_output_tokens == 3 for series in streams)


def test_a_request_that_ends_early_did_not_reach_its_length() -> None:
    code = READY + (
        'name = json.loads(sys.stdin.readline())["name"]\n'
        'say(event="finished", name=name, num_prompt_tokens=3, num_output_tokens=2)\n'
        "sys.stdin.read()\n"
    )
    series = with_child(code, stream)
    assert (series.finish_reason, series.text) == ("stop", None)


@pytest.mark.parametrize(
    ("after_ready", "reason"),
    [
        ("sys.exit(3)", "the peer ended before the request did"),
        ('say(event="fatal", error="out of memory"); sys.exit(1)', "out of memory"),
        ('say(event="failed", name=name, error="too long"); sys.stdin.read()', "too long"),
        ('print("oops", flush=True); sys.stdin.read()', "no JSON object: b'oops"),
        ("print([1], flush=True); sys.stdin.read()", "no JSON object"),
    ],
)
def test_a_child_that_fails_ends_its_streams(after_ready: str, reason: str) -> None:
    code = READY + 'name = json.loads(sys.stdin.readline())["name"]\n' + after_ready
    series = with_child(code, stream)
    assert series.error is not None
    assert reason in series.error


def test_a_child_that_has_ended_answers_whoever_comes_later() -> None:
    async def body(running: RunningChild, clock: TickingClock) -> list[RequestSeries]:
        client = ChildClient(running.child, clock)
        return [await client.stream(REQUEST) for _ in range(2)]

    first, second = with_child(READY + "sys.stdin.readline()", body)
    assert first.error is not None
    assert second.error is not None


def test_sending_to_a_child_that_has_gone_is_a_series_with_an_error() -> None:
    async def body(running: RunningChild, clock: TickingClock) -> RequestSeries:
        events = running.child.subscribe("watch")
        assert (await events.get()).fields is None
        return await ChildClient(running.child, clock).stream(REQUEST)

    series = with_child(READY + "sys.exit(0)", body)
    assert series.error is not None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ('import sys; sys.exit("no such model")', "ended before it was ready\nno such model"),
        (PREAMBLE + 'say(event="fatal", error="no weights")', "the peer cannot run: no weights"),
        ("print('hello')", "no JSON object"),
    ],
)
def test_a_child_that_never_becomes_ready_is_named_with_its_reason(code: str, reason: str) -> None:
    with pytest.raises(ServerError, match=reason):
        with_child(code, stream)


def test_a_child_that_is_silent_runs_out_of_time() -> None:
    async def run() -> None:
        code = "import sys; sys.stdin.read()"
        async with running_child([sys.executable, "-c", code], 0.0, VirtualClock()):
            pytest.fail("it never said that it was ready")

    with pytest.raises(ServerError, match="not ready after 0 s"):
        asyncio.run(run())


def test_closing_its_input_ends_the_child_in_order(tmp_path: Path) -> None:
    code = READY + 'sys.stdin.read()\nopen(sys.argv[1], "w").write("in order")'

    async def run(path: str) -> None:
        async with running_child([sys.executable, "-c", code, path], 60.0, VirtualClock()):
            pass

    path = tmp_path / "end"
    asyncio.run(run(str(path)))
    assert path.read_text() == "in order"
