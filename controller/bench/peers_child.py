"""A measured program without HTTP: a child process that speaks JSON lines, and a client for it.

Owns the child's life, its pipes and the instant at which a line was read. Must not know what the
child runs, nor judge what it answers. A child that dies fails its streams; it never hangs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.bench.client import ReadListener
from controller.bench.scenario import ScenarioRequest
from controller.bench.series import RequestSeries, TokenRead
from controller.bench.servers import STOP_TIMEOUT_S, ServerError, log_tail
from engine.clock import Clock

MAX_LINE_BYTES = 1 << 22
"""A line holds one event; a text of thousands of tokens fits easily."""


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """One line of the child and the instant, on the client's clock, at which it was read.

    `fields` is None when the child's output has ended.
    """

    at: float
    fields: Mapping[str, Any] | None


class JsonChild:
    """The pipes of a running child: commands in, events out, told apart by their `name`."""

    def __init__(
        self,
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
        clock: Clock,
        noun: str = "the peer",
    ) -> None:
        self._noun = noun
        self._stdin = stdin
        self._stdout = stdout
        self._clock = clock
        self._queues: dict[str, asyncio.Queue[ChildEvent]] = {}
        self._last_error: str | None = None
        self._end: ChildEvent | None = None

    @property
    def last_error(self) -> str | None:
        """Reason of the child's `fatal` event, None without one."""
        return self._last_error

    def subscribe(self, name: str) -> asyncio.Queue[ChildEvent]:
        """Return the queue of every event of `name` from now on, the child's end included."""
        queue: asyncio.Queue[ChildEvent] = asyncio.Queue()
        self._queues[name] = queue
        if self._end is not None:
            queue.put_nowait(self._end)
        return queue

    def unsubscribe(self, name: str) -> None:
        """Drop the queue of `name`; later events of it are ignored."""
        self._queues.pop(name, None)

    async def send(self, **command: Any) -> None:
        """Write one command; ServerError if the child has gone."""
        self._stdin.write(json.dumps(command).encode() + b"\n")
        try:
            await self._stdin.drain()
        except ConnectionError as exc:
            raise ServerError(f"{self._noun} has ended: {self._last_error or exc}") from exc

    async def read_one(self) -> ChildEvent:
        """Return the next event, whoever it is for; ServerError if it is no JSON object."""
        line = await self._stdout.readline()
        # Before anything is parsed: what parsing costs is not the child's time.
        at = self._clock.now()
        if not line:
            return ChildEvent(at, None)
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise ServerError(f"{self._noun} wrote a line that is no JSON object: {line[:80]!r}")
        if fields.get("event") == "fatal":
            self._last_error = str(fields.get("error"))
        return ChildEvent(at, fields)

    async def pump(self) -> None:
        """Hand events to their queues until the output ends; then everybody hears of the end."""
        while True:
            try:
                event = await self.read_one()
            except ServerError as exc:
                self._last_error = str(exc)
                event = ChildEvent(self._clock.now(), None)
            if event.fields is None:
                self._end = event
                for queue in self._queues.values():
                    queue.put_nowait(event)
                return
            queue_of_name = self._queues.get(event.fields.get("name", ""))
            if queue_of_name is not None:
                queue_of_name.put_nowait(event)


class ChildClient:
    """A `StreamClient` on a child; one instance serves any number of requests at once."""

    def __init__(self, child: JsonChild, clock: Clock) -> None:
        self._child = child
        self._clock = clock
        self._num_sent = 0

    async def stream(
        self, request: ScenarioRequest, on_read: ReadListener | None = None
    ) -> RequestSeries:
        """Send `request` now and return its series when the child says that it has ended.

        Targets of the request are not sent: such a program makes no promises.
        """
        # Names repeat from round to round; what the child sees must not.
        self._num_sent += 1
        name = f"{request.name}#{self._num_sent}"
        events = self._child.subscribe(name)
        sent_at = self._clock.now()
        reads: list[TokenRead] = []
        try:
            await self._child.send(
                name=name,
                prompt=list(request.prompt_token_ids),
                max_tokens=request.max_tokens,
            )
            while True:
                event = await events.get()
                fields = event.fields
                if fields is None:
                    error = self._child.last_error or "the peer ended before the request did"
                    return RequestSeries(request.name, sent_at, tuple(reads), error=error)
                kind = fields.get("event")
                if kind == "tokens":
                    read = TokenRead(event.at, int(fields["num_tokens"]))
                    reads.append(read)
                    if on_read is not None:
                        on_read(read)
                elif kind == "finished":
                    return _finished(request, sent_at, reads, fields)
                elif kind == "failed":
                    return RequestSeries(
                        request.name, sent_at, tuple(reads), error=str(fields.get("error"))
                    )
        except ServerError as exc:
            return RequestSeries(request.name, sent_at, tuple(reads), error=str(exc))
        finally:
            self._child.unsubscribe(name)


def _finished(
    request: ScenarioRequest, sent_at: float, reads: list[TokenRead], fields: Mapping[str, Any]
) -> RequestSeries:
    """Return the whole series; the counts are the child's own."""
    num_output = int(fields["num_output_tokens"])
    return RequestSeries(
        name=request.name,
        sent_at=sent_at,
        reads=tuple(reads),
        # The child ends a request at its number of tokens and for no other reason.
        finish_reason="length" if num_output == request.max_tokens else "stop",
        server_prompt_tokens=int(fields["num_prompt_tokens"]),
        server_output_tokens=num_output,
        text=fields.get("text"),
    )


@dataclass(frozen=True, slots=True)
class RunningChild:
    """A child that said `ready`, and what it said about itself."""

    child: JsonChild
    facts: dict[str, Any]


@contextlib.asynccontextmanager
async def running_child(
    command: Sequence[str],
    ready_timeout_s: float,
    clock: Clock,
    env: Mapping[str, str] | None = None,
    *,
    noun: str = "the peer",
) -> AsyncIterator[RunningChild]:
    """Run `command` until it is ready, yield it, end it afterwards by closing its input.

    ServerError, with its reason or the end of its log, if it is not ready within `ready_timeout_s`
    seconds; errors call the child by its `noun`.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-peer-") as folder:
        log_path = Path(folder) / "peer.log"
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=env,
                limit=MAX_LINE_BYTES,
                # Ctrl-C reaches the benchmark, which then ends the child in order.
                start_new_session=True,
            )
        if process.stdin is None or process.stdout is None:
            raise ServerError(f"{noun} has no pipes")
        child = JsonChild(process.stdin, process.stdout, clock, noun)
        pump: asyncio.Task[None] | None = None
        try:
            facts = await _ready(child, ready_timeout_s, log_path, noun)
            pump = asyncio.create_task(child.pump())
            yield RunningChild(child, facts)
        finally:
            await _stop(process)
            if pump is not None:
                await pump


async def _ready(child: JsonChild, timeout_s: float, log_path: Path, noun: str) -> dict[str, Any]:
    """Return the fields of the `ready` event."""
    try:
        event = await asyncio.wait_for(child.read_one(), timeout_s)
    except TimeoutError:
        raise ServerError(
            f"{noun} is not ready after {timeout_s:.0f} s\n{log_tail(log_path)}"
        ) from None
    if event.fields is None:
        raise ServerError(f"{noun} ended before it was ready\n{log_tail(log_path)}")
    if event.fields.get("event") != "ready":
        raise ServerError(f"{noun} cannot run: {event.fields.get('error', event.fields)}")
    return {key: value for key, value in event.fields.items() if key != "event"}


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End `process`: close its input, wait, then insist."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
