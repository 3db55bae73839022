"""A cost model as JSON numbers, for the same machine and model only. Never pickle.

Owns the document around a model's state: format, key and kind. Must not touch a file or a database.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from costmodel.base import CostModel
from costmodel.fields import SnapshotError, read_mapping
from costmodel.recursive import RecursiveLeastSquares
from costmodel.refitted import RefittedLeastSquares
from costmodel.windowed import WindowedRegression

# 2: chunks and prompt logits among the features.
SNAPSHOT_FORMAT: Final = 2


class StoredModel(CostModel, Protocol):
    """A cost model whose whole state is JSON numbers."""

    @property
    def kind(self) -> str:
        """The learner's name in a snapshot."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON numbers."""
        ...


_KINDS: Final[dict[str, Callable[[Mapping[str, Any], str], StoredModel]]] = {
    RecursiveLeastSquares.kind: RecursiveLeastSquares.restore,
    RefittedLeastSquares.kind: RefittedLeastSquares.restore,
    WindowedRegression.kind: WindowedRegression.restore,
}


@dataclass(frozen=True, slots=True)
class SnapshotKey:
    """What latencies depend on; coefficients learnt under one key say nothing under another."""

    model: str
    device: str
    dtype: str
    attention_backend: str
    block_size: int
    engine_version: str


def dump_model(model: StoredModel, key: SnapshotKey) -> dict[str, Any]:
    """Return a document for `json.dumps(..., allow_nan=False)`, holding the model's whole state."""
    return {
        "format": SNAPSHOT_FORMAT,
        "kind": model.kind,
        "key": asdict(key),
        "state": model.state(),
    }


def load_model(document: object, key: SnapshotKey) -> StoredModel:
    """Rebuild a model from `dump_model`'s document: the same predictions, and the same future.

    SnapshotError names the field: another format, an unknown kind, a key that differs, a number
    that is missing, not finite or out of its range. No document whatsoever raises anything else.
    """
    try:
        return _load(document, key)
    except SnapshotError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        # What is stored is not ours to trust; a part that nobody thought of must not stop a server.
        problem = f"cannot be read ({type(error).__name__}: {error})"
        raise SnapshotError("snapshot", problem) from error


def _load(document: object, key: SnapshotKey) -> StoredModel:
    if not isinstance(document, Mapping):
        raise SnapshotError("snapshot", f"must be an object, got {type(document).__name__}")
    if document.get("format") != SNAPSHOT_FORMAT:
        problem = f"must be {SNAPSHOT_FORMAT}, got {document.get('format')!r}"
        raise SnapshotError("format", problem)
    stored = read_mapping(document, "key", "snapshot")
    for name, value in asdict(key).items():
        if stored.get(name) != value:
            problem = f"is {stored.get(name)!r}, this engine's is {value!r}"
            raise SnapshotError(f"key.{name}", problem)
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise SnapshotError("kind", f"must be one of {sorted(_KINDS)}, got {kind!r}")
    return _KINDS[kind](read_mapping(document, "state", "snapshot"), "state")
