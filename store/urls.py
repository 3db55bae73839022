"""Database URLs: which ones are understood, and how they may be shown.

Owns parsing and masking. Must not open a connection.
"""

from __future__ import annotations

import re
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from store.errors import DatabaseUrlError

EXAMPLES = "sqlite:///paceline.db or postgresql+psycopg://user:password@host/name"
# Greedy on purpose: a password may hold spaces, slashes and at-signs; masking too much is harmless.
_PASSWORD = re.compile(r"(?P<head>[\w+]+://[^/\s:@]*:).*@")
# libpq takes secrets, and paths to them, as parameters too.
_SECRET_PARAMETER = re.compile(
    r"(?P<head>[?&;](?:password|passfile|sslpassword|sslkey)=)[^&]*", re.IGNORECASE
)
_POSTGRESQL_NAMES = frozenset({"postgres", "postgresql", "postgresql+psycopg"})


def mask_url(text: str) -> str:
    """Return `text` with the secrets of every URL in it masked, before the host and in the query;
    malformed URLs are fine.
    """
    return _SECRET_PARAMETER.sub(r"\g<head>***", _PASSWORD.sub(r"\g<head>***@", text))


def parse_url(text: str) -> URL:
    """Return the URL, its driver spelled out and an SQLite path made absolute.

    Raises DatabaseUrlError for what is malformed, for other databases and drivers, and for SQLite
    in memory (its tables would belong to one connection, and readers would see none).
    """
    try:
        url = make_url(text.strip())
    except (ArgumentError, ValueError) as error:
        raise DatabaseUrlError(
            f"not a database URL: {mask_url(text)!r} (expected {EXAMPLES})"
        ) from error
    if url.drivername in _POSTGRESQL_NAMES:
        if not url.database:
            raise DatabaseUrlError(f"no database name in {mask_url(text)!r} (expected {EXAMPLES})")
        return url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise DatabaseUrlError(
            f"{url.drivername!r} is not supported in {mask_url(text)!r} (expected {EXAMPLES})"
        )
    if url.host:
        raise DatabaseUrlError(
            f"an SQLite URL needs three slashes before the path: {mask_url(text)!r}"
            " (sqlite:///relative.db, sqlite:////absolute.db)"
        )
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise DatabaseUrlError(
            f"an SQLite database must be a file that others can read, got {mask_url(text)!r}"
        )
    if url.query:
        raise DatabaseUrlError(f"an SQLite URL takes no parameters here: {mask_url(text)!r}")
    path = Path(url.database).expanduser().absolute()
    return url.set(drivername="sqlite", database=str(path))


def is_sqlite(url: URL) -> bool:
    """Whether the (parsed) URL names an SQLite file."""
    return url.get_backend_name() == "sqlite"


def sqlite_path(url: URL) -> Path:
    """Return the file of a parsed SQLite URL."""
    if not url.database or not is_sqlite(url):
        raise DatabaseUrlError("not an SQLite URL")
    return Path(url.database)


def shown_url(url: URL) -> str:
    """Return the URL for people: its secrets masked."""
    return mask_url(url.render_as_string(hide_password=True))
