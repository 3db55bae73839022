"""Server-sent events out of a byte stream, however the network cut it.

Owns the framing only: bytes in, `data` fields out. Must not know what the data means or when it
came.
"""

from __future__ import annotations


class SseParser:
    """Incremental parser of `text/event-stream` (WHATWG HTML, section 9.2), `data` fields only.

    A read may hold half an event, or several; a line may end with LF or CRLF, also split between
    two reads.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[str]:
        """Return the data of every event that `chunk` completes, in order."""
        *lines, self._tail = (self._tail + chunk).split(b"\n")
        events: list[str] = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                    self._data.clear()
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        return events
