"""`paceline telemetry …`: what happened, read back from the database.

Owns options and the choice of table, JSON or CSV (how tables look is in `telemetry_view`). Must not
speak SQL, write to the database, or import torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from controller.cli import telemetry_view as view
from controller.cli.database import EXIT_NOT_FOUND, EXIT_UNUSABLE, DbOption, fail, store_errors
from controller.config import DEFAULT_DB_URL
from engine.clock import MonotonicClock
from store.queries import MAX_PAGE_ROWS, Page, RequestFilter, Span, TelemetryReader
from store.text import parse_instant, to_csv

# Wide enough for every table, where the terminal does not say.
_PIPE_WIDTH = 120

app = typer.Typer(help="Read back steps, requests and promises.", no_args_is_help=True)

LastOption = Annotated[
    int, typer.Option("--last", min=1, max=MAX_PAGE_ROWS, help="How many of the newest rows.")
]
SinceOption = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="From: an age (15m, 2h, 1d), ISO 8601 or epoch ms."),
]
UntilOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="Up to, not including; as for --since.")
]
RunOption = Annotated[str | None, typer.Option("--run", metavar="ID", help="Only this server run.")]
ClassOption = Annotated[
    str | None, typer.Option("--class", metavar="NAME", help="Only this SLO class.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, seconds and epoch ms.")]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print CSV, seconds and epoch ms.")]


@app.callback()
def telemetry() -> None:
    """Read back steps, requests and promises."""


@app.command()
def steps(
    last: LastOption = 20,
    since: SinceOption = None,
    until: UntilOption = None,
    run: RunOption = None,
    is_json: JsonOption = False,
    is_csv: CsvOption = False,
    url: DbOption = DEFAULT_DB_URL,
) -> None:
    """List forward passes: work, time, prediction, budget and what bound it; the newest last."""
    with _reading(url) as reader:
        page = reader.steps(span=_span(since, until), run_id=run, limit=last)
    _list("steps", page, view.steps_table, is_json=is_json, is_csv=is_csv)


@app.command()
def requests(
    last: LastOption = 20,
    since: SinceOption = None,
    until: UntilOption = None,
    run: RunOption = None,
    slo_class: ClassOption = None,
    attained: Annotated[
        bool | None, typer.Option("--attained/--missed", help="Only kept or only missed promises.")
    ] = None,
    decision: Annotated[
        str | None, typer.Option(metavar="WORD", help="Only this decision: admit or reject.")
    ] = None,
    finish: Annotated[
        str | None, typer.Option(metavar="WORD", help="Only this end: stop, length, cancelled, ….")
    ] = None,
    is_json: JsonOption = False,
    is_csv: CsvOption = False,
    url: DbOption = DEFAULT_DB_URL,
) -> None:
    """List requests that have ended: targets, times, decision; by arrival, the newest last."""
    where = RequestFilter(slo_class, attained, decision, None, finish)
    with _reading(url) as reader:
        page = reader.requests(span=_span(since, until), where=where, run_id=run, limit=last)
    _list("requests", page, view.requests_table, is_json=is_json, is_csv=is_csv)


@app.command()
def request(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The server's request id.")],
    run: RunOption = None,
    is_json: JsonOption = False,
    is_csv: CsvOption = False,
    url: DbOption = DEFAULT_DB_URL,
) -> None:
    """Draw one request's life: its queue, every chunk and decode, and what each step decided."""
    with _reading(url) as reader:
        life = reader.request(request_id, run_id=run)
    if life is None:
        fail(f"no request {request_id!r} in the database", EXIT_NOT_FOUND)
    if is_json:
        typer.echo(_to_json(life))
    elif is_csv:
        typer.echo(to_csv(life["steps"]), nl=False)
    else:
        _show(*view.life_of_request(life))


@app.command()
def summary(
    since: SinceOption = None,
    until: UntilOption = None,
    run: RunOption = None,
    is_json: JsonOption = False,
    url: DbOption = DEFAULT_DB_URL,
) -> None:
    """Sum up attainment, goodput, latencies, prediction, refusals and losses."""
    from controller.runtime.learnt import learnt_costs

    with _reading(url) as reader:
        summed = reader.summary(span=_span(since, until), run_id=run)
        answer: dict[str, Any] = {**summed, "cost_model": learnt_costs(reader, run)}
    if is_json:
        typer.echo(_to_json(answer))
    elif not answer["requests"]["num_offered"] and not answer["steps"]["num_steps"]:
        fail("no requests and no steps to sum up", EXIT_NOT_FOUND)
    else:
        _show(*view.summary_tables(answer))


@app.command()
def events(
    last: LastOption = 20,
    since: SinceOption = None,
    until: UntilOption = None,
    run: RunOption = None,
    kind: Annotated[
        str | None, typer.Option(metavar="WORD", help="Only this kind: refusal, preemption, ….")
    ] = None,
    is_json: JsonOption = False,
    is_csv: CsvOption = False,
    url: DbOption = DEFAULT_DB_URL,
) -> None:
    """List refusals, preemptions, alarms and telemetry losses; the newest last."""
    with _reading(url) as reader:
        page = reader.events(span=_span(since, until), kind=kind, run_id=run, limit=last)
    _list("events", page, view.events_table, is_json=is_json, is_csv=is_csv)


@contextmanager
def _reading(url: str) -> Iterator[TelemetryReader]:
    with store_errors():
        reader = TelemetryReader.open(url)
        try:
            yield reader
        finally:
            reader.close()


def _span(since: str | None, until: str | None) -> Span:
    now_ms = MonotonicClock().epoch_ms()
    bounds = []
    for name, text in (("--since", since), ("--until", until)):
        try:
            bounds.append(None if text is None else parse_instant(text, now_ms=now_ms))
        except ValueError as error:
            fail(f"{name}: {error}", EXIT_UNUSABLE)
    return Span(*bounds)


def _list(
    noun: str,
    page: Page,
    table: Callable[[Sequence[dict[str, Any]]], RenderableType],
    *,
    is_json: bool,
    is_csv: bool,
) -> None:
    """Print a listing in time order; one line and exit code 1 if it is empty."""
    rows = page.rows[::-1]
    if is_json:
        typer.echo(_to_json(rows))
    elif is_csv:
        typer.echo(to_csv(rows), nl=False)
    if not rows:
        fail(f"no {noun} found", EXIT_NOT_FOUND)
    if not (is_json or is_csv):
        _show(table(rows))


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False)


def _show(*parts: RenderableType) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    for part in parts:
        console.print(part)
