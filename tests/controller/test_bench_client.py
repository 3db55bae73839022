"""The load client against scripted answers on a virtual clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from controller.bench.client import LoadClient, open_http
from controller.bench.scenario import ScenarioRequest
from controller.bench.series import RequestSeries, TokenRead
from engine.clock import VirtualClock
from tests.controller.bench_double import sse, token_event

REQUEST = ScenarioRequest("short-0", (300, 301, 302), 4, ttft_s=1.5, tpot_s=0.25)
LAST = sse({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
Script = list[tuple[float, bytes]]


class ScriptedBody(httpx.AsyncByteStream):
    """Lets time pass, THEN hands out bytes: what a client sees of a step and its flush."""

    def __init__(self, clock: VirtualClock, script: Script) -> None:
        self._clock = clock
        self._script = script

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for delay_s, chunk in self._script:
            await asyncio.sleep(0)
            self._clock.advance(delay_s)
            yield chunk


class ScriptedServer(httpx.AsyncBaseTransport):
    def __init__(
        self,
        clock: VirtualClock,
        script: Script,
        *,
        status: int = 200,
        headers_after_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._script = script
        self._status = status
        self._headers_after_s = headers_after_s
        self.request: httpx.Request | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.request = request
        self._clock.advance(self._headers_after_s)
        return httpx.Response(
            self._status,
            headers={"x-slo-decision": "admitted"},
            stream=ScriptedBody(self._clock, self._script),
        )


def play(
    server: httpx.AsyncBaseTransport,
    clock: VirtualClock,
    on_read: Callable[[TokenRead], None] | None = None,
) -> RequestSeries:
    async def run() -> RequestSeries:
        async with httpx.AsyncClient(transport=server, base_url="http://test") as http:
            return await LoadClient(http, clock, "demo").stream(REQUEST, on_read)

    return asyncio.run(run())


def stamps(series: RequestSeries) -> list[tuple[float, int]]:
    return [(read.at, read.num_tokens) for read in series.reads]


def test_a_token_is_stamped_when_it_is_received() -> None:
    clock = VirtualClock(10.0)
    script = [
        (2.0, sse(token_event(3, 1))),
        (0.25, sse(token_event(3, 2))),
        (4.0, sse(token_event(3, 3))),
        (0.25, sse(token_event(3, 4, "length"))),
        (8.0, LAST + sse("[DONE]")),
    ]
    series = play(ScriptedServer(clock, script), clock)
    # Stamped before the step, each would carry the time of the one before it.
    assert stamps(series) == [(12.0, 1), (12.25, 1), (16.25, 1), (16.5, 1)]
    assert series.ttft_s == 2.0
    assert (series.error, series.finish_reason, series.decision) == (None, "length", "admitted")
    assert (series.server_prompt_tokens, series.server_output_tokens) == (3, 4)


def test_ttft_counts_from_before_the_request_is_written() -> None:
    clock = VirtualClock(10.0)
    script = [(1.0, sse(token_event(3, 1))), (0.0, sse("[DONE]"))]
    series = play(ScriptedServer(clock, script, headers_after_s=0.5), clock)
    assert series.sent_at == 10.0
    assert series.ttft_s == 1.5


def test_events_of_one_read_share_its_time() -> None:
    clock = VirtualClock()
    script = [
        (1.0, sse(token_event(3, 1))),
        (1.0, sse(token_event(3, 2)) + sse(token_event(3, 3)) + sse(token_event(3, 4, "length"))),
        (0.0, sse("[DONE]")),
    ]
    series = play(ScriptedServer(clock, script), clock)
    assert stamps(series) == [(1.0, 1), (2.0, 3)]
    assert series.num_merged_reads == 1


def test_an_event_cut_in_two_counts_when_it_is_whole() -> None:
    clock = VirtualClock()
    event = sse(token_event(3, 1))
    script = [(1.0, event[:20]), (1.0, event[20:]), (0.0, sse("[DONE]"))]
    assert stamps(play(ScriptedServer(clock, script), clock)) == [(2.0, 1)]


def test_usage_tells_how_many_tokens_a_chunk_holds() -> None:
    clock = VirtualClock()
    script = [
        (1.0, sse(token_event(3, 0))),
        (1.0, sse(token_event(3, 2))),
        (1.0, sse(token_event(3, 2, "length"))),
        (0.0, sse("[DONE]")),
    ]
    assert stamps(play(ScriptedServer(clock, script), clock)) == [(2.0, 2)]


def test_without_usage_a_chunk_is_a_token_and_a_bare_end_is_none() -> None:
    clock = VirtualClock()
    texts = [("a", None), ("", None), ("b", None), ("", "length")]
    script = [
        (1.0, sse({"choices": [{"text": text, "finish_reason": finish}]})) for text, finish in texts
    ]
    series = play(ScriptedServer(clock, [*script, (0.0, sse("[DONE]"))]), clock)
    assert stamps(series) == [(1.0, 1), (2.0, 1), (3.0, 1)]
    assert series.server_output_tokens is None


def test_cached_prompt_tokens_are_taken_from_usage() -> None:
    clock = VirtualClock()
    event = token_event(3, 1)
    event["usage"]["prompt_tokens_details"] = {"cached_tokens": 2}
    series = play(ScriptedServer(clock, [(1.0, sse(event)), (0.0, sse("[DONE]"))]), clock)
    assert series.server_cached_tokens == 2


def test_the_listener_hears_every_read_while_the_stream_runs() -> None:
    clock = VirtualClock()
    heard: list[tuple[TokenRead, float]] = []
    script = [(1.0, sse(token_event(3, i))) for i in (1, 2)]
    play(
        ScriptedServer(clock, [*script, (5.0, sse("[DONE]"))]),
        clock,
        lambda read: heard.append((read, clock.now())),
    )
    assert heard == [(TokenRead(1.0, 1), 1.0), (TokenRead(2.0, 1), 2.0)]


def test_the_request_is_the_scenario() -> None:
    clock = VirtualClock()
    server = ScriptedServer(clock, [(0.0, sse("[DONE]"))])
    play(server, clock)
    assert server.request is not None
    body = json.loads(server.request.content)
    assert server.request.url.path == "/v1/completions"
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("demo", [300, 301, 302], 4)
    assert body["stream"] is True
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert server.request.headers["x-slo-tpot-ms"] == "250.000"
    assert server.request.headers["x-slo-ttft-ms"] == "1500.000"


@pytest.mark.parametrize(
    ("script", "status", "expected"),
    [
        (
            [(0.0, b'{"error": {"code": "overloaded", "message": "m"}}')],
            429,
            "HTTP 429 overloaded: m",
        ),
        ([(0.0, b"<html>")], 502, "HTTP 502 <html>"),
        ([(0.0, b"[1]")], 500, "HTTP 500 [1]"),
        ([(1.0, sse({"error": {"type": "server_error", "message": "m"}}))], 200, "server_error: m"),
        ([(1.0, sse("nonsense"))], 200, "no JSON object"),
        ([(1.0, sse(token_event(3, 1)))], 200, "ended without [DONE]"),
    ],
)
def test_what_a_server_does_wrong_is_a_value(script: Script, status: int, expected: str) -> None:
    clock = VirtualClock()
    series = play(ScriptedServer(clock, script, status=status), clock)
    assert series.error is not None
    assert expected in series.error


def test_a_refused_connection_is_a_value() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody there", request=request)

    series = play(httpx.MockTransport(refuse), VirtualClock())
    assert series.error == "ConnectError: nobody there"
    assert series.reads == ()


def test_the_client_sends_a_key_and_has_no_cap_on_connections() -> None:
    async def run() -> str:
        async with open_http("http://127.0.0.1:1", "secret") as http:
            return http.headers["authorization"]

    assert asyncio.run(run()) == "Bearer secret"
