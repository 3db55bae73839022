"""The text of a trace file, line by line: compressed or not, whatever its line ends.

Owns opening, decoding and `TraceError`. Must not know a format of traces.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

_GZIP_MAGIC: Final = b"\x1f\x8b"
_UTF8_BOM: Final = b"\xef\xbb\xbf"
_UTF16_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")
# A line is held in memory whole; the longest of a public trace has a few kilobytes.
MAX_LINE_BYTES: Final = 1 << 24


class TraceError(ValueError):
    """A trace cannot be used. `line` counts from 1, None where the whole file is meant; `column` is
    the name of a column or key, None where the whole line is.
    """

    def __init__(
        self, path: Path, problem: str, *, line: int | None = None, column: str | None = None
    ) -> None:
        place = str(path)
        if line is not None:
            place += f", line {line}"
        if column is not None:
            place += f", column {column}"
        super().__init__(f"{place}: {problem}")
        self.path = path
        self.line = line
        self.column = column
        self.problem = problem


def read_lines(path: Path) -> Generator[str, None, None]:
    """Yield the lines of a UTF-8 file with their ends, one at a time.

    Gzip is recognised by its content, a byte order mark is dropped. TraceError where the file
    cannot be read, is damaged, or is no UTF-8.
    """
    number = 0
    try:
        with ExitStack() as stack:
            file = _open(path, stack)
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(raw) > MAX_LINE_BYTES:
                    raise TraceError(
                        path,
                        f"is longer than {MAX_LINE_BYTES} bytes: is this a trace?",
                        line=number,
                    )
                yield _decode(path, raw, number)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            path, f"the compressed file is damaged: {error}", line=number + 1
        ) from error
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror or error}") from error


def _open(path: Path, stack: ExitStack) -> BinaryIO | gzip.GzipFile:
    # Opened once and never rewound: a pipe is as good as a file.
    file = stack.enter_context(path.open("rb"))
    if not file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
        return file
    return stack.enter_context(gzip.GzipFile(fileobj=file, mode="rb"))


def _decode(path: Path, raw: bytes, number: int) -> str:
    if number == 1:
        if raw.startswith(_UTF16_BOMS):
            raise TraceError(path, "is UTF-16; a trace must be UTF-8", line=1)
        raw = raw.removeprefix(_UTF8_BOM)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(
            path, f"is not UTF-8: byte {error.start + 1} of the line is no text", line=number
        ) from error
