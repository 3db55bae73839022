"""Which profile a server or a command means: a name in the database, a file, or the active ones.

Owns where they are found. Must not write.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from controller.tuning.profile import (
    BudgetProfile,
    ProfileError,
    is_file_name,
    read_profile,
)
from store.errors import MissingDatabaseError, StoreError
from store.profiles import ProfileRecord, ProfileStore


class MissingProfileError(ProfileError):
    """There is no profile of that name."""


@dataclass(frozen=True, slots=True)
class ActiveProfiles:
    """Profiles of a model that are active, one per device, and what is wrong with others."""

    profiles: tuple[BudgetProfile, ...]
    problems: tuple[str, ...]


def active_profiles(url: str, model: str) -> ActiveProfiles:
    """Return the active profiles of a model, the newest first.

    Nothing raises: nobody asked for them. Without an SQLite file there is nothing to tell, since a
    first start makes it.
    """
    try:
        with ProfileStore.open_reader(url) as store:
            records = store.active(model)
    except MissingDatabaseError:
        return ActiveProfiles((), ())
    except StoreError as error:
        return ActiveProfiles((), (str(error),))
    profiles: list[BudgetProfile] = []
    problems: list[str] = []
    for record in records:
        try:
            profiles.append(_of_record(record))
        except ProfileError as error:
            problems.append(str(error))
    return ActiveProfiles(tuple(profiles), tuple(problems))


def named_profile(asked: str, url: str) -> BudgetProfile:
    """Return the profile of that name in the database, or of that file; ProfileError."""
    if is_file_name(asked):
        return read_profile(Path(asked))
    try:
        with ProfileStore.open_reader(url) as store:
            record = store.profile(asked)
    except StoreError as error:
        raise ProfileError(f"{asked}: {error}") from error
    if record is None:
        raise MissingProfileError(
            f"no profile {asked!r} in the database: see `paceline profile list`, or name a file as"
            f" ./{asked}.yaml"
        )
    return _of_record(record)


def _of_record(record: ProfileRecord) -> BudgetProfile:
    try:
        return BudgetProfile.from_json(record.document)
    except ProfileError as error:
        raise ProfileError(f"profile {record.name!r} in the database: {error}") from error
