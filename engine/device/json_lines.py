"""JSON lines on standard output: how a program of `engine.device` talks to whoever started it.

Owns the private copy of standard output and whole lines. Must not know what is said.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, TextIO


class LineWriter:
    """Writes one JSON object a line, whole lines only, from any thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, event: str, **fields: Any) -> None:
        """Write and flush one event."""
        line = json.dumps({"event": event, **fields}) + "\n"
        with self._lock:
            self._stream.write(line)
            self._stream.flush()


def claim_stdout() -> LineWriter:
    """Keep standard output for the protocol alone: whatever a library prints goes to the log."""
    protocol = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return LineWriter(protocol)


def error_line(error: BaseException) -> str:
    """Return kind and message of an error in one line."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
