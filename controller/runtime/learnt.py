"""What a server learnt of its machine, read back from the cost model that it stored.

Owns the numbers that both doors of telemetry show. Must not speak SQL or touch a serving model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from costmodel.fields import SnapshotError
from costmodel.snapshot import SnapshotKey, load_model


class ModelReader(Protocol):
    """Finds what runs stored."""

    def newest_model(self, run_id: str | None = None) -> Mapping[str, Any] | None:
        """Return the row of the cost model that was stored last, or None."""
        ...


def learnt_costs(reader: ModelReader, run_id: str | None = None) -> dict[str, Any] | None:
    """Return marginal costs (seconds), the knee and the mixing ratio of the model stored last (by
    that run, if one is given), with `run_id`, `at`, `learner` and `num_observed`; None without one.

    `problem` is None, or says why the stored model cannot be read; then no costs are given.
    """
    row = reader.newest_model(run_id)
    if row is None:
        return None
    about = {name: row[name] for name in ("run_id", "at", "learner", "num_observed")}
    try:
        model = load_model(row["document"], SnapshotKey(**row["key"]))
    except (SnapshotError, TypeError) as error:
        return {**about, "problem": str(error)}
    ratio = model.quality().mixing_ratio
    return {**about, "problem": None, **asdict(model.marginals()), "mixing_ratio": ratio}
