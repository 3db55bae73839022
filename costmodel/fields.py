"""Reading numbers back from JSON: every refusal names the field.

Owns typed readers and `SnapshotError`. Must not know a learner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from costmodel.features import FloatArray


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
    state: Mapping[str, Any], name: str, path: str, low: float = -math.inf, high: float = math.inf
) -> float:
    """Return a finite number within [low, high]."""
    value = _read(state, name, path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SnapshotError(f"{path}.{name}", f"must be a number, got {value!r}")
    if not math.isfinite(value) or not low <= value <= high:
        raise SnapshotError(f"{path}.{name}", f"must be finite and in [{low}, {high}], got {value}")
    return float(value)


def read_count(state: Mapping[str, Any], name: str, path: str) -> int:
    """Return a whole number that is not negative."""
    value = read_number(state, name, path, low=0.0)
    if value != int(value):
        raise SnapshotError(f"{path}.{name}", f"must be a whole number, got {value}")
    return int(value)


def read_array(
    state: Mapping[str, Any], name: str, path: str, shape: tuple[int, ...]
) -> FloatArray:
    """Return finite numbers of exactly that shape."""
    value = _read(state, name, path)
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
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


def _read(state: Mapping[str, Any], name: str, path: str) -> Any:
    if name not in state:
        raise SnapshotError(f"{path}.{name}", "is missing")
    return state[name]
