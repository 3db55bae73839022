"""Migrations: bring a database to this version's tables, and say how it stands.

Owns the way to Alembic. Must not touch the host program's logging or working directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from store.database import Database, brief
from store.errors import DatabaseUnavailableError, SchemaError
from store.tables import VERSION_TABLE

UPGRADE_COMMAND = "paceline db upgrade"
# Any constant will do: it keeps two replicas that start together from migrating at once.
_ADVISORY_LOCK = 0x7061_6365


@dataclass(frozen=True, slots=True)
class SchemaState:
    """Where a database stands: `current` is None without tables; `database` is the masked URL."""

    database: str
    current: str | None
    head: str

    @property
    def is_current(self) -> bool:
        """Whether this version of Paceline can use the database as it is."""
        return self.current == self.head


def migrations_folder() -> Path:
    """Return the migrations' folder: `store/migrations` in a wheel, `alembic` in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "migrations", package.parent / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise SchemaError(
        f"the migrations are missing from this installation (looked beside {package})"
    )


def head_revision() -> str:
    """Return the revision that this version's tables stand at."""
    head = ScriptDirectory(str(migrations_folder())).get_current_head()
    if head is None:
        raise SchemaError("no migration found in this installation")
    return head


def migrate(url: str) -> SchemaState:
    """Create or upgrade the tables at `url` in one transaction and return the new state.

    An SQLite file is created if missing. Raises DatabaseUrlError, DatabaseBusyError,
    DatabaseUnavailableError, or SchemaError if a newer Paceline made the database.
    """
    return _alembic(url, "head", is_upgrade=True)


def downgrade(url: str, revision: str) -> SchemaState:
    """Undo revisions down to `revision` (`base` drops every table); errors as for `migrate`."""
    return _alembic(url, revision, is_upgrade=False)


def state(url: str) -> SchemaState:
    """Return where the database at `url` stands, reading only."""
    database = Database.open_reader(url)
    try:
        return state_of(database)
    finally:
        database.close()


def state_of(database: Database) -> SchemaState:
    """Return where an open database stands."""
    with database.read() as connection:
        current = _current(connection)
    return SchemaState(database.shown, current, head_revision())


def require_current(database: Database) -> None:
    """Raise SchemaError, naming the command to type, unless the tables are up to date."""
    found = state_of(database)
    if found.is_current:
        return
    if found.current is None:
        problem = f"no Paceline tables in {found.database}"
    elif _is_known(found.current):
        problem = (
            f"{found.database} is at revision {found.current}, this version needs {found.head}"
        )
    else:
        raise SchemaError(
            f"{found.database} is at revision {found.current}, made by a newer Paceline"
            f" (this version knows up to {found.head}): use that version"
        )
    raise SchemaError(f"{problem}: run `{UPGRADE_COMMAND} --db {found.database}`")


def _is_known(revision: str) -> bool:
    scripts = ScriptDirectory(str(migrations_folder()))
    return any(script.revision == revision for script in scripts.walk_revisions())


def _current(connection: Connection) -> str | None:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return context.get_current_revision()


def _alembic(url: str, revision: str, *, is_upgrade: bool) -> SchemaState:
    database = Database.open_writer(url, may_create=is_upgrade)
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    try:
        with database.begin() as connection:
            if not database.is_sqlite:
                connection.execute(
                    text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK}
                )
            config.attributes["connection"] = connection
            (command.upgrade if is_upgrade else command.downgrade)(config, revision)
            current = _current(connection)
        return SchemaState(database.shown, current, head_revision())
    except CommandError as error:
        raise SchemaError(f"cannot migrate {database.shown}: {error}") from error
    except SQLAlchemyError as error:
        raise DatabaseUnavailableError(
            f"cannot migrate {database.shown}: {brief(error)}"
        ) from error
    finally:
        database.close()
