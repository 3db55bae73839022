"""`paceline db …`: bring the telemetry database to this version's tables, and say how it stands.

Owns options and output. Must not speak SQL, and must not import torch.
"""

from __future__ import annotations

import typer

from controller.cli.database import EXIT_NOT_FOUND, DbOption, fail, store_errors
from controller.config import DEFAULT_DB_URL

app = typer.Typer(help="Create, upgrade and check the telemetry database.", no_args_is_help=True)


@app.callback()
def db() -> None:
    """Create, upgrade and check the telemetry database."""


@app.command()
def upgrade(url: DbOption = DEFAULT_DB_URL) -> None:
    """Create or upgrade the tables; harmless when they are up to date."""
    from store import schema

    with store_errors():
        state = schema.migrate(url)
    typer.echo(f"{state.database} is at revision {state.current}")


@app.command()
def current(url: DbOption = DEFAULT_DB_URL) -> None:
    """Print the revision of the database and the one that this version needs."""
    from store import schema

    with store_errors():
        state = schema.state(url)
    note = "up to date" if state.is_current else f"this version needs {state.head}"
    typer.echo(f"{state.database} is at revision {state.current or 'none'} ({note})")


@app.command()
def check(url: DbOption = DEFAULT_DB_URL) -> None:
    """Exit with 0 if this version can use the database as it is, 1 if it needs an upgrade."""
    from store import schema
    from store.database import sqlite_warning
    from store.urls import is_sqlite, parse_url

    with store_errors():
        state = schema.state(url)
        warning = sqlite_warning() if is_sqlite(parse_url(url)) else None
    if warning:
        typer.echo(f"paceline: warning: {warning}", err=True)
    if not state.is_current:
        fail(
            f"{state.database} is at revision {state.current or 'none'}, this version needs"
            f" {state.head}: run `{schema.UPGRADE_COMMAND} --db {state.database}`",
            EXIT_NOT_FOUND,
        )
    typer.echo(f"{state.database} is up to date (revision {state.current})")
