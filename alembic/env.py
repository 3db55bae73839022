"""How Alembic reaches the telemetry database.

Owns the wiring only: `store.schema` hands in a connection; from the `alembic` command line the URL
comes from `-x db=URL` or the environment variable PACELINE_DB. Must not configure logging.
"""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection

from store.database import Database
from store.tables import VERSION_TABLE, metadata


def run(connection: Connection) -> None:
    """Run the revisions inside the caller's transaction."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table=VERSION_TABLE,
        # SQLite cannot alter most of a table in place.
        render_as_batch=True,
        # `store.database` opens real transactions on SQLite, so a failed revision leaves nothing
        # behind.
        transactional_ddl=True,
        compare_type=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def main() -> None:
    """Use the connection handed in, or open one from the command line's URL."""
    if context.is_offline_mode():
        raise SystemExit("offline SQL is not supported: give -x db=URL")
    connection = context.config.attributes.get("connection")
    if connection is not None:
        run(connection)
        return
    url = context.get_x_argument(as_dictionary=True).get("db") or os.environ.get("PACELINE_DB")
    if not url:
        raise SystemExit("no database: give -x db=URL or set PACELINE_DB")
    database = Database.open_writer(url, may_create=True)
    try:
        with database.begin() as opened:
            run(opened)
    finally:
        database.close()


main()
