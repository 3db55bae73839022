"""What the benchmark commands share: a progress bar, a console that does not wrap in a log.

Owns how it looks. Must not know what is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from controller.bench.rounds import StageListener

PIPED_WIDTH = 160
"""Columns of a table where no terminal sets them: a table in a log is read unwrapped."""


def wide_console() -> Console:
    """Return a console for standard output, wide where it is no terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[StageListener]:
    """Show a bar on the terminal, if there is one; yields what is called with each stage."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
    )
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(description, total=None)

        def on_stage(label: str, done: int, total: int) -> None:
            progress.update(task, description=label, completed=done, total=total)

        yield on_stage


def out_folder_exists(out: Path | None) -> None:
    """BadParameter if `out` could not be written at the end of a long measurement."""
    if out is not None and out.is_dir():
        raise typer.BadParameter(f"{out} is a directory: name a file", param_hint="--out")
    if out is not None and not out.parent.is_dir():
        raise typer.BadParameter(f"{out.parent} is not a directory", param_hint="--out")
