"""A cost model as JSON numbers, for the same machine and model only. Never pickle.

Owns the document around a model's state: format, key and kind. Must not touch a file or a database.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from costmodel.fields import SnapshotError, read_mapping
from costmodel.recursive import RecursiveLeastSquares

SNAPSHOT_FORMAT: Final = 1
RECURSIVE_KIND: Final = "recursive_least_squares"


@dataclass(frozen=True, slots=True)
class SnapshotKey:
    """What latencies depend on; coefficients learnt under one key say nothing under another."""

    model: str
    device: str
    dtype: str
    attention_backend: str
    block_size: int
    engine_version: str


def dump_model(model: RecursiveLeastSquares, key: SnapshotKey) -> dict[str, Any]:
    """Return a document that `json.dumps(..., allow_nan=False)` takes, holding the model's whole
    state.
    """
    return {
        "format": SNAPSHOT_FORMAT,
        "kind": RECURSIVE_KIND,
        "key": asdict(key),
        "state": model.state(),
    }


def load_model(document: Mapping[str, Any], key: SnapshotKey) -> RecursiveLeastSquares:
    """Rebuild a model from `dump_model`'s document; the next prediction and update are those of the
    original.

    SnapshotError names the field: another format or kind, a key that differs, a number that is
    missing, not finite or out of its range.
    """
    for name, expected in (("format", SNAPSHOT_FORMAT), ("kind", RECURSIVE_KIND)):
        if document.get(name) != expected:
            raise SnapshotError(name, f"must be {expected!r}, got {document.get(name)!r}")
    stored = read_mapping(document, "key", "snapshot")
    for name, value in asdict(key).items():
        if stored.get(name) != value:
            raise SnapshotError(
                f"key.{name}", f"is {stored.get(name)!r}, this engine's is {value!r}"
            )
    return RecursiveLeastSquares.restore(read_mapping(document, "state", "snapshot"))
