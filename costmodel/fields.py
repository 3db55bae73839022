"""Reading numbers back from JSON: every refusal names the field.

Owns typed readers and `SnapshotError`. Must not know a learner.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from costmodel.features import FloatArray

MAX_COUNT: Final = 2**53
"""The largest whole number up to which JSON's doubles count one by one."""


class SnapshotError(ValueError):
    """A stored cost model cannot be used; `field` is the dotted path of what is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


def read_mapping(state: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    """Return the object called `name`."""
    value = _read(state, name, path)
    if not isinstance(value, Mapping):
        raise SnapshotError(f"{path}.{name}", f"must be an object, got {type(value).__name__}")
    return value


def read_number(
    state: Mapping[str, Any],
    name: str,
    path: str,
    low: float = -sys.float_info.max,
    high: float = sys.float_info.max,
) -> float:
    """Return a number within [low, high], both finite."""
    value = _read(state, name, path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SnapshotError(f"{path}.{name}", f"must be a number, got {value!r}")
    # Compared before it is converted: JSON has whole numbers that no double holds.
    if not low <= value <= high:
        shown = repr(value)[:24]
        raise SnapshotError(f"{path}.{name}", f"must be finite and in [{low}, {high}], got {shown}")
    return float(value)


def read_count(state: Mapping[str, Any], name: str, path: str) -> int:
    """Return a whole number from 0 to `MAX_COUNT`."""
    value = read_number(state, name, path, 0.0, MAX_COUNT)
    if value != int(value):
        raise SnapshotError(f"{path}.{name}", f"must be a whole number, got {value}")
    return int(value)


def read_array(
    state: Mapping[str, Any], name: str, path: str, shape: tuple[int, ...]
) -> FloatArray:
    """Return finite numbers of exactly that shape; text and truth values are none, whatever NumPy
    would make of them.
    """
    value = _read(state, name, path)
    if not _are_numbers(value, len(shape)):
        raise SnapshotError(f"{path}.{name}", "must be numbers")
    try:
        array = np.array(value, dtype=np.float64)
    except (ValueError, OverflowError) as error:
        raise SnapshotError(f"{path}.{name}", "must be numbers") from error
    if array.shape != shape:
        raise SnapshotError(f"{path}.{name}", f"must have shape {shape}, got {array.shape}")
    if not np.isfinite(array).all():
        raise SnapshotError(f"{path}.{name}", "holds a number that is not finite")
    return array


def read_numbers(state: Mapping[str, Any], name: str, path: str, max_length: int) -> list[float]:
    """Return at most `max_length` finite numbers."""
    value = _read(state, name, path)
    if not isinstance(value, list | tuple) or len(value) > max_length:
        raise SnapshotError(f"{path}.{name}", f"must be a list of at most {max_length} numbers")
    numbers: list[float] = read_array(state, name, path, (len(value),)).tolist()
    return numbers


def _are_numbers(value: object, depth: int) -> bool:
    """Whether `value` is a number, or lists of them, nested at most `depth` deep."""
    if isinstance(value, list | tuple):
        return depth > 0 and all(_are_numbers(each, depth - 1) for each in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read(state: Mapping[str, Any], name: str, path: str) -> Any:
    if name not in state:
        raise SnapshotError(f"{path}.{name}", "is missing")
    return state[name]
