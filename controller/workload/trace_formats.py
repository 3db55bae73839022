"""The formats of traces as tables of columns: what each is called, and how a cell becomes a value.

Owns the layouts (Azure, Mooncake, our own CSV and JSON lines) and the reading of single cells. Must
not open a file or know an order of rows.
"""

from __future__ import annotations

import datetime
import enum
import functools
import math
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from controller.workload.arrivals import MAX_LENGTH_TOKENS

MOONCAKE_QUANTUM_S: Final = 3.0

_NS_PER_S: Final = 10**9
_MAX_TICKS: Final = 1e15
_INSTANT: Final = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class TraceFormat(enum.StrEnum):
    """How a trace is written; `auto` looks at its first line."""

    AUTO = "auto"
    AZURE = "azure"
    MOONCAKE = "mooncake"
    CSV = "csv"
    JSONL = "jsonl"


class TraceRow(NamedTuple):
    """One row as read; `ticks` is its time in the layout's unit."""

    ticks: float
    num_prompt_tokens: int
    num_output_tokens: int
    slo_class: str | None = None
    prefix_ids: tuple[int, ...] = ()
    prefix_block_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name in the file, the field of `TraceRow` that it fills, and its reader.

    `read` takes a string in a table and any JSON value in JSON lines; ValueError says what is wrong
    with it.
    """

    name: str
    field: str
    read: Callable[[Any], Any]
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class Layout:
    """One format. The first column is the time, `ticks_per_s` of whose units are a second.

    `is_rebased` says that times have an arbitrary origin: the first request then arrives at 0.
    `is_strict` says that a column nobody knows is a mistake, not an addition of the publisher's.
    """

    format: TraceFormat
    is_json: bool
    columns: tuple[Column, ...]
    ticks_per_s: int
    is_rebased: bool
    is_strict: bool

    @property
    def time_column(self) -> str:
        """Name of the column that holds the time."""
        return self.columns[0].name

    @property
    def required_names(self) -> list[str]:
        """Names of the columns that must be there, in order."""
        return [column.name for column in self.columns if column.is_required]

    @property
    def names(self) -> list[str]:
        """Names of all columns, in order."""
        return [column.name for column in self.columns]


# Cells of a table


def _text_count(text: str) -> int:
    digits = text.strip()
    # `int` alone would take "1_000", "+5" and the digits of other scripts.
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
        raise ValueError(f"must be an integer of at least 1, got {reprlib.repr(text)}")
    return _json_count(int(digits))


def _text_seconds(text: str) -> float:
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"must be a finite number, got {reprlib.repr(text)}")
    return _json_time(value)


def _text_instant_ns(text: str) -> int:
    """Nanoseconds since 1970, exactly; an instant without an offset is taken for UTC."""
    match = _INSTANT.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"must be an instant such as 2023-11-16 18:17:03.9799600, got {reprlib.repr(text)}"
        )
    second, fraction, offset = match.groups()
    return _epoch_seconds(second, offset or "Z") * _NS_PER_S + int((fraction or "").ljust(9, "0"))


# Neighbouring rows share their second.
@functools.lru_cache(maxsize=64)
def _epoch_seconds(second: str, offset: str) -> int:
    try:
        instant = datetime.datetime.fromisoformat(second + offset)
    except ValueError as error:
        raise ValueError(f"is no instant of the calendar: {second!r}") from error
    return int((instant - _EPOCH).total_seconds())


def _text_class(text: str) -> str | None:
    return text.strip() or None


def _text_ids(text: str) -> tuple[int, ...]:
    words = text.split()
    if not all(word.isascii() and word.isdigit() and len(word) <= 20 for word in words):
        raise ValueError(f"must be block ids with spaces between them, got {reprlib.repr(text)}")
    return tuple(map(int, words))


# Values of JSON lines


def _json_count(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_LENGTH_TOKENS:
        raise ValueError(
            f"must be an integer in [1, {MAX_LENGTH_TOKENS}], got {reprlib.repr(value)}"
        )
    return value


def _json_time(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MAX_TICKS:
        raise ValueError(f"must be a number in [0, {_MAX_TICKS:g}], got {reprlib.repr(value)}")
    return float(value)


def _json_class(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        # One exception for every bad cell: the reader adds file, line and column to it.
        raise ValueError(  # noqa: TRY004 - see above
            f"must be the name of a class, got {reprlib.repr(value)}"
        )
    return _text_class(value)


def _json_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise ValueError("must be a list of integers that are not negative")
    return tuple(value)


def _own_columns(*, is_json: bool) -> tuple[Column, ...]:
    count = _json_count if is_json else _text_count
    return (
        Column("at_s", "ticks", _json_time if is_json else _text_seconds),
        Column("num_prompt_tokens", "num_prompt_tokens", count),
        Column("num_output_tokens", "num_output_tokens", count),
        Column("slo_class", "slo_class", _json_class if is_json else _text_class, False),
        Column("prefix_ids", "prefix_ids", _json_ids if is_json else _text_ids, False),
        Column("prefix_block_tokens", "prefix_block_tokens", count, False),
    )


LAYOUTS: Final = {
    layout.format: layout
    for layout in (
        Layout(
            TraceFormat.AZURE,
            is_json=False,
            columns=(
                Column("TIMESTAMP", "ticks", _text_instant_ns),
                Column("ContextTokens", "num_prompt_tokens", _text_count),
                Column("GeneratedTokens", "num_output_tokens", _text_count),
            ),
            ticks_per_s=_NS_PER_S,
            is_rebased=True,
            is_strict=False,
        ),
        Layout(
            TraceFormat.MOONCAKE,
            is_json=True,
            columns=(
                Column("timestamp", "ticks", _json_time),
                Column("input_length", "num_prompt_tokens", _json_count),
                Column("output_length", "num_output_tokens", _json_count),
                Column("hash_ids", "prefix_ids", _json_ids, False),
            ),
            ticks_per_s=1000,
            is_rebased=True,
            is_strict=False,
        ),
        Layout(TraceFormat.CSV, False, _own_columns(is_json=False), 1, False, True),
        Layout(TraceFormat.JSONL, True, _own_columns(is_json=True), 1, False, True),
    )
}
