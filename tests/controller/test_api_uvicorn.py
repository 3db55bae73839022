"""The application behind the real HTTP server, on a loopback socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from controller.api.app import create_app
from engine.request import FinishReason
from tests.controller.service_double import ScriptedService, hangs_after, run_async, says, sse

HEAD = "HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\nconnection: close\r\n"


@asynccontextmanager
async def serving(service: ScriptedService, **settings: Any) -> AsyncIterator[int]:
    """Serve on a free port; the socket listens before the server does, so nobody has to wait."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_app(service, **settings)
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await running


async def post(port: int, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    length = f"content-length: {len(content)}\r\n\r\n"
    writer.write(f"POST /v1/completions {HEAD}{length}".encode() + content)
    await writer.drain()
    return reader, writer


def unchunked(payload: bytes) -> str:
    text, rest = b"", payload
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        text, rest = text + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return text.decode()


def test_a_stream_arrives_piece_by_piece() -> None:
    async def run() -> None:
        service = ScriptedService(hangs_after(2))
        async with serving(service) as port:
            reader, writer = await post(port, {"prompt": "x", "stream": True})
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"x-slo-decision: admitted" in head
            # The script is still held: what is read now was flushed before the end.
            first = await reader.readuntil(b"\n\n\r\n") + await reader.readuntil(b"\n\n\r\n")
            assert not service.streams[0].gate.is_set()
            service.streams[0].gate.set()
            events = list(sse(unchunked(first + await reader.read())))
            writer.close()
        assert [event["choices"][0]["text"] for event in events[:2]] == ["a", "a"]
        assert events[-1] == "[DONE]"

    run_async(run())


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_closing_the_socket_cancels(is_stream: bool, num_tokens: int) -> None:
    async def run() -> None:
        service = ScriptedService(hangs_after(num_tokens))
        async with serving(service) as port:
            reader, writer = await post(port, {"prompt": "x", "stream": is_stream})
            if is_stream and num_tokens:
                await reader.readuntil(b"\n\n\r\n")
            else:
                await service.submitted.wait()
            writer.close()
            await service.streams[0].has_ended.wait()
        assert service.streams[0].ended_with == [FinishReason.CANCELLED]

    run_async(run())


def test_an_undeclared_body_over_the_limit_is_refused_while_it_is_sent() -> None:
    async def run() -> None:
        async with serving(ScriptedService(says("a")), max_body_bytes=1000) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"POST /v1/completions {HEAD}transfer-encoding: chunked\r\n\r\n".encode())
            writer.write((b"400\r\n" + b"x" * 1024 + b"\r\n") * 2)
            await writer.drain()
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")
            writer.close()

    run_async(run())
