"""Events of several streams as one series, server-sent events, and clients that go away.

Owns cancellation: whatever ends an answer early, every request behind it is ended too. Must not
know what a chunk holds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from controller.runtime.generation import GenerationEvent, GenerationStream

ResultT = TypeVar("ResultT")
DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `work` while the client stays; ClientGoneError, with the work cancelled, once it leaves.

    The body must have been read: nothing but the disconnect is left to receive.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watch.result()
        raise ClientGoneError
    finally:
        # Also on the way out of a cancellation: nobody else would stop them.
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Merger:
    """The events of several streams as one series; a stream may be added while it is read.

    Close it (`aclose`) to stop reading: streams themselves are not ended.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, GenerationEvent] | BaseException | None] = (
            asyncio.Queue()
        )
        self._pumps: list[asyncio.Future[None]] = []
        self._num_open = 0

    def add(self, position: int, stream: GenerationStream) -> None:
        """Read one more stream; its events come with `position`."""
        self._num_open += 1
        self._pumps.append(asyncio.ensure_future(self._pump(position, stream)))

    async def _pump(self, position: int, stream: GenerationStream) -> None:
        try:
            async for event in stream:
                self._queue.put_nowait((position, event))
        except Exception as error:
            self._queue.put_nowait(error)
        else:
            self._queue.put_nowait(None)

    async def events(self) -> AsyncGenerator[tuple[int, GenerationEvent], None]:
        """Yield (position, event) as they come, until every stream has ended."""
        while self._num_open:
            item = await self._queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                self._num_open -= 1
            else:
                yield item

    async def aclose(self) -> None:
        """Stop reading."""
        for each in self._pumps:
            each.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


def sse_event(payload: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b"data: " + text.encode() + b"\n\n"


class EventStream(Response):
    """Sends chunks as they come; stops, and closes their source, as soon as the client leaves.

    `resources` is closed at the end, whatever the end is; `on_disconnect` is called if the client
    went away first.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        resources: AsyncExitStack,
        headers: Mapping[str, str],
        on_disconnect: Callable[[], None],
    ) -> None:
        self._chunks = chunks
        self._resources = resources
        self._on_disconnect = on_disconnect
        self.status_code = 200
        self.background = None
        # Buffering proxies would turn a stream into one late answer.
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        async with self._resources, aclosing(self._chunks):
            try:
                await until_disconnect(receive, self._send_all(send))
            except (ClientGoneError, OSError):  # OSError: how newer servers tell it, on sending
                self._on_disconnect()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
