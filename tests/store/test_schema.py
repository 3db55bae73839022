"""Migrations: they make the metadata's tables, from anywhere; errors say what to type."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from store import schema
from store.database import Database
from store.errors import DatabaseBusyError, DatabaseUnavailableError, SchemaError
from store.queries import TelemetryReader
from store.tables import VERSION_TABLE, metadata


def test_migrated_tables_are_those_of_the_metadata(url: str) -> None:
    database = Database.open_reader(url)
    try:
        with database.read() as connection:
            options = {"version_table": VERSION_TABLE, "compare_type": True}
            context = MigrationContext.configure(connection, opts=options)
            assert compare_metadata(context, metadata) == []
            tables = set(inspect(connection).get_table_names())
    finally:
        database.close()
    assert tables == {*metadata.tables, VERSION_TABLE}


def test_comparison_sees_a_missing_column(url: str) -> None:
    # Guards the test above: a comparison that finds nothing must be able to find something.
    database = Database.open_writer(url)
    try:
        with database.begin() as connection:
            connection.execute(text("ALTER TABLE step ADD COLUMN surprise INTEGER"))
            context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
            assert compare_metadata(context, metadata) != []
    finally:
        database.close()


def test_there_is_one_head_and_revisions_are_numbered_in_a_line() -> None:
    scripts = ScriptDirectory(str(schema.migrations_folder()))
    assert len(scripts.get_heads()) == 1
    revisions = [script.revision for script in scripts.walk_revisions()][::-1]
    assert revisions == [f"{number:04d}" for number in range(1, len(revisions) + 1)]


def test_migrations_are_found_beside_an_installed_package(tmp_path: Path) -> None:
    # As in a wheel: the folder is inside the package, and nothing of the checkout is near.
    root = schema.migrations_folder().parent
    shutil.copytree(root / "store", tmp_path / "site" / "store")
    shutil.copytree(root / "alembic", tmp_path / "site" / "store" / "migrations")
    (tmp_path / "site" / "engine").mkdir()
    for name in ("__init__.py", "step.py", "clock.py"):
        shutil.copy(root / "engine" / name, tmp_path / "site" / "engine" / name)
    code = (
        "from store import schema; print(schema.migrations_folder());"
        f" print(schema.migrate('sqlite:///{tmp_path}/x.db').is_current)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path / "site" / "store" / "migrations"), "True"]


def test_alembics_own_command_works_in_the_checkout(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    subprocess.run(
        [sys.executable, "-m", "alembic", "-x", f"db={url}", "upgrade", "head"],
        cwd=schema.migrations_folder().parent,
        capture_output=True,
        check=True,
    )
    assert schema.state(url).is_current


def test_upgrade_twice_and_downgrade_to_nothing(empty_url: str) -> None:
    first = schema.migrate(empty_url)
    assert first.is_current
    assert schema.migrate(empty_url) == first
    assert schema.downgrade(empty_url, "base").current is None
    database = Database.open_reader(empty_url)
    try:
        with database.read() as connection:
            assert set(inspect(connection).get_table_names()) <= {VERSION_TABLE}
    finally:
        database.close()


def test_rows_from_before_the_second_revision_stay_and_know_nothing_of_it(empty_url: str) -> None:
    schema.migrate(empty_url)
    assert schema.downgrade(empty_url, "0001").current == "0001"
    old = {
        column.name: "r" if column.name == "run_id" else 1
        for column in metadata.tables["step"].columns
        if not column.nullable
    }
    names = ", ".join(old)
    database = Database.open_writer(empty_url)
    try:
        with database.begin() as connection:
            assert "num_retries" not in {
                column["name"] for column in inspect(connection).get_columns("step")
            }
            values = ", ".join(f":{name}" for name in old)
            connection.execute(text(f"INSERT INTO step ({names}) VALUES ({values})"), old)
    finally:
        database.close()
    assert schema.migrate(empty_url).is_current
    reader = TelemetryReader.open(empty_url)
    try:
        (row,) = reader.steps().rows
    finally:
        reader.close()
    assert {name: row[name] for name in old} == old
    younger = ("num_retries", "num_swapped_blocks", "num_blocks_cached", "num_failed_swaps")
    assert [row[name] for name in younger] == [None] * 4


def test_migrating_leaves_the_host_programs_logging_and_directory_alone(
    empty_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "else where%"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    root = logging.getLogger()
    before = (list(root.handlers), root.level, logging.getLogger("paceline").disabled)
    assert schema.migrate(empty_url).is_current
    assert (list(root.handlers), root.level, logging.getLogger("paceline").disabled) == before
    assert Path.cwd() == elsewhere
    assert list(elsewhere.iterdir()) == []


def test_reader_of_an_unmigrated_database_is_told_what_to_type(empty_url: str) -> None:
    schema.migrate(empty_url)
    schema.downgrade(empty_url, "base")
    with pytest.raises(SchemaError, match="run `paceline db upgrade"):
        TelemetryReader.open(empty_url)


@pytest.mark.parametrize("revision", ["9999"])
def test_reader_of_a_newer_database_is_told_so(url: str, revision: str) -> None:
    database = Database.open_writer(url)
    with database.begin() as connection:
        connection.execute(
            text(f"UPDATE {VERSION_TABLE} SET version_num = :revision"),
            {"revision": revision},
        )
    database.close()
    with pytest.raises(SchemaError, match="newer Paceline"):
        TelemetryReader.open(url)
    with pytest.raises(SchemaError):
        schema.migrate(url)


def test_reader_without_a_file_creates_none(tmp_path: Path) -> None:
    path = tmp_path / "missing.db"
    with pytest.raises(DatabaseUnavailableError, match=r"no database at .*missing\.db"):
        TelemetryReader.open(f"sqlite:///{path}")
    assert list(tmp_path.iterdir()) == []


def test_file_that_is_no_database_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("this is not a database, it only has the name of one\n" * 40)
    for use in (TelemetryReader.open, schema.migrate):
        with pytest.raises(DatabaseUnavailableError, match="not a database") as caught:
            use(f"sqlite:///{path}")
        assert "\n" not in str(caught.value)


def test_migrating_under_a_running_writer_names_the_process(sqlite_url: str) -> None:
    database = Database.open_writer(sqlite_url)
    try:
        with pytest.raises(DatabaseBusyError, match=r"pid \d+.*telemetry\.db\.lock"):
            schema.migrate(sqlite_url)
    finally:
        database.close()
    assert schema.migrate(sqlite_url).is_current
