"""`paceline tune NAME`: search the planner's settings in the simulator and write a profile.

Owns the options and what is written where (what is said while it runs is in `tune_view`). Must not
search or judge, and must not import torch. Exit codes: 0 a profile was written, 1 it was not worth
writing (--only-better), 2 wrong use or nothing to start from, 130 interrupted.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from controller.cli.database import EXIT_NOT_FOUND, EXIT_UNUSABLE, DbOption, fail
from controller.cli.output import progress_bar
from controller.cli.profile_view import print_all
from controller.cli.tune_view import introduce, tell_best, tell_ends
from controller.config import DEFAULT_DB_URL, Settings, SettingsError, load_settings
from controller.runtime.tuned_for import TunedFor

if TYPE_CHECKING:
    from controller.bench.rounds import StageListener
    from controller.tuning.job import Progress
    from controller.tuning.profile import BudgetProfile
    from controller.tuning.task import TuningTask
    from controller.tuning.trial import Trial

EXIT_INTERRUPTED = 130
_WORKLOAD, _MACHINE, _OWNER = (
    "Workload: one of --trace, --generate, --run",
    "Machine",
    "Whose it is",
)
_SEARCH, _RESULT = "Search", "Result"
# Each is a workload in memory, and a simulation per trial.
_MAX_SEEDS = 100
# As much as the column holds; the end of a path tells more than its beginning.
_MAX_KEY_LENGTH = 256
# What a run or a generator's line leaves no choice of; taken silently, it would look as if it
# counted.
_NOT_OF_A_RUN = (
    "trace_format", "start", "duration", "mix", "load", "slo_class", "default_slo_class", "config",
    "max_model_len",
)  # fmt: skip
_NOT_OF_A_GENERATOR = ("trace_format", "held_out_share")


def _option(panel: str, text: str, **kwargs: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **kwargs)


class _Subject(NamedTuple):
    """What is tuned on, whom the profile is for, and the run that is replayed, if one is."""

    task: TuningTask
    tuned_for: TunedFor
    run_id: str | None = None


def tune(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the profile.", show_default=False)],
    trace: Annotated[
        str | None, _option(_WORKLOAD, "A trace file: azure, mooncake, csv or jsonl, perhaps .gz.")
    ] = None,
    generate: Annotated[
        str | None,
        _option(_WORKLOAD, "A generator's line, as `poisson:rate=8,classes=chat:70/batch:30`."),
    ] = None,
    run: Annotated[
        str | None,
        _option(_WORKLOAD, "A server run in the database, by its id, or `last`.", metavar="ID"),
    ] = None,
    trace_format: Annotated[
        str, _option(_WORKLOAD, "The trace's format, told apart by its first line.")
    ] = "auto",
    start: Annotated[float, _option(_WORKLOAD, "Seconds to leave out at first.", min=0)] = 0.0,
    duration: Annotated[
        float | None, _option(_WORKLOAD, "Seconds to keep (default: all).", min=0.001)
    ] = None,
    max_requests: Annotated[
        int | None, _option(_WORKLOAD, "Requests to keep (default: all).", min=2)
    ] = None,
    mix: Annotated[
        str | None, _option(_WORKLOAD, "Shares of classes, at random: chat=0.5,code=0.3,batch=0.2.")
    ] = None,
    load: Annotated[
        float, _option(_WORKLOAD, "Multiple of the workload's own rate.", min=0.001)
    ] = 1.0,
    slo_class: Annotated[
        list[str] | None,
        _option(_WORKLOAD, "A class as in serve, repeatable: NAME:ttft_ms=500,tpot_ms=50,…"),
    ] = None,
    default_slo_class: Annotated[
        str | None, _option(_WORKLOAD, "Class of requests that name none.", show_default=False)
    ] = None,
    config: Annotated[
        Path | None,
        _option(_WORKLOAD, "TOML file with the server's classes (default: paceline.toml)."),
    ] = None,
    hardware: Annotated[
        str | None,
        _option(
            _MACHINE,
            "a100-8b, h100-70b, cpu-demo, a JSON file, or TABLE.csv:MODEL:HARDWARE to fit"
            " (default: with --run the machine that its cost model learnt, else a100-8b).",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, _option(_MACHINE, "Context in tokens; longer requests are cut.", min=2)
    ] = None,
    model: Annotated[
        str | None, _option(_OWNER, "Model that may be served with it (default: the run's).")
    ] = None,
    device: Annotated[
        str | None,
        _option(_OWNER, "Device, as a server's banner names it: `cpu (2 threads)` (the run's)."),
    ] = None,
    source: Annotated[
        str | None,
        _option(_OWNER, "What that server loads, where it goes by another name (the run's)."),
    ] = None,
    knob: Annotated[
        list[str] | None, _option(_SEARCH, "Search only this setting, repeatable (default: all).")
    ] = None,
    trials: Annotated[
        int, _option(_SEARCH, "Trials in all, those of before included.", min=1)
    ] = 40,
    seed: Annotated[int, _option(_SEARCH, "First seed; the search's own too.", min=0)] = 0,
    seeds: Annotated[int, _option(_SEARCH, "Simulations per trial.", min=1, max=_MAX_SEEDS)] = 3,
    held_out_seeds: Annotated[
        int, _option(_SEARCH, "Simulations that judge what was found.", min=1, max=_MAX_SEEDS)
    ] = 5,
    held_out_share: Annotated[
        float, _option(_SEARCH, "Share of a trace's or run's time that is held out.")
    ] = 0.4,
    study: Annotated[
        Path | None,
        _option(_SEARCH, "File of the trials; goes on if it is there (default: NAME.study)."),
    ] = None,
    out: Annotated[
        Path | None, _option(_RESULT, "File of the profile (default: NAME.yaml).")
    ] = None,
    only_better: Annotated[
        bool,
        typer.Option(
            "--only-better",
            rich_help_panel=_RESULT,
            help="Write nothing unless it is better than the defaults.",
        ),
    ] = False,
    url: DbOption = DEFAULT_DB_URL,
) -> None:
    """Search the planner's settings in the simulator, and judge them on what was held out."""
    # Optuna and the simulator are loaded by whoever tunes, not by `--help`.
    from controller.simulation.run import SimulationError
    from controller.tuning.job import compare, put_back, search
    from controller.tuning.profile import check_name
    from controller.tuning.report import make_profile, trial_records
    from controller.tuning.space import DEFAULTS, knobs_named, point_of
    from controller.tuning.study import Study
    from engine.clock import MonotonicClock
    from store.errors import StoreError

    study = study or Path(f"{name}.study")
    out = out or Path(f"{name}.yaml")
    try:
        check_name(name)
        knobs = knobs_named(knob or ())
        if not out.parent.is_dir():
            raise ValueError(f"--out {out}: no directory {out.parent}")  # noqa: TRY301 - one exit
        if [trace, generate, run].count(None) != 2:
            raise ValueError("give one of --trace, --generate and --run")  # noqa: TRY301 - one exit
        if run is not None:
            _refuse(context, "--run", _NOT_OF_A_RUN)
        elif generate is not None:
            _refuse(context, "--generate", _NOT_OF_A_GENERATOR)
        _check_out(out, name)
        counts: dict[str, Any] = {
            "seed": seed,
            "num_seeds": seeds,
            "num_held_out_seeds": held_out_seeds,
            "held_out_share": held_out_share,
        }
        if run is not None:
            subject = _of_run(name, run, max_requests, hardware, url, counts)
        else:
            words = {
                "trace": trace, "generator": generate, "trace_format": trace_format,
                "start_s": start, "duration_s": duration, "max_requests": max_requests,
                "max_model_len": max_model_len,
            }  # fmt: skip
            settings = _settings(slo_class, default_slo_class, config, url)
            with progress_bar("making the traffic") as show:
                counts |= {"load": load, "progress": show}
                subject = _of_source(name, words, mix, hardware, settings, counts)
        tuned_for = replace(
            subject.tuned_for,
            model=model or subject.tuned_for.model,
            device=device or subject.tuned_for.device,
            # The run's source goes with the run's name: another name means other weights, unless
            # somebody says what they are.
            source=source or (None if model else subject.tuned_for.source),
        )
        task = subject.task
        first = point_of(DEFAULTS, knobs)
        with Study.open(study, knobs, first, task.fingerprint(), seed) as opened:
            introduce(task, knobs, study, len(opened.trials), trials)
            with progress_bar("tuning") as show:
                found = search(
                    task,
                    opened,
                    trials,
                    _whole(show),
                    lambda best, gain: tell_best(best, gain, first),
                )
            if found.is_interrupted:
                _interrupted(study, found.trials, trials)
            tell_ends(found.trials)
            with progress_bar("putting changes back") as show:
                found = put_back(task, opened, found, _whole(show))
            with progress_bar("judging") as show:
                comparison = compare(task, found.settings, _whole(show))
    except KeyboardInterrupt:
        fail(f"interrupted; {study} keeps the trials: the same command goes on", EXIT_INTERRUPTED)
    except (ValueError, SimulationError, StoreError) as error:
        fail(str(error), EXIT_UNUSABLE)
    key = _study_key(study)
    profile = make_profile(
        name,
        task,
        found,
        comparison,
        tuned_for=tuned_for,
        seed=seed,
        created_at=MonotonicClock().epoch_ms(),
        study=key,
        run=subject.run_id,
    )
    print_all(profile)
    if only_better and profile.judged.verdict != "better":
        fail(f"not better than the shipped defaults: {out} is not written", EXIT_NOT_FOUND)
    is_there = out.exists()
    try:
        out.write_text(profile.to_yaml(), encoding="utf-8")
    except OSError as error:
        fail(f"--out {out}: {error.strerror}", EXIT_UNUSABLE)
    typer.echo(f"paceline: wrote {out}{' over the one that was there' if is_there else ''}")
    _keep(profile, trial_records(key, found.trials), url, out)
    if not _is_owned(profile):
        typer.echo(
            "paceline: it belongs to no model and device, so no server takes it; --model and"
            " --device say whose it is",
            err=True,
        )


