"""`paceline`: the command line's root.

Owns the list of commands. Importing it must not import torch.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer

from controller.cli import bench, db, profile, serve, simulate, telemetry, tune

app = typer.Typer(
    name="paceline",
    help="An LLM inference service that keeps per-request latency promises.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("simulate")(simulate.simulate)
app.command("tune")(tune.tune)
app.add_typer(bench.app, name="bench")
app.add_typer(telemetry.app, name="telemetry")
app.add_typer(profile.app, name="profile")
app.add_typer(db.app, name="db")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"paceline {metadata.version('paceline')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """An LLM inference service that keeps per-request latency promises."""


def main() -> None:
    """Run the command line; the console script's entry point."""
    sys.exit(app())
