"""Which profile a server or a command means: a name in the database, a file, or the active one.

Owns that order. Must not write.
"""

from __future__ import annotations

from pathlib import Path

from controller.tuning.profile import (
    NO_PROFILE,
    BudgetProfile,
    ProfileError,
    is_file_name,
    read_profile,
)
from store.errors import StoreError
from store.profiles import ProfileRecord, ProfileStore


class MissingProfileError(ProfileError):
    """There is no profile of that name."""


def find_profile(asked: str | None, url: str, model: str) -> BudgetProfile | None:
    """Return the profile that a server of `model` over the database `url` starts with.

    `asked` is a name in the database, a YAML file, `none`, or None: then it is the model's active
    one, if there is a database that has one. ProfileError says what is wrong with what was found,
    or that nothing was.
    """
    if asked == NO_PROFILE:
        return None
    if asked is not None:
        return named_profile(asked, url)
    try:
        with ProfileStore.open_reader(url) as store:
            record = store.active(model)
    except StoreError:
        # Nobody asked: whatever is wrong with the database is told by who opens it for writing.
        return None
    try:
        return None if record is None else _of_record(record)
    except ProfileError as error:
        raise ProfileError(f"{error}; serve with --profile {NO_PROFILE}") from error


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
