"""Steps that a server stored, as a cost model and a simulated machine take them.

Owns which of them tell what work takes, and how a row becomes features. Must not write to a
database, or hold a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Protocol

from costmodel.features import StepFeatures

_PAGE: Final = 10_000
# In the order of `StepFeatures`.
_COLUMNS: Final = (
    "prefill_tokens", "decode_requests", "decode_context_tokens", "chunk_past_tokens",
    "chunk_squared_tokens", "num_chunks", "num_prompt_logits",
)  # fmt: skip


class StepReader(Protocol):
    """Reads pages of stored steps, newest first."""

    def steps(
        self, *, run_id: str | None = None, limit: int = 100, cursor: str | None = None
    ) -> Any:
        """Return a page with `rows` and `next_cursor`."""
        ...


def read_steps(
    reader: StepReader, run_id: str, max_steps: int | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a run's steps, oldest first: the newest `max_steps` (None = all).

    StoreError from the reader.
    """
    rows: list[dict[str, Any]] = []
    cursor: str | None = None
    while max_steps is None or len(rows) < max_steps:
        limit = _PAGE if max_steps is None else min(_PAGE, max_steps - len(rows))
        page = reader.steps(run_id=run_id, limit=limit, cursor=cursor)
        rows += page.rows
        cursor = page.next_cursor
        if cursor is None:
            break
    return rows[::-1]


def is_lesson(row: Mapping[str, Any]) -> bool:
    """Whether a cost model would have learnt from it, as the service's `Teacher` decides.

    Not from steps that failed, that repeated a forward, that moved KV or tried to (told since
    revision 0005 of the database).
    """
    seconds = row["duration_s"]
    return (
        row["failure"] is None
        and not row["num_retries"]
        and not row["num_swapped_blocks"]
        and not row["num_failed_swaps"]
        and math.isfinite(seconds)
        and seconds > 0
    )


def features_of(row: Mapping[str, Any]) -> StepFeatures:
    """Return the work of a step; what an older revision did not write down counts as none."""
    return StepFeatures(*(float(row[name] or 0) for name in _COLUMNS))
