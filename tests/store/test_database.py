"""Connections: URLs, masking, the lock, pragmas, and read-only readers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from store import schema
from store.database import Database, sqlite_warning
from store.errors import DatabaseBusyError, DatabaseUnavailableError, DatabaseUrlError
from store.records import RunRecord
from store.rows import run_row
from store.urls import mask_url, parse_url, shown_url


@pytest.mark.parametrize(
    ("version", "is_warned"),
    [
        ((3, 6, 23), False),
        ((3, 7, 0), True),
        ((3, 40, 1), True),
        ((3, 44, 5), True),
        ((3, 44, 6), False),
        ((3, 45, 0), True),
        ((3, 50, 6), True),
        ((3, 50, 7), False),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 52, 0), False),
    ],
)
def test_library_versions_without_the_fix(version: tuple[int, int, int], is_warned: bool) -> None:
    warning = sqlite_warning(version)
    assert (warning is not None) is is_warned
    if warning:
        assert ".".join(map(str, version)) in warning


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "paceline.db",
        "sqlite://paceline.db",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:x?mode=ro&uri=true",
        "sqlite+aiosqlite:///x.db",
        "mysql://u:topsecret@h/d",
        "postgresql://u:topsecret@h",
        "postgresql+psycopg2://u:topsecret@h/d",
        "postgresql://u:topsecret@h:port/d",
        "postgresql://u:a/topsecret @b@h:port/d",
        "postgresql+psycopg2://h/d?user=svc&password=topsecret",
        "sqlite:///x.db?password=topsecret",
    ],
)
def test_bad_urls_are_named_without_their_password(bad: str) -> None:
    with pytest.raises(DatabaseUrlError) as caught:
        parse_url(bad)
    message = str(caught.value)
    assert "topsecret" not in message
    assert "\n" not in message


def test_urls_are_made_absolute_and_shown_without_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_url(parse_url("sqlite:///x.db")) == f"sqlite:///{tmp_path}/x.db"
    shown = shown_url(parse_url("postgres://me:topsecret@host/name"))
    assert shown == "postgresql+psycopg://me:***@host/name"
    assert mask_url("at postgresql://me:a@b@host/x and") == "at postgresql://me:***@host/x and"
    assert mask_url("sqlite:///x.db") == "sqlite:///x.db"


@pytest.mark.parametrize("name", ["password", "passfile", "sslpassword", "sslkey"])
def test_a_secret_among_the_parameters_is_masked_everywhere(name: str) -> None:
    url = f"postgresql+psycopg://db/p?user=svc&{name}=a%26b c@topsecret&sslmode=require"
    for shown in (mask_url(url), shown_url(parse_url(url))):
        assert "topsecret" not in shown
        assert f"{name}=***" in shown
        assert "user=svc" in shown
        assert "sslmode=require" in shown
    run = RunRecord("r", 0, "m", "cpu", "sdpa", "slo", "0", settings={"db": url, "all": [url]})
    row = run_row(run)
    assert "topsecret" not in str(row)
    assert "user=svc" in str(row)


def test_one_process_writes_and_the_error_names_it(sqlite_url: str) -> None:
    first = Database.open_writer(sqlite_url)
    with pytest.raises(DatabaseBusyError, match=rf"pid {os.getpid()}\) .*telemetry\.db\.lock"):
        Database.open_writer(sqlite_url)
    first.close()
    Database.open_writer(sqlite_url).close()


def test_writer_pragmas(sqlite_url: str) -> None:
    database = Database.open_writer(sqlite_url)
    with database.begin() as connection:
        values = {
            name: connection.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "auto_vacuum", "busy_timeout")
        }
    database.close()
    assert values == {
        "journal_mode": "wal",
        "synchronous": 1,
        "auto_vacuum": 2,
        "busy_timeout": 5000,
    }


def test_readers_cannot_write(url: str) -> None:
    database = Database.open_reader(url)
    with pytest.raises(SQLAlchemyError, match=r"read.?only"), database.begin() as connection:
        connection.execute(text("DELETE FROM run"))
    with pytest.raises(DatabaseUnavailableError, match=r"read.?only"), database.read() as reader:
        reader.execute(text("DELETE FROM run"))
    database.close()


def test_a_transaction_is_undone_by_an_exception(url: str) -> None:
    database = Database.open_writer(url)
    insert = text(
        "INSERT INTO event (run_id, event_no, at, kind, reason) VALUES ('r', 1, 1, 'k', 'r')"
    )
    with pytest.raises(RuntimeError), database.begin() as connection:  # noqa: PT012
        connection.execute(insert)
        raise RuntimeError
    with database.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM event")).scalar() == 0
    database.close()


def test_paths_with_odd_characters(tmp_path: Path) -> None:
    folder = tmp_path / "a b#c%20"
    folder.mkdir()
    url = f"sqlite:///{str(folder).replace('%', '%25')}/telemetry.db"
    assert schema.migrate(url).is_current
    assert schema.state(url).is_current
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.name]
    assert all(entry.name.startswith("telemetry.db") for entry in folder.iterdir())


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnavailableError, match="no directory"):
        Database.open_writer(f"sqlite:///{tmp_path}/none/x.db", may_create=True)


def test_unreachable_server_is_one_line_without_a_password() -> None:
    database = Database.open_reader("postgresql://me:topsecret@127.0.0.1:1/name")
    with pytest.raises(DatabaseUnavailableError) as caught, database.read():
        pass
    database.close()
    assert "topsecret" not in str(caught.value)
    assert "\n" not in str(caught.value)
