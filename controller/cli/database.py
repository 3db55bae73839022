"""What the commands around the database share: the `--db` option and how errors look.

Owns exit codes of these commands: 2 if the database cannot be used, 1 if what was asked is not
there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer

from store.errors import StoreError

EXIT_NOT_FOUND = 1
EXIT_UNUSABLE = 2

DbOption = Annotated[
    str,
    typer.Option(
        "--db",
        envvar="PACELINE_DB",
        metavar="URL",
        help="Telemetry database: sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME.",
    ),
]


def fail(message: str, code: int) -> NoReturn:
    """Print one line on standard error and end the command with `code`."""
    print(f"paceline: error: {message}", file=sys.stderr, flush=True)
    raise typer.Exit(code)


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn what the store says into one line and exit code 2."""
    try:
        yield
    except StoreError as error:
        fail(str(error), EXIT_UNUSABLE)
