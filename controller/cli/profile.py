"""`paceline profile …`: list, show, compare, export profiles, and choose the one that is served.

Owns options and what is written where (how profiles look is in `profile_view`). Must not tune, and
must not import torch or Optuna. Exit codes: 1 where there is no such profile, 2 where it or the
database cannot be used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controller.cli.database import EXIT_NOT_FOUND, EXIT_UNUSABLE, DbOption, fail, store_errors
from controller.cli.profile_view import print_all, print_changes, print_profiles, promises_of
from controller.config import DEFAULT_DB_URL

if TYPE_CHECKING:
    from controller.tuning.profile import BudgetProfile
    from controller.tuning.space import TunedSettings

_DEFAULTS = "default"

app = typer.Typer(help="Tuned settings: what there is, and which are served.", no_args_is_help=True)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A name in the database, or a YAML file.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def profile() -> None:
    """Tuned settings: what there is, and which are served."""


@app.command("list")
def list_profiles(is_json: JsonOption = False, url: DbOption = DEFAULT_DB_URL) -> None:
    """List the profiles in the database, the newest first."""
    from store.profiles import ProfileStore

    with store_errors(), ProfileStore.open_reader(url) as store:
        records = store.profiles()
    if is_json:
        rows = [
            {
                "name": each.name, "is_active": each.is_active, "model": each.model,
                "device": each.device, "verdict": each.verdict, "created_at": each.created_at,
            }
            for each in records
        ]  # fmt: skip
        typer.echo(json.dumps(rows, indent=2))
    elif records:
        print_profiles(records)
    else:
        fail("no profile in the database: `paceline tune` makes them", EXIT_NOT_FOUND)


@app.command()
def show(name: NameArgument, is_json: JsonOption = False, url: DbOption = DEFAULT_DB_URL) -> None:
    """Show a profile: whose it is, what differs from the defaults, what that gains."""
    found = _found(name, url)
    if is_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    owner, made = found.tuned_for, found.provenance
    if owner.model is None or owner.device is None:
        typer.echo(f"profile {found.name}, for no model and device: no server takes it")
    else:
        typer.echo(f"profile {found.name}, for {owner.model} on {owner.device}")
    typer.echo(
        f"tuned on {made.workload}, simulated on {made.hardware}: trial {made.trial} of"
        f" {made.num_trials}, {_scenes(made.seeds)} to tune,"
        f" {_scenes(made.held_out_seeds)} to judge"
    )
    if made.classes:
        typer.echo(f"promises: {promises_of(made.classes)}")
    print_all(found)


def _scenes(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} scene{'' if len(seeds) == 1 else 's'}"


@app.command()
def activate(name: NameArgument, url: DbOption = DEFAULT_DB_URL) -> None:
    """Let servers of its model start with a profile; a file is put into the database first."""
    from controller.tuning.profile import is_file_name
    from store.profiles import ProfileStore

    found = _found(name, url)
    refusal = found.tuned_for.refusal(found.tuned_for.model or "")
    if refusal is not None:
        fail(refusal, EXIT_UNUSABLE)
    with store_errors(), ProfileStore.open_writer(url) as store:
        if is_file_name(name):
            store.save(found.to_record(is_active=True))
        else:
            store.activate(found.name)
    owner = found.tuned_for
    typer.echo(f"servers of {owner.model} on {owner.device} start with {found.name} from now on")
    if found.judged.verdict != "better":
        typer.echo(f"paceline: warning: {found.judged.statement}", err=True)


@app.command()
def deactivate(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name in the database.")],
    url: DbOption = DEFAULT_DB_URL,
) -> None:
    """Let servers start with the shipped defaults again."""
    from store.profiles import ProfileStore

    with store_errors(), ProfileStore.open_writer(url) as store:
        was_active = store.deactivate(name)
    if not was_active:
        fail(f"profile {name!r} is not active", EXIT_NOT_FOUND)
    typer.echo(f"{name} is active no more")


@app.command()
def export(
    name: NameArgument,
    out: Annotated[
        Path | None, typer.Option(help="File to write (default: standard output).")
    ] = None,
    url: DbOption = DEFAULT_DB_URL,
) -> None:
    """Write a profile as YAML, to keep it beside the code or take it to another database."""
    text = _found(name, url).to_yaml()
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"--out {out}: {error.strerror}", EXIT_UNUSABLE)


@app.command()
def diff(
    name: NameArgument,
    other: Annotated[
        str,
        typer.Argument(metavar="OTHER", help="Another one, or `default`: the shipped settings."),
    ] = _DEFAULTS,
    is_json: JsonOption = False,
    url: DbOption = DEFAULT_DB_URL,
) -> None:
    """Show in which settings two profiles differ."""
    mine, theirs = _settings_of(name, url), _settings_of(other, url)
    changes = mine.changes_from(theirs)
    if is_json:
        typer.echo(json.dumps({key: {other: b, name: a} for key, (b, a) in changes.items()}))
    else:
        print_changes(changes, other, name)


def _settings_of(name: str, url: str) -> TunedSettings:
    from controller.tuning.space import DEFAULTS

    return DEFAULTS if name == _DEFAULTS else _found(name, url).settings


def _found(name: str, url: str) -> BudgetProfile:
    from controller.tuning.lookup import MissingProfileError, named_profile
    from controller.tuning.profile import ProfileError

    try:
        return named_profile(name, url)
    except MissingProfileError as error:
        fail(str(error), EXIT_NOT_FOUND)
    except ProfileError as error:
        fail(str(error), EXIT_UNUSABLE)
