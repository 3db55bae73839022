"""`paceline simulate`: policies on recorded or made-up traffic, on virtual time.

Owns the options of the command and what it writes where. Must not measure, and must not import
torch. Exit codes: 0 when all was simulated, 2 if it cannot start.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

from controller.cli.database import DbOption
from controller.cli.progress import StartupProgress
from controller.cli.simulate_stored import keep_arrivals, limits_of, open_run
from controller.cli.simulate_view import print_report
from controller.cli.simulate_words import changed_machine, loads_of, planner_config, seeds_of
from controller.config import DEFAULT_DB_URL, parse_slo_class
from controller.policy.lengths import OutputLengths
from controller.policy.policies import POLICY_NAMES, make_planner
from controller.simulation.fitting import hardware_of
from controller.simulation.hardware import HardwareProfile
from controller.simulation.html import render_html
from controller.simulation.report import Report, build_report, score
from controller.simulation.run import SimulationConfig, SimulationError, check_classes, engine_for
from controller.simulation.source import WorkloadSource, parse_mix
from controller.simulation.stored import StoredRun
from controller.simulation.sweep import (
    BudgetSearch,
    ResultsFile,
    Scene,
    SweepRow,
    SweepTask,
    run_sweep_tasks,
    search_budget,
)
from controller.workload.arrivals import Workload
from costmodel.prior import flat_prior

EXIT_CANNOT_START = 2
DEFAULT_HARDWARE = "a100-8b"
CLIENT_MAX_TOKENS = 2048
BUDGET_FAMILIES = tuple(name.removesuffix("-N") for name in POLICY_NAMES if name.endswith("-N"))
_WORKLOAD, _MACHINE, _POLICY, _RUN = "Workload", "Machine", "Policies and promises", "Run"


def _option(panel: str, text: str, **kwargs: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, show_default=False, **kwargs)


def simulate(
    trace: Annotated[
        str | None, _option(_WORKLOAD, "A trace file: azure, mooncake, csv or jsonl, perhaps .gz.")
    ] = None,
    trace_format: Annotated[
        str, _option(_WORKLOAD, "Its format (default: told apart by its first line).")
    ] = "auto",
    replay: Annotated[
        str | None,
        _option(
            _WORKLOAD,
            "The arrivals and promises of a stored run instead (an id, or last), on the machine"
            " that its cost model learnt.",
        ),
    ] = None,
    db: DbOption = DEFAULT_DB_URL,
    generate: Annotated[
        str | None,
        _option(
            _WORKLOAD,
            "A generator in one line: poisson:rate=5,duration=60, gamma: with burstiness=, or"
            " square: with phases (docs/simulation.md has every key).",
        ),
    ] = None,
    start: Annotated[float, _option(_WORKLOAD, "Seconds to leave out first.", min=0)] = 0.0,
    duration: Annotated[float | None, _option(_WORKLOAD, "Seconds to keep.", min=0.001)] = None,
    max_requests: Annotated[int | None, _option(_WORKLOAD, "Requests to keep.", min=1)] = None,
    mix: Annotated[
        str | None, _option(_WORKLOAD, "Shares of classes, at random: chat=0.5,code=0.3,batch=0.2.")
    ] = None,
    mix_by_length: Annotated[
        bool,
        typer.Option(
            "--mix-by-length",
            help="Give --mix in order of prompt length instead.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = False,
    hardware: Annotated[
        str | None,
        _option(
            _MACHINE,
            "a100-8b (default), h100-70b, cpu-demo; a JSON file with a profile or a cost model's"
            " snapshot; or TABLE.csv:MODEL:HARDWARE[:TENSOR_PARALLEL] to fit.",
        ),
    ] = None,
    noise: Annotated[
        float | None, _option(_MACHINE, "Size of the noise instead of the machine's own.", min=0)
    ] = None,
    slowdown: Annotated[
        list[str] | None,
        _option(_MACHINE, "START:END:FACTOR: steps between two seconds take so much longer."),
    ] = None,
    max_model_len: Annotated[
        int | None, _option(_MACHINE, "Context in tokens; longer requests are cut.", min=2)
    ] = None,
    max_num_seqs: Annotated[
        int | None, _option(_MACHINE, "Most running requests (default: as in serve).", min=1)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, _option(_MACHINE, "Most tokens of one step (default: 8192).", min=1)
    ] = None,
    max_waiting_requests: Annotated[
        int | None, _option(_MACHINE, "Most queued requests (default: 1024).", min=1)
    ] = None,
    num_blocks: Annotated[
        int | None, _option(_MACHINE, "KV blocks (default: what the machine holds).", min=1)
    ] = None,
    num_host_blocks: Annotated[
        int | None, _option(_MACHINE, "Blocks of host memory for swapped KV.", min=0)
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        _option(_MACHINE, "Share the KV of equal beginnings (default: the run's, or on)."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        _option(_POLICY, f"One of {', '.join(POLICY_NAMES)}. Repeatable. (default: slo, edf-512)"),
    ] = None,
    best_static: Annotated[
        list[str] | None,
        _option(
            _POLICY,
            f"Search the best static budget of {', '.join(BUDGET_FAMILIES)}. Repeatable.",
        ),
    ] = None,
    level: Annotated[
        float, _option(_POLICY, "Attainment that --best-static aims at (default: 0.9).")
    ] = 0.9,
    slo_class: Annotated[
        list[str] | None,
        _option(
            _POLICY,
            "NAME:ttft_ms=500,tpot_ms=50,…, as in serve. Repeatable."
            " (default: default:ttft_ms=1000,tpot_ms=50)",
        ),
    ] = None,
    default_slo_class: Annotated[
        str, _option(_POLICY, "Class of requests that name none (default: default).")
    ] = "default",
    planner: Annotated[
        list[str] | None,
        _option(_POLICY, "A knob of the SLO planner, NAME=VALUE: pace=0.9. Repeatable."),
    ] = None,
    learner: Annotated[
        str,
        _option(
            _POLICY,
            "learned (default): the cost model learns from every step; refitted: and is refitted"
            " as in the service; prior: it keeps its warm-up; oracle: it knows the machine.",
        ),
    ] = "learned",
    client_max_tokens: Annotated[
        int | None,
        _option(
            _POLICY,
            "max_tokens that clients ask for, whatever they get (default: 2048, or the run's"
            " median); 0: exactly what they get.",
            min=0,
        ),
    ] = None,
    load: Annotated[
        str | None, _option(_RUN, "Multiples of the workload's own rate: 0.5,1,2. (default: 1)")
    ] = None,
    rate: Annotated[
        str | None, _option(_RUN, "Requests per second instead of multiples: 4,6,8.")
    ] = None,
    seeds: Annotated[
        str, _option(_RUN, "How many seeds, or which: 5, or 0,7,9. (default: 1)")
    ] = "1",
    workers: Annotated[int, _option(_RUN, "Processes (default: 2).", min=1, max=64)] = 2,
    parts: Annotated[int, _option(_RUN, "Parts of a run (default: 1).", min=1, max=64)] = 1,
    out: Annotated[
        Path | None,
        _option(
            _RUN,
            "Folder for report.json, report.html and results.jsonl; a sweep that was interrupted"
            " goes on from there.",
        ),
    ] = None,
) -> None:
    """Run policies on a workload in virtual time and compare what they keep of their promises."""
    try:
        classes = tuple(parse_slo_class(each) for each in slo_class or [])
        stored = None if replay is None else open_run(replay, db)
        if stored is not None:
            trace = keep_arrivals(stored.workload, out, trace)
            classes = classes or stored.classes
        source = WorkloadSource(
            trace=trace,
            generator=generate,
            trace_format=trace_format,
            start_s=start,
            duration_s=duration,
            max_requests=max_requests,
            max_model_len=max_model_len,
            mix=parse_mix(mix) if mix else (),
            is_by_length=mix_by_length,
        )
        machine = changed_machine(_machine(hardware, stored), noise, slowdown or [])
        limits = {
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_waiting_requests": max_waiting_requests,
            "num_blocks": num_blocks,
            "num_host_blocks": num_host_blocks,
            "is_prefix_cache_enabled": enable_prefix_caching,
        }
        if client_max_tokens is None:
            client_max_tokens = CLIENT_MAX_TOKENS if stored is None else stored.max_tokens
        config = SimulationConfig(
            engine=engine_for(machine, **limits_of(limits, stored)),
            classes=classes or (parse_slo_class("default:ttft_ms=1000,tpot_ms=50"),),
            default_class=default_slo_class,
            learner=typing.cast("Any", learner),
            planner=planner_config(planner or []),
            max_tokens=client_max_tokens or None,
        )
        policies = policy or (["slo"] if best_static else ["slo", "edf-512"])
        _check_names(policies, best_static or [], config, level)
        scene = Scene(source, machine, config, parts)
        base = source.workload()
        if stored is not None:
            # What it is, not the file that it was put into.
            base = dataclasses.replace(base, name=stored.workload.name)
        check_classes(base, config)
        loads = loads_of(load, rate, base)
        seed_list = seeds_of(seeds)
        results = _results(out)
        report = _sweep(
            scene, base, policies, best_static or [], level, loads, seed_list, workers, results
        )
    except OSError as error:
        _fail(f"{error.filename or '--out'}: {error.strerror or error}")
    except (ValueError, SimulationError) as error:
        _fail(str(error))
    print_report(report)
    if out is not None:
        _write(out, report)


def _machine(name: str | None, stored: StoredRun | None) -> HardwareProfile:
    if stored is None:
        return hardware_of(name or DEFAULT_HARDWARE)
    return stored.machine(None if name is None else hardware_of(name))


def _sweep(
    scene: Scene,
    base: Workload,
    policies: list[str],
    families: list[str],
    level: float,
    loads: list[float],
    seeds: list[int],
    workers: int,
    results: ResultsFile | None,
) -> Report:
    rows: list[SweepRow] = []
    searches: list[BudgetSearch] = []
    with StartupProgress() as progress:

        def run(names: typing.Sequence[str]) -> list[SweepRow]:
            tasks = [SweepTask(n, load, seed) for load in loads for n in names for seed in seeds]
            if len(tasks) == 1:
                return [_single(scene, tasks[0], workers, results, progress)]
            return run_sweep_tasks(
                scene,
                tasks,
                workers=workers,
                results=results,
                progress=lambda done, total, _what: progress(
                    done, total, f"simulating {', '.join(names)}"
                ),
            )

        rows += run(policies)
        for family in families:

            def scores(names: typing.Sequence[str]) -> list[tuple[float, ...]]:
                found = run(names)
                rows.extend(found)
                return [score([r for r in found if r.task.policy == n], level) for n in names]

            searches.append(search_budget(family, scores))
    shown = [*policies, *(search.policy for search in searches)]
    about = _about(scene, base, loads, seeds, searches, level)
    return build_report(_distinct(rows), about, shown)


def _single(
    scene: Scene,
    task: SweepTask,
    workers: int,
    results: ResultsFile | None,
    progress: StartupProgress,
) -> SweepRow:
    """Run one task here, where its progress can be told request by request."""
    key = scene.key(task)
    row = None if results is None else results.get(key)
    if row is None:
        label = f"simulating {task.policy}"
        row = scene.run_with(workers, task, lambda done, total: progress(done, total, label))
        if results is not None:
            results.add(key, row)
    return row


def _distinct(rows: list[SweepRow]) -> list[SweepRow]:
    """A budget that was asked for may have been met again by the search."""
    return list({row.task: row for row in rows}.values())


def _about(
    scene: Scene,
    base: Workload,
    loads: list[float],
    seeds: list[int],
    searches: list[BudgetSearch],
    level: float,
) -> dict[str, Any]:
    config = scene.config
    return {
        "workload": base.name,
        "num_requests": base.num_requests,
        "duration_s": base.duration_s,
        "rate": base.rate,
        "source": scene.source.to_json(),
        "hardware": scene.hardware.to_json(),
        "engine": None if config.engine is None else dataclasses.asdict(config.engine),
        "classes": [dataclasses.asdict(each) for each in config.classes],
        "default_class": config.default_class,
        "learner": config.learner,
        "planner": dataclasses.asdict(config.planner),
        "client_max_tokens": config.max_tokens,
        "loads": loads,
        "seeds": seeds,
        "num_parts": scene.num_parts,
        "best_static": [
            {
                "family": search.family,
                "policy": search.policy,
                "level": level,
                "scores": {str(budget): found for budget, found in search.scores.items()},
            }
            for search in searches
        ],
        "num_cpus": os.cpu_count(),
    }


def _check_names(
    policies: list[str], families: list[str], config: SimulationConfig, level: float
) -> None:
    """Refuse a wrong name before anything long is done."""
    for name in policies:
        make_planner(name, flat_prior(), OutputLengths(), config.planner)
    for family in families:
        if family not in BUDGET_FAMILIES:
            known = ", ".join(BUDGET_FAMILIES)
            raise ValueError(f"--best-static must be one of {known}, got {family!r}")
    if not 0.0 < level <= 1.0:
        raise ValueError(f"--level must be in (0, 1], got {level}")


def _results(out: Path | None) -> ResultsFile | None:
    if out is None:
        return None
    out.mkdir(parents=True, exist_ok=True)
    return ResultsFile(out / "results.jsonl")


def _write(out: Path, report: Report) -> None:
    document = json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n"
    (out / "report.json").write_text(document, encoding="utf-8")
    (out / "report.html").write_text(render_html(report), encoding="utf-8")
    print(f"paceline: wrote {out / 'report.json'} and {out / 'report.html'}")


def _fail(message: str) -> typing.NoReturn:
    print(f"paceline: error: {message}", file=sys.stderr, flush=True)
    raise typer.Exit(EXIT_CANNOT_START)
