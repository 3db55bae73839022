"""Trace files in and out: public formats and our own, read row by row.

Owns the choice of a layout, the order of rows and what is written. Must not know what a cell means
(`trace_formats`) or how a file is compressed (`trace_text`).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from controller.workload.arrivals import Arrival, Workload, sorted_workload
from controller.workload.draws import check_not_negative
from controller.workload.trace_formats import (
    LAYOUTS,
    MOONCAKE_QUANTUM_S,
    Layout,
    TraceFormat,
    TraceRow,
)
from controller.workload.trace_text import TraceError, read_lines
from controller.workload.transforms import jitter

__all__ = ["MOONCAKE_QUANTUM_S", "TraceError", "TraceFormat", "read_trace", "write_trace"]

_DEFAULT_BLOCK_TOKENS: Final = Arrival(0.0, 1, 1).prefix_block_tokens
# The published ticks are up to 3 ms off.
_TICK_TOLERANCE_S: Final = 0.01
_NAME_SUFFIXES: Final = {".gz", ".csv", ".jsonl", ".json", ".txt"}

# A row with its line number, every cell by its column's name.
_Cells = Iterator[tuple[int, Mapping[str, Any]]]


def read_trace(
    path: Path | str,
    *,
    format: str = "auto",  # noqa: A002 - the word that everybody uses for it
    name: str | None = None,
    sort: bool = False,
    max_requests: int | None = None,
    jitter_s: float | None = None,
    seed: int = 0,
) -> Workload:
    """Read a trace file (UTF-8, perhaps gzip) as a workload called `name`, or like the file.

    Formats: `azure` (CSV with TIMESTAMP, ContextTokens, GeneratedTokens), `mooncake` (JSON lines
    with timestamp in milliseconds, input_length, output_length, hash_ids), `csv` and `jsonl` (our
    own, see `write_trace`); `auto` tells them apart by the first line. The times of the public
    formats count from the earliest request, those of our own are kept.

    `max_requests` reads the first so many rows only. `sort` accepts rows in any order. `jitter_s`
    seconds, uniformly from `seed`, are added to every arrival; None adds 3 s where a Mooncake
    file's times are all ticks of 3 s, give or take 10 ms (then they are known no better than that,
    and replayed as they stand they would arrive in bursts that never were), and nothing elsewhere.

    TraceError names file, line and column; ValueError names a wrong argument.
    """
    path = Path(path)
    wanted = _trace_format(format)
    if max_requests is not None and max_requests < 1:
        raise ValueError(f"max_requests must be at least 1, got {max_requests}")
    if jitter_s is not None:
        check_not_negative("jitter_s", jitter_s)
    with closing(read_lines(path)) as rest:
        head = _head(path, rest)
        layout = LAYOUTS[_detect(path, head[-1]) if wanted is TraceFormat.AUTO else wanted]
        lines = chain(head, rest)
        cells = _json_cells(path, lines) if layout.is_json else _table_cells(path, lines, layout)
        rows = islice(_rows(path, cells, layout), max_requests)
        arrivals, is_quantised = _arrivals(path, rows, layout, sort)
    workload = sorted_workload(_name_of(path) if name is None else name, arrivals)
    if jitter_s is None:
        is_coarse = layout.format is TraceFormat.MOONCAKE and is_quantised
        jitter_s = MOONCAKE_QUANTUM_S if is_coarse else 0.0
    return jitter(workload, jitter_s, seed) if jitter_s else workload


def write_trace(workload: Workload, path: Path | str, *, format: str = "auto") -> None:  # noqa: A002 - as in read
    """Write a workload in one of our own formats, `csv` or `jsonl`; `auto` takes the file's suffix.

    Columns or keys: at_s, num_prompt_tokens, num_output_tokens, slo_class (empty or null = the
    default class) and, where a request shares a prefix, prefix_ids (in CSV with spaces between) and
    prefix_block_tokens. A name that ends in `.gz` is compressed. The same workload makes the same
    bytes, and reading them back gives equal arrivals. ValueError for a workload without requests or
    another format; OSError as the file system says.
    """
    path = Path(path)
    chosen = _trace_format(format)
    if chosen is TraceFormat.AUTO:
        suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
        if suffix not in (".csv", ".jsonl"):
            raise ValueError(f"path must end in .csv or .jsonl, perhaps .gz, got {path.name!r}")
        chosen = TraceFormat(suffix[1:])
    if chosen not in (TraceFormat.CSV, TraceFormat.JSONL):
        raise ValueError(f"format must be csv or jsonl to write, got {format!r}")
    if not workload.arrivals:
        raise ValueError("workload holds no request: nothing to write")
    text = _as_table(workload) if chosen is TraceFormat.CSV else _as_json_lines(workload)
    data = text.encode("utf-8")
    # mtime 0: equal workloads make equal files.
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix.lower() == ".gz" else data)


def _trace_format(word: str) -> TraceFormat:
    try:
        return TraceFormat(word)
    except ValueError:
        known = ", ".join(TraceFormat)
        raise ValueError(f"format must be one of {known}, got {word!r}") from None


def _name_of(path: Path) -> str:
    stem = path
    while stem.suffix.lower() in _NAME_SUFFIXES:
        stem = stem.with_suffix("")
    return stem.name


def _head(path: Path, lines: Iterator[str]) -> list[str]:
    """Return the first line that is not blank, with those before it: they count in an error."""
    head = []
    for line in lines:
        head.append(line)
        if line.strip():
            return head
    raise TraceError(path, "is empty")


def _detect(path: Path, first: str) -> TraceFormat:
    """Choose the format whose required columns the first line has."""
    if first.lstrip().startswith("{"):
        try:
            names = set(json.loads(first))
        except (ValueError, RecursionError):
            # Whatever is wrong is said with its position by the reader of JSON lines.
            return TraceFormat.JSONL
    else:
        names = {cell.strip(' "\r\n') for cell in first.split(",")}
    for layout in LAYOUTS.values():
        if layout.is_json == first.lstrip().startswith("{") and layout.time_column in names:
            return layout.format
    expected = "; ".join(f"{x.format}: {', '.join(x.required_names)}" for x in LAYOUTS.values())
    raise TraceError(
        path,
        f"is in no known format: it begins with {reprlib.repr(first.strip())}, and columns or keys "
        f"must be one of {expected}",
    )


def _table_cells(path: Path, lines: Iterator[str], layout: Layout) -> _Cells:
    reader = csv.reader(lines, strict=True)
    try:
        header = next((row for row in reader if any(cell.strip() for cell in row)), [])
        names = [cell.strip() for cell in header]
        _check_names(path, names, layout, reader.line_num)
        for row in reader:
            if len(row) != len(names):
                if not any(cell.strip() for cell in row):
                    continue
                raise TraceError(
                    path,
                    f"has {len(row)} cells, but the header has {len(names)}",
                    line=reader.line_num,
                )
            yield reader.line_num, dict(zip(names, row, strict=True))
    except csv.Error as error:
        # The library's own words are advice to a programmer.
        is_bare_return = str(error).startswith("new-line character")
        problem = "a carriage return ends no line here" if is_bare_return else str(error)
        raise TraceError(path, f"is no CSV: {problem}", line=reader.line_num) from error


def _json_cells(path: Path, lines: Iterator[str]) -> _Cells:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            # Without its end, or an object that is cut off would be wrong "in the next line".
            value = json.loads(line.rstrip("\r\n"))
        except json.JSONDecodeError as error:
            raise TraceError(
                path, f"is no JSON: {error.msg}", line=number, column=f"{error.colno} (character)"
            ) from error
        except (ValueError, RecursionError) as error:
            raise TraceError(path, f"is no usable JSON: {error}", line=number) from error
        if not isinstance(value, dict):
            raise TraceError(path, f"must be an object, got a {type(value).__name__}", line=number)
        yield number, value


def _check_names(path: Path, names: Sequence[str], layout: Layout, line: int) -> None:
    repeated = [name for name in layout.names if names.count(name) > 1]
    if repeated:
        raise TraceError(path, "appears twice in the header", line=line, column=repeated[0])
    missing = [name for name in layout.required_names if name not in names]
    if missing:
        raise TraceError(
            path, f"is missing; the header has {', '.join(names)}", line=line, column=missing[0]
        )
    _check_known(path, names, layout, line)


def _check_known(path: Path, names: Iterable[str], layout: Layout, line: int) -> None:
    """A misspelt optional column of ours would be ignored in silence."""
    unknown = [name for name in names if name not in layout.names] if layout.is_strict else []
    if unknown:
        raise TraceError(
            path,
            f"is unknown; known are {', '.join(layout.names)}",
            line=line,
            column=unknown[0] or "without a name",
        )


def _rows(path: Path, cells: _Cells, layout: Layout) -> Iterator[tuple[int, TraceRow]]:
    for line, values in cells:
        fields = {}
        for column in layout.columns:
            if column.name not in values:
                if column.is_required:
                    raise TraceError(path, "is missing", line=line, column=column.name)
                continue
            try:
                fields[column.field] = column.read(values[column.name])
            except ValueError as error:
                raise TraceError(path, str(error), line=line, column=column.name) from error
        if layout.is_json:
            _check_known(path, values, layout, line)
        yield line, TraceRow(**fields)


def _arrivals(
    path: Path, rows: Iterator[tuple[int, TraceRow]], layout: Layout, sort: bool
) -> tuple[list[Arrival], bool]:
    """Return the arrivals in the file's order, and whether their times are Mooncake's ticks."""
    read = list(rows) if sort else list(_in_order(path, rows, layout))
    if not read:
        raise TraceError(path, "holds no request")
    earliest = min(row.ticks for _, row in read)
    origin = earliest if layout.is_rebased else 0
    arrivals = []
    for line, row in read:
        try:
            # Whole numbers up to the division: an instant in nanoseconds is no float.
            arrivals.append(Arrival((row.ticks - origin) / layout.ticks_per_s, *row[1:]))
        except ValueError as error:
            raise TraceError(path, str(error), line=line) from error
    return arrivals, _is_quantised(arrivals)


def _is_quantised(arrivals: Sequence[Arrival]) -> bool:
    """Whether all times are ticks of Mooncake's quantum, and not only one of them."""
    ticks = {round(arrival.at_s / MOONCAKE_QUANTUM_S) for arrival in arrivals}
    return len(ticks) > 1 and all(
        abs(math.remainder(arrival.at_s, MOONCAKE_QUANTUM_S)) <= _TICK_TOLERANCE_S
        for arrival in arrivals
    )


