"""`paceline bench goals`: the study that says whether the controller keeps its promises.

Owns options and output of the command. Must not measure, and must not import torch. Exit codes: 0
whatever the verdicts, 2 if it cannot start.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from controller.cli.output import progress_bar, wide_console

if TYPE_CHECKING:
    from controller.bench.goals import Study
    from controller.bench.goals_cases import Inputs
    from controller.bench.goals_runs import Listener

EXIT_CANNOT_START = 2
_LINE_EVERY = 25


def goals(
    out: Annotated[
        Path, typer.Option(help="Folder for goals.json, results.md and the runs themselves.")
    ],
    azure_code: Annotated[
        Path | None, typer.Option(help="Azure's 2023 trace of code; left out if not given.")
    ] = None,
    azure_conv: Annotated[
        Path | None, typer.Option(help="Azure's 2023 trace of conversations.")
    ] = None,
    mooncake: Annotated[
        Path | None, typer.Option(help="Mooncake's trace of conversations.")
    ] = None,
    hardware: Annotated[
        list[str] | None,
        typer.Option(
            help="Simulated machine, as in simulate. Repeatable. Default: a100-8b, h100-70b."
        ),
    ] = None,
    goal: Annotated[
        list[str] | None,
        typer.Option(help="g1, g1b, g2, g3, g6, curve or binds. Repeatable. Default: all."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many seeds, or which: 5, or 0,7.")] = "5",
    requests: Annotated[
        int,
        typer.Option(
            min=20,
            help="Requests of Azure's code; three times as many conversations, 60 % of Mooncake's.",
        ),
    ] = 1000,
    start: Annotated[
        float, typer.Option(min=0, help="Seconds of a trace to leave out first.")
    ] = 600.0,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes.")] = 2,
    report_only: Annotated[
        bool,
        typer.Option("--report-only", help="Simulate nothing: report what there is in --out."),
    ] = False,
) -> None:
    """Hold the controller against its goals in the simulator, and write a page of results."""
    from controller.bench.goals import GOALS, run_study
    from controller.bench.goals_cases import Inputs
    from controller.bench.goals_report import render_verdicts
    from controller.bench.goals_runs import Runs
    from controller.cli.simulate_words import seeds_of
    from controller.simulation.fitting import hardware_of
    from controller.simulation.run import SimulationError
    from controller.simulation.sweep import ResultsFile

    chosen = list(dict.fromkeys(goal or GOALS))
    for name in chosen:
        if name not in GOALS:
            raise typer.BadParameter(
                f"unknown goal {name!r}: choose from {', '.join(GOALS)}", param_hint="--goal"
            )
    study = None
    try:
        names = list(dict.fromkeys(hardware or ("a100-8b", "h100-70b")))
        machines = tuple(hardware_of(name) for name in names)
        inputs = Inputs(azure_code, azure_conv, mooncake, machines, requests, start)
        seed_list = seeds_of(seeds)
        out.mkdir(parents=True, exist_ok=True)
        results = ResultsFile(out / "runs.jsonl")
        commands = _commands(inputs, names, goal, seeds)
        with (
            _progress() as listener,
            Runs(results, workers=workers, is_readonly=report_only, listener=listener) as runs,
        ):
            for study in run_study(inputs, runs, seed_list, chosen):
                _write(out, study, commands)
    except KeyboardInterrupt:
        print(
            f"paceline: interrupted; the same command goes on from {out / 'runs.jsonl'}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    except (ValueError, OSError, SimulationError) as error:
        _fail(str(error))
    assert study is not None  # noqa: S101 - a study that starts yields at least once
    wide_console().print(render_verdicts(study))
    print(f"paceline: wrote {out / 'goals.json'} and {out / 'results.md'}")


@contextlib.contextmanager
def _progress() -> Iterator[Listener]:
    """Show a bar on a terminal, and a line now and then elsewhere."""
    with progress_bar("goals") as on_stage:
        is_terminal = Console(stderr=True).is_terminal

        def listener(label: str, done: int, asked: int) -> None:
            on_stage(label, done, asked)
            if not is_terminal and done % _LINE_EVERY == 0:
                print(f"paceline: {done} runs; {label}", file=sys.stderr, flush=True)

        yield listener


def _write(out: Path, study: Study, commands: list[str]) -> None:
    from controller.bench.goals_report import render_markdown

    document = json.dumps(study.to_json(), indent=1, allow_nan=False) + "\n"
    (out / "goals.json").write_text(document, encoding="utf-8")
    (out / "results.md").write_text(render_markdown(study, commands), encoding="utf-8")


def _commands(
    inputs: Inputs, hardware: list[str], goals: list[str] | None, seeds: str
) -> list[str]:
    """Return the command that makes this page, with the traces' names alone."""
    words = ["paceline bench goals"]
    files = (
        ("--azure-code", inputs.azure_code),
        ("--azure-conv", inputs.azure_conv),
        ("--mooncake", inputs.mooncake),
    )
    words += [f"{option} {path.name}" for option, path in files if path is not None]
    words += [f"--hardware {name}" for name in hardware]
    words += [f"--goal {name}" for name in goals or ()]
    words += [f"--seeds {seeds}", f"--requests {inputs.num_requests}"]
    words += [f"--start {inputs.start_s:g}", "--out goals"]
    return [" \\\n  ".join(words)]


def _fail(message: str) -> NoReturn:
    print(f"paceline: error: {message}", file=sys.stderr, flush=True)
    raise typer.Exit(EXIT_CANNOT_START)
