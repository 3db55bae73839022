"""`ProfileStore`: tuned profiles and the trials behind them, kept and found again by name.

Owns the SQL of both tables and which profile of a model on a device is active. Must not know what a
setting means: a profile's document arrives as JSON, already checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, delete, insert, inspect, select, update
from sqlalchemy.exc import SQLAlchemyError

from store import tables
from store.database import Database, brief
from store.errors import DatabaseUnavailableError
from store.schema import migrate

MAX_NAME_LENGTH = 128
_PROFILE, _TRIAL = tables.profile.c, tables.tune_trial.c
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class ProfileRecord:
    """One profile. `created_at` is epoch milliseconds UTC; `document` is its whole JSON form.

    `model` and `device` say whom it was tuned for (None = nobody in particular). `is_active` says
    that servers of that model on that device take it unless they are told otherwise.
    """

    name: str
    created_at: int
    model: str | None
    device: str | None
    verdict: str
    document: Mapping[str, Any]
    study: str | None = None
    is_active: bool = False


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One trial of a study: the settings that were tried, and what they were worth.

    `state` is `complete`, `pruned` (given up early) or `failed`, with its `reason`; `score` is None
    for a failed one. `at` is epoch milliseconds UTC.
    """

    study: str
    trial_no: int
    at: int
    state: str
    score: float | None
    settings: Mapping[str, Any]
    measures: Mapping[str, Any]
    reason: str | None = None


class ProfileStore:
    """Profiles of one database, open until `close()` or the end of a `with` block."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open_reader(cls, url: str) -> ProfileStore:
        """Open read-only; StoreError if there is no database. Older tables hold no profile."""
        return cls(Database.open_reader(url))

    @classmethod
    def open_writer(cls, url: str) -> ProfileStore:
        """Create or upgrade the tables and open for writing.

        StoreError says what is wrong; DatabaseBusyError names the process that writes an SQLite
        file, which may be a server.
        """
        migrate(url)
        return cls(Database.open_writer(url))

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def profiles(self) -> tuple[ProfileRecord, ...]:
        """Return all profiles, the newest first."""
        query = select(tables.profile).order_by(_PROFILE.created_at.desc(), _PROFILE.name)
        return self._read(query)

    def profile(self, name: str) -> ProfileRecord | None:
        """Return the profile of that name, or None."""
        found = self._read(select(tables.profile).where(_PROFILE.name == name))
        return found[0] if found else None

    def active(self, model: str) -> tuple[ProfileRecord, ...]:
        """Return the active profiles of a model, one per device at most, the newest first."""
        query = select(tables.profile).where(_PROFILE.model == model, _PROFILE.is_active)
        return self._read(query.order_by(_PROFILE.created_at.desc(), _PROFILE.name))

    def trials(self, study: str) -> tuple[TrialRecord, ...]:
        """Return a study's trials in their order."""
        query = select(tables.tune_trial).where(_TRIAL.study == study).order_by(_TRIAL.trial_no)
        with self._database.read() as connection:
            if not _has_tables(connection):
                return ()
            rows = connection.execute(query).mappings().all()
        return tuple(TrialRecord(**row) for row in rows)

    def save(self, profile: ProfileRecord, trials: Sequence[TrialRecord] = ()) -> None:
        """Write a profile over one of the same name, and the trials over those of their study.

        ValueError for a name that is empty or too long, or a document with what is no JSON number;
        StoreError if the database cannot be written.
        """
        if not 1 <= len(profile.name) <= MAX_NAME_LENGTH:
            raise ValueError(f"name of a profile must have 1 to {MAX_NAME_LENGTH} characters")
        for each in (
            profile.document,
            *(t.settings for t in trials),
            *(t.measures for t in trials),
        ):
            json.dumps(dict(each), allow_nan=False)

        def write(connection: Connection) -> None:
            if profile.is_active:
                _deactivate(connection, profile.model, profile.device)
            connection.execute(delete(tables.profile).where(_PROFILE.name == profile.name))
            connection.execute(insert(tables.profile), [asdict(profile)])
            for study in {trial.study for trial in trials}:
                connection.execute(delete(tables.tune_trial).where(_TRIAL.study == study))
            if trials:
                connection.execute(insert(tables.tune_trial), [asdict(trial) for trial in trials])

        self._write(write)

    def activate(self, name: str) -> bool:
        """Make a profile the active one of its model on its device; False if there is none of that
        name.
        """

        def write(connection: Connection) -> bool:
            found = connection.execute(
                select(_PROFILE.model, _PROFILE.device).where(_PROFILE.name == name)
            ).one_or_none()
            if found is None:
                return False
            _deactivate(connection, *found)
            connection.execute(
                update(tables.profile).where(_PROFILE.name == name).values(is_active=True)
            )
            return True

        return self._write(write)

    def deactivate(self, name: str) -> bool:
        """Let a profile be active no more; False if it was not."""

        def write(connection: Connection) -> bool:
            done = connection.execute(
                update(tables.profile)
                .where(_PROFILE.name == name, _PROFILE.is_active)
                .values(is_active=False)
            )
            return bool(done.rowcount)

        return self._write(write)

    def _read(self, query: Any) -> tuple[ProfileRecord, ...]:
        with self._database.read() as connection:
            if not _has_tables(connection):
                return ()
            rows = connection.execute(query).mappings().all()
        return tuple(ProfileRecord(**row) for row in rows)

    def _write(self, work: Callable[[Connection], _Answer]) -> _Answer:
        try:
            with self._database.begin() as connection:
                return work(connection)
        except SQLAlchemyError as error:
            raise DatabaseUnavailableError(
                f"cannot write {self._database.shown}: {brief(error)}"
            ) from error


def _has_tables(connection: Connection) -> bool:
    """Whether the database is young enough to hold profiles; a server upgrades it at its start."""
    return inspect(connection).has_table(tables.tune_trial.name)


def _deactivate(connection: Connection, model: str | None, device: str | None) -> None:
    connection.execute(
        update(tables.profile)
        .where(_PROFILE.model == model, _PROFILE.device == device, _PROFILE.is_active)
        .values(is_active=False)
    )
