"""The bounded queue between the step loop and the writer's thread, and the honest count.

Owns queueing, dropping and counting. Must not know SQL, start a thread or read a clock.

Always, for every kind of row: offered = committed + dropped + queued. A batch that is being written
still counts as queued.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from store.records import EventRecord, Record, RequestRecord, StepRecord, num_rows

KINDS = ("step", "step_work", "request", "event", "model_snapshot")


@dataclass(frozen=True, slots=True)
class KindCounts:
    """Rows of one kind since the start; `queued` is what waits or is being written now."""

    offered: int = 0
    committed: int = 0
    dropped: int = 0
    queued: int = 0


@dataclass(frozen=True, slots=True)
class BacklogStats:
    """One consistent snapshot: counts by kind, drops by reason, rows queued and their bound."""

    kinds: Mapping[str, KindCounts]
    num_dropped_by_reason: Mapping[str, int]
    num_rows_queued: int
    max_rows: int


@dataclass(slots=True)
class Loss:
    """What was dropped for one reason since the last loss event."""

    num_rows: dict[str, int] = field(default_factory=dict)
    first_step_no: int | None = None
    last_step_no: int | None = None
    prefill_tokens: int = 0
    decode_tokens: int = 0
    first_at: int | None = None
    last_at: int | None = None

    def add(self, record: Record) -> None:
        """Count one dropped record."""
        for kind, number in _rows_by_kind(record):
            self.num_rows[kind] = self.num_rows.get(kind, 0) + number
        if isinstance(record, StepRecord):
            # Steps are offered in order, so the first one seen is the lowest.
            if self.first_step_no is None:
                self.first_step_no = record.step_no
            self.last_step_no = record.step_no
            self.prefill_tokens += record.prefill_tokens
            self.decode_tokens += record.decode_requests
        at = record.ended_at if isinstance(record, RequestRecord) else record.at
        self.first_at = at if self.first_at is None else min(self.first_at, at)
        self.last_at = at if self.last_at is None else max(self.last_at, at)

    def numbers(self) -> dict[str, int | None]:
        """Return the flat JSON object of a loss event."""
        return {
            **{f"num_{kind}_rows": self.num_rows.get(kind, 0) for kind in KINDS},
            "first_step_no": self.first_step_no,
            "last_step_no": self.last_step_no,
            "prefill_tokens": self.prefill_tokens,
            "decode_tokens": self.decode_tokens,
            "first_at": self.first_at,
            "last_at": self.last_at,
        }


class Backlog:
    """A queue of at most `max_rows` rows; when full, new records are dropped, never old ones.

    `offer` is for the step loop: it takes one short lock and never waits for a consumer. The rest
    is for one consumer.
    """

    def __init__(self, max_rows: int) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows must be positive, got {max_rows}")
        self._max_rows = max_rows
        self._records: deque[Record] = deque()
        self._num_rows = 0
        self._is_closed = False
        self._offered = dict.fromkeys(KINDS, 0)
        self._committed = dict.fromkeys(KINDS, 0)
        self._dropped = dict.fromkeys(KINDS, 0)
        self._queued = dict.fromkeys(KINDS, 0)
        self._dropped_by_reason: dict[str, int] = {}
        self._losses: dict[str, Loss] = {}
        self._changed = threading.Condition()

    def offer(self, record: Record, *, wake_rows: int) -> bool:
        """Queue a record or drop it (False); the consumer wakes once `wake_rows` rows wait."""
        rows = num_rows(record)
        with self._changed:
            self._count(self._offered, record, 1)
            if self._is_closed or self._num_rows + rows > self._max_rows:
                self._drop(record, "closed" if self._is_closed else "queue_full")
                return False
            self._count(self._queued, record, 1)
            self._records.append(record)
            self._num_rows += rows
            if self._num_rows >= wake_rows:
                self._changed.notify()
        return True

    def offer_own(self, record: EventRecord) -> None:
        """Count a row that the consumer makes itself (a loss event): it bypasses the bound."""
        with self._changed:
            self._count(self._offered, record, 1)
            self._count(self._queued, record, 1)
            self._num_rows += 1

    def wait(self, least_rows: float, timeout_s: float) -> None:
        """Sleep until `least_rows` rows wait, until the close, or for `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._num_rows >= least_rows, timeout=timeout_s
            )

    def take(self, max_rows: int) -> list[Record]:
        """Return the oldest records, up to `max_rows` rows but at least one record.

        They count as queued until `committed` or `dropped` hears of them.
        """
        batch: list[Record] = []
        rows = 0
        with self._changed:
            while self._records:
                rows += num_rows(self._records[0])
                if batch and rows > max_rows:
                    break
                batch.append(self._records.popleft())
        return batch

    def committed(self, records: Iterable[Record]) -> None:
        """Count taken records as written."""
        with self._changed:
            for record in records:
                self._count(self._committed, record, 1)
                self._settle(record)

    def dropped(self, records: Iterable[Record], reason: str) -> None:
        """Count taken records as lost for `reason`."""
        with self._changed:
            for record in records:
                self._settle(record)
                self._drop(record, reason)

    def take_losses(self) -> dict[str, Loss]:
        """Remove and return what was dropped since the last call, by reason."""
        with self._changed:
            losses, self._losses = self._losses, {}
        return losses

    def close(self) -> None:
        """Refuse new records from now on and wake the consumer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """Whether new records are refused."""
        return self._is_closed

    @property
    def num_rows(self) -> int:
        """Rows waiting or being written."""
        return self._num_rows

    @property
    def has_losses(self) -> bool:
        """Whether something was dropped that no loss event tells of yet."""
        return bool(self._losses)

    def stats(self) -> BacklogStats:
        """Return a consistent snapshot of every count."""
        with self._changed:
            kinds = {
                kind: KindCounts(
                    self._offered[kind],
                    self._committed[kind],
                    self._dropped[kind],
                    self._queued[kind],
                )
                for kind in KINDS
            }
            return BacklogStats(
                kinds, dict(self._dropped_by_reason), self._num_rows, self._max_rows
            )

    def _count(self, counts: dict[str, int], record: Record, sign: int) -> None:
        for kind, number in _rows_by_kind(record):
            counts[kind] += sign * number

    def _settle(self, record: Record) -> None:
        self._count(self._queued, record, -1)
        self._num_rows -= num_rows(record)

    def _drop(self, record: Record, reason: str) -> None:
        self._count(self._dropped, record, 1)
        rows = num_rows(record)
        self._dropped_by_reason[reason] = self._dropped_by_reason.get(reason, 0) + rows
        # After the close there is no event to come that could tell of it.
        if not self._is_closed:
            self._losses.setdefault(reason, Loss()).add(record)


def _rows_by_kind(record: Record) -> tuple[tuple[str, int], ...]:
    if isinstance(record, StepRecord):
        return (("step", 1), ("step_work", len(record.work)))
    return ((record.kind, 1),)