def _check_out(out: Path, name: str) -> None:
    """ValueError if `out` is there and is not what tuning `name` again would replace."""
    from controller.tuning.profile import ProfileError, read_profile

    if not out.exists():
        return
    try:
        is_ours = read_profile(out).name == name
    except ProfileError:
        is_ours = False
    if not is_ours:
        raise ValueError(f"--out {out}: is there already, and no profile {name!r}; name another")


def _study_key(study: Path) -> str:
    """Return what trials stand under in a database: files of two folders may have one name."""
    return str(study.absolute())[-_MAX_KEY_LENGTH:]


def _refuse(context: typer.Context, source: str, names: tuple[str, ...]) -> None:
    """ValueError names the option that was given on the command line and means nothing there."""
    for name in names:
        origin = context.get_parameter_source(name)
        if origin is not None and origin.name == "COMMANDLINE":
            raise ValueError(f"--{name.replace('_', '-')} does not apply to {source}")


def _settings(
    slo_class: list[str] | None, default_slo_class: str | None, config: Path | None, url: str
) -> Settings:
    """Return the server's settings, for the sake of its classes."""
    flags: dict[str, Any] = {"db": url}
    if slo_class:
        flags["slo_class"] = slo_class
    if default_slo_class is not None:
        flags["default_slo_class"] = default_slo_class
    try:
        return load_settings(flags, config)
    except SettingsError as error:
        fail(str(error), EXIT_UNUSABLE)


