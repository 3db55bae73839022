"""`TelemetryWriter`: takes what the step loop offers and writes it from one background thread.

Owns the thread, the retries and the loss events. Must not block or raise in `offer`, whatever the
database does.

A batch is one transaction, at most `max_batch_rows` rows or what came in `flush_interval_s`
seconds, in the order offered: a kill at any moment leaves a prefix. A batch that the database
refuses is kept and tried again with growing pauses while the queue behind it fills; what no longer
fits is dropped, counted, and told by a loss event once the database is back.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from engine.clock import Clock
from store.backlog import Backlog, BacklogStats, KindCounts
from store.batch import begin_run, end_run, insert_records, is_retryable
from store.database import Database, brief, sqlite_warning
from store.records import EventKind, EventRecord, Record, RunRecord, num_rows
from store.schema import require_current

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriterConfig:
    """Bounds of the writer, checked once; ValueError names the field.

    `max_queue_rows` bounds memory (a step counts one row plus one per share). Pauses between tries
    double from `min_retry_s` to `max_retry_s`.
    """

    max_queue_rows: int = 65_536
    max_batch_rows: int = 512
    flush_interval_s: float = 0.25
    min_retry_s: float = 0.25
    max_retry_s: float = 5.0

    def __post_init__(self) -> None:
        """Check the bounds."""
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if self.min_retry_s > self.max_retry_s:
            raise ValueError("min_retry_s must not exceed max_retry_s")


@dataclass(frozen=True, slots=True)
class WriterStats:
    """A consistent snapshot: for every kind, offered = committed + dropped + queued.

    `last_error` is the database's latest complaint, None while it is well.
    """

    kinds: Mapping[str, KindCounts]
    num_dropped_by_reason: Mapping[str, int]
    num_rows_queued: int
    max_queue_rows: int
    num_failed_tries: int
    last_error: str | None


class TelemetryWriter:
    """The one writer of a run. `start()` begins the thread; tests drive `pump()` instead."""

    def __init__(
        self,
        database: Database,
        run: RunRecord,
        clock: Clock,
        config: WriterConfig | None = None,
    ) -> None:
        self._database = database
        self._run = run
        self._clock = clock
        self._config = config or WriterConfig()
        self._backlog = Backlog(self._config.max_queue_rows)
        self._batch: list[tuple[Record, int]] = []
        self._is_run_begun = False
        self._is_batch_repeat = False
        self._is_done = False
        self._is_complete: bool | None = None
        self._end_reason = "closed"
        self._next_event_no = 0
        self._num_tries_failed_in_a_row = 0
        self._num_failed_tries = 0
        self._last_error: str | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def open(
        cls, url: str, run: RunRecord, clock: Clock, config: WriterConfig | None = None
    ) -> TelemetryWriter:
        """Open the (migrated) database at `url` for this run; StoreError if it cannot be used.

        Logs a warning if the SQLite library is known to be unsafe.
        """
        database = Database.open_writer(url)
        if database.is_sqlite and (warning := sqlite_warning()):
            logger.warning(warning)
        try:
            require_current(database)
        except BaseException:
            database.close()
            raise
        return cls(database, run, clock, config)

    @property
    def run_id(self) -> str:
        """The run that this writer writes."""
        return self._run.run_id

    def start(self) -> None:
        """Start the thread; it writes the run's row first and ends earlier runs that died."""
        if self._thread is not None:
            raise RuntimeError("the telemetry writer was started already")
        self._thread = threading.Thread(target=self._loop, name="telemetry-writer", daemon=True)
        self._thread.start()

    def offer(self, record: Record) -> bool:
        """Queue a record; False if it was dropped (and counted). Never blocks, never raises."""
        return self._backlog.offer(record, wake_rows=self._config.max_batch_rows)

    def stats(self) -> WriterStats:
        """Return a snapshot of the counts; call from any thread."""
        counts: BacklogStats = self._backlog.stats()
        return WriterStats(
            counts.kinds,
            counts.num_dropped_by_reason,
            counts.num_rows_queued,
            counts.max_rows,
            self._num_failed_tries,
            self._last_error,
        )

    def close(self, timeout_s: float = 10.0, *, reason: str = "closed") -> bool:
        """Refuse new records, write what is queued, end the run with `reason` (at most 32
        characters) and close the database.

        Returns whether everything was written within `timeout_s` seconds; what was not is counted
        as dropped. Harmless when called twice.
        """
        # Before the close, after which the thread may write the run's end at any moment.
        self._end_reason = reason
        self._backlog.close()
        if self._thread is None:
            while not self._is_done and self.pump():
                pass
        else:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                # Stuck inside the driver: a daemon thread must not be raced for its connection.
                logger.warning("telemetry: the database did not answer in %.1f s", timeout_s)
                return False
        return self._finish()

    def pump(self) -> bool:
        """Write one batch now; False if the database refused it (it is kept) or all is done.

        For the thread, and for tests that have none. Never raises.
        """
        if self._is_done:
            return False
        try:
            if not self._is_run_begun:
                self._begin_run()
            self._write()
        except Exception as error:
            if is_retryable(error):
                return self._refused(error)
            logger.warning("telemetry: a batch was refused for its data: %s", brief(error))
            # One bad row must not cost its neighbours.
            return self._write_one_by_one()
        self._accepted()
        return True

    @property
    def delay_s(self) -> float:
        """Seconds until the next `pump()`: the flush interval, or the pause after a refusal."""
        failed = self._num_tries_failed_in_a_row
        if failed == 0:
            return self._config.flush_interval_s
        # The exponent is capped so that a long outage cannot overflow it.
        pause: float = self._config.min_retry_s * 2.0 ** min(failed - 1, 16)
        return min(self._config.max_retry_s, pause)

    def _loop(self) -> None:
        while True:
            is_closed = self._backlog.is_closed
            if not self.pump() and is_closed:
                # Done, or refused after the close: a dead database must not delay the shutdown.
                return
            # During an outage a full queue is no reason to hurry.
            least = math.inf if self._num_tries_failed_in_a_row else self._config.max_batch_rows
            self._backlog.wait(least, self.delay_s)

    def _begin_run(self) -> None:
        try:
            with self._database.begin() as connection:
                events, self._next_event_no = begin_run(connection, self._run)
        except Exception as error:
            if is_retryable(error):
                raise
            # Steps without their run's row are worth more than no steps.
            logger.warning("telemetry: the run's row was refused: %s", brief(error))
            events = []
        self._is_run_begun = True
        for event in events:
            self._backlog.offer_own(event)
        self._backlog.committed(events)

    def _write(self) -> None:
        """Write one batch with the losses known now, and the run's end if nothing can follow."""
        self._fill_batch()
        is_last = self._backlog.is_closed and self._is_drained_after_batch()
        if not self._batch and not is_last:
            return
        with self._database.begin() as connection:
            insert_records(connection, self._batch, is_repeat=self._is_batch_repeat)
            if is_last:
                end_run(connection, self.run_id, self._clock.epoch_ms(), self._end_reason)
        self._is_done = is_last

    def _fill_batch(self) -> None:
        if self._batch:
            return
        self._is_batch_repeat = False
        for record in self._backlog.take(self._config.max_batch_rows):
            self._batch.append((record, self._number(record)))
        for reason, loss in self._backlog.take_losses().items():
            event = EventRecord(
                self.run_id,
                self._clock.epoch_ms(),
                EventKind.TELEMETRY_LOSS,
                reason,
                numbers=loss.numbers(),
            )
            self._backlog.offer_own(event)
            self._batch.append((event, self._number(event)))

    def _number(self, record: Record) -> int:
        if not isinstance(record, EventRecord):
            return 0
        number = self._next_event_no
        self._next_event_no += 1
        return number

    def _is_drained_after_batch(self) -> bool:
        rows = sum(num_rows(record) for record, _ in self._batch)
        return self._backlog.num_rows == rows and not self._backlog.has_losses

    def _write_one_by_one(self) -> bool:
        """Write the batch record by record; drop those that the database refuses for their data."""
        while self._batch:
            record, _number = self._batch[0]
            try:
                with self._database.begin() as connection:
                    insert_records(connection, self._batch[:1], is_repeat=self._is_batch_repeat)
            except Exception as error:
                if is_retryable(error):
                    return self._refused(error)
                logger.warning("telemetry: dropped a %s row: %s", record.kind, brief(error))
                self._backlog.dropped([record], "invalid")
            else:
                self._backlog.committed([record])
            del self._batch[0]
        self._accepted()
        return True

    def _accepted(self) -> None:
        self._backlog.committed(record for record, _ in self._batch)
        self._batch = []
        if self._num_tries_failed_in_a_row:
            logger.warning("telemetry: the database is back")
        self._num_tries_failed_in_a_row = 0
        self._last_error = None

    def _refused(self, error: Exception) -> bool:
        self._is_batch_repeat = True
        self._last_error = brief(error)
        if self._num_tries_failed_in_a_row == 0:
            logger.warning("telemetry: the database refuses rows: %s", self._last_error)
        # The next try starts on a fresh connection: this one may be what is broken.
        self._database.engine.dispose()
        self._num_tries_failed_in_a_row += 1
        self._num_failed_tries += 1
        return False

    def _finish(self) -> bool:
        """Count what could not be written, close the database; whether nothing was left."""
        if self._is_complete is not None:
            return self._is_complete
        left = [record for record, _ in self._batch]
        self._batch = []
        while records := self._backlog.take(self._config.max_batch_rows):
            left.extend(records)
        self._backlog.dropped(left, "closed")
        self._is_complete = self._is_done and not left
        self._is_done = True
        self._database.close()
        return self._is_complete
