"""What can go wrong at the database's door, in words for the person at the terminal.

Owns the exceptions that cross the border of `store`. Must not import SQLAlchemy: doors catch these
without knowing SQL.
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of every error that `store` raises on purpose: one line, no password in it."""


class DatabaseUrlError(StoreError, ValueError):
    """The database URL is malformed, or names a database that is not supported."""


class DatabaseBusyError(StoreError):
    """Another process already writes this database; the message names the file and the process."""


class DatabaseUnavailableError(StoreError):
    """The database cannot be reached or read right now."""


class MissingDatabaseError(DatabaseUnavailableError):
    """There is no such SQLite file: nobody has written anything yet."""


class DamagedDataError(StoreError):
    """A stored cell does not hold what was written there: JSON that ends too early, say."""


class SchemaError(StoreError):
    """The tables are missing, too old or too new; the message names the command to type."""


class CursorError(StoreError, ValueError):
    """A paging cursor was not made by this version for this listing."""