def _of_source(
    name: str,
    words: dict[str, Any],
    mix: str | None,
    hardware: str | None,
    settings: Settings,
    counts: dict[str, Any],
) -> _Subject:
    from controller.simulation.fitting import hardware_of
    from controller.simulation.run import engine_for
    from controller.simulation.source import WorkloadSource, parse_mix
    from controller.tuning.task import task_of_source

    machine = hardware_of(hardware or "a100-8b")
    length = words["max_model_len"]
    task = task_of_source(
        WorkloadSource(**words, mix=parse_mix(mix) if mix else ()),
        machine,
        engine_for(machine, **({} if length is None else {"max_model_len": length})),
        settings.slo_class,
        default_class=settings.default_slo_class,
        **counts,
    )
    return _Subject(task, TunedFor(name))


def _of_run(
    name: str,
    run_id: str,
    max_requests: int | None,
    hardware: str | None,
    url: str,
    counts: dict[str, Any],
) -> _Subject:
    from controller.simulation.fitting import hardware_of
    from controller.simulation.stored import read_run
    from controller.tuning.replay import task_of_run
    from store.queries import TelemetryReader

    machine = None if hardware is None else hardware_of(hardware)
    with closing(TelemetryReader.open(url)) as reader:
        rows = read_run(reader, run_id)
    replayed = task_of_run(rows, name, hardware=machine, max_requests=max_requests, **counts)
    return _Subject(replayed.task, replayed.tuned_for, replayed.run_id)


def _whole(show: StageListener) -> Progress:
    """Return a progress of whole simulations: parts of one are not worth a decimal point."""
    return lambda label, done, total: show(label, int(done), int(total))


def _interrupted(study: Path, trials: tuple[Trial, ...], wanted: int) -> None:
    fail(
        f"interrupted after {len(trials)} of {wanted} trials; {study} keeps them: the same command"
        " goes on",
        EXIT_INTERRUPTED,
    )


def _is_owned(profile: BudgetProfile) -> bool:
    return profile.tuned_for.model is not None and profile.tuned_for.device is not None


def _keep(profile: BudgetProfile, trials: list[Any], url: str, out: Path) -> None:
    """Write the rows, or say how to do it later: the file is written already."""
    from store.errors import StoreError
    from store.profiles import ProfileStore

    try:
        with ProfileStore.open_writer(url) as store:
            replaced = store.profile(profile.name)
            store.save(profile.to_record(), trials)
    except StoreError as error:
        typer.echo(
            f"paceline: not in the database: {error}; `paceline profile activate ./{out.name}`"
            " puts it there",
            err=True,
        )
        return
    instead = "" if replaced is None else f" in place of one that was {replaced.verdict}"
    served = f"; serve it with --profile {profile.name}" if _is_owned(profile) else ""
    typer.echo(f"paceline: profile {profile.name!r} is in the database{instead}{served}")
    if replaced is not None and replaced.is_active:
        typer.echo(
            "paceline: the one it replaces was active; this one is not until"
            f" `paceline profile activate {profile.name}`",
            err=True,
        )