def _in_order(
    path: Path, rows: Iterator[tuple[int, TraceRow]], layout: Layout
) -> Iterator[tuple[int, TraceRow]]:
    latest: float = -1
    for line, row in rows:
        if row.ticks < latest:
            raise TraceError(
                path,
                "is earlier than the row before it: sort the file by its times",
                line=line,
                column=layout.time_column,
            )
        latest = row.ticks
        yield line, row


def _columns_to_write(workload: Workload) -> list[str]:
    """The columns of prefixes only where something is shared: most traces have none."""
    names = LAYOUTS[TraceFormat.JSONL].names
    has_prefixes = any(
        arrival.prefix_ids or arrival.prefix_block_tokens != _DEFAULT_BLOCK_TOKENS
        for arrival in workload.arrivals
    )
    return names if has_prefixes else [name for name in names if not name.startswith("prefix_")]


def _as_json_lines(workload: Workload) -> str:
    names = _columns_to_write(workload)
    return "".join(
        json.dumps({name: getattr(arrival, name) for name in names}) + "\n"
        for arrival in workload.arrivals
    )


def _as_table(workload: Workload) -> str:
    names = _columns_to_write(workload)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for arrival in workload.arrivals:
        cells = [getattr(arrival, name) for name in names]
        writer.writerow(" ".join(map(str, c)) if isinstance(c, tuple) else c for c in cells)
    return text.getvalue()
