"""`paceline bench peers`: our server against others on the same weights, in one run.

Owns options and output of the command. Must not measure, and must not import torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from controller.bench.closed import ClosedScenario
from controller.bench.peers import ClosedSession, agreements, fastest, measure_closed
from controller.bench.peers_contestants import (
    DEFAULT_PEER_SETTINGS,
    PEER_SETTINGS,
    TRANSFORMERS,
    Equipment,
    our_server,
    parse_peer,
    transformers_peer,
    url_server,
)
from controller.bench.peers_report import (
    closed_rows,
    closed_title,
    closed_to_json,
    render_closed_markdown,
    render_closed_notes,
    render_closed_table,
)
from controller.bench.report import render_markdown, render_notes, render_table, rows_of, to_json
from controller.bench.rounds import Contestant, SpikeSession, measure_rounds
from controller.bench.scenario import DEFAULT_VOCAB_SIZE, PromptSource, SpikeScenario
from controller.bench.servers import SERVER_CONFIGS, ServerError
from controller.bench.spike import PromiseRule
from controller.cli.output import out_folder_exists, progress_bar, wide_console

OURS = "paceline"
"""How the reference is called in headings."""


def peers(
    serve: Annotated[
        str, typer.Option(help="Model that every contestant serves, where we start it.")
    ] = "demo",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{TRANSFORMERS}, or URL=name of a running server with the OpenAI API (its own"
            f" weights are not checked). Repeatable. Default: {TRANSFORMERS}."
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(help=f"Our policies: {', '.join(SERVER_CONFIGS)}. Repeatable. Default: slo."),
    ] = None,
    serve_option: Annotated[
        list[str] | None,
        typer.Option(help="One more word of our serve command line. Repeatable."),
    ] = None,
    peer_setting: Annotated[
        list[str] | None,
        typer.Option(
            help=f"How {TRANSFORMERS} runs: {', '.join(PEER_SETTINGS)}. Repeatable: the fastest in"
            f" a trial is measured. Default: {', '.join(DEFAULT_PEER_SETTINGS)}."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Number type of the weights.")] = "float32",
    device: Annotated[str, typer.Option(help="Where everybody runs: cpu or cuda.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each. Default: torch's own choice.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of each.")] = 128,
    output_len: Annotated[int, typer.Option(min=2, help="Output tokens of each.")] = 32,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of a round.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all contestants, in turn.")] = 3,
    closed: Annotated[bool, typer.Option(help="Measure the closed loop.")] = True,
    spike: Annotated[bool, typer.Option(help="Measure the spike, too.")] = True,
    tpot_factor: Annotated[
        float, typer.Option(min=0.1, help="x-slo-tpot-ms of the spike, × the normal gap.")
    ] = 3.0,
    short_max_tokens: Annotated[
        int, typer.Option(min=2, help="Output of the spike's short requests.")
    ] = 64,
    long_prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the spike.")] = 1024,
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds to load.")] = 900.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="PACELINE_API_KEY", help="Key of the servers.")
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(min=256, help="Prompt ids stay below this.")
    ] = DEFAULT_VOCAB_SIZE,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the prompts. Default: new ones every time.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write everything measured as JSON.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the ratios as Markdown tables.")
    ] = False,
) -> None:
    """Same weights, same prompts, in turn: how fast are we beside others?"""
    try:
        scenario = ClosedScenario(concurrency, input_len, output_len, num_requests)
        spike_scenario = SpikeScenario(
            short_max_tokens=short_max_tokens, long_prompt_tokens=long_prompt_tokens
        )
        wanted = [parse_peer(word) for word in peer or [TRANSFORMERS]]
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    configs = _known(config or ["slo"], SERVER_CONFIGS, "--config")
    settings = _known(peer_setting or DEFAULT_PEER_SETTINGS, PEER_SETTINGS, "--peer-setting")
    out_folder_exists(out)
    equipment = Equipment(serve, dtype, device, threads, ready_timeout)
    rule = PromiseRule(tpot_factor)
    seed = secrets.randbits(32) if seed is None else seed
    measurement = Measurement(
        equipment,
        scenario,
        spike_scenario if spike else None,
        rounds,
        PromptSource(seed, vocab_size),
    )
    ours = [our_server(key, equipment, rule, serve_option or [], api_key) for key in configs]
    try:
        asyncio.run(measurement.run(ours, wanted, settings, api_key, is_closed=closed))
    except ServerError as exc:
        typer.echo(f"paceline: {exc}", err=True)
        raise typer.Exit(1) from exc
    about = {
        "model": serve,
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "seed": seed,
        "tpot_factor": tpot_factor,
        "num_cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    payload = measurement.show(about, is_markdown=markdown)
    if out is not None:
        out.write_text(json.dumps(payload, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if not measurement.is_valid:
        raise typer.Exit(1)


def _known(words: Sequence[str], known: Sequence[str] | dict[str, Any], hint: str) -> list[str]:
    """Return the words without repetition, each checked."""
    for word in words:
        if word not in known:
            raise typer.BadParameter(
                f"unknown {word!r}: choose from {', '.join(known)}", param_hint=hint
            )
    return list(dict.fromkeys(words))


class Measurement:
    """One invocation: what is measured, and what came out so far."""

    def __init__(
        self,
        equipment: Equipment,
        scenario: ClosedScenario,
        spike: SpikeScenario | None,
        rounds: int,
        prompts: PromptSource,
    ) -> None:
        self._equipment = equipment
        self._scenario = scenario
        self._spike = spike
        self._rounds = rounds
        self._prompts = prompts
        self._facts: dict[str, dict[str, Any]] = {}
        self._trial: ClosedSession | None = None
        self._closed: ClosedSession | None = None
        self._spikes: SpikeSession | None = None
        self._reference = ""

    async def run(
        self,
        ours: Sequence[Contestant],
        wanted: Sequence[tuple[str | None, str]],
        settings: Sequence[str],
        api_key: str | None,
        *,
        is_closed: bool,
    ) -> None:
        """Measure everything; ServerError if a peer that was asked for cannot run at all."""
        self._reference = ours[0].key
        contestants = list(ours)
        for url, name in wanted:
            if url is None:
                contestants.append(await self._transformers(settings))
            else:
                contestants.append(url_server(url, name, self._equipment, api_key))
        if is_closed:
            with progress_bar("closed loop") as on_stage:
                self._closed = await measure_closed(
                    contestants, self._scenario, self._prompts, self._rounds, on_stage
                )
        if self._spike is not None:
            with progress_bar("spike") as on_stage:
                self._spikes = await measure_rounds(
                    contestants, self._spike, self._prompts, self._rounds, on_stage
                )

    async def _transformers(self, settings: Sequence[str]) -> Contestant:
        """Return the peer under the fastest of `settings`; a single one needs no trial."""

        def make(setting: str) -> Contestant:
            return transformers_peer(setting, self._equipment, self._facts.__setitem__)

        candidates = {peer.key: peer for peer in map(make, settings)}
        if len(candidates) == 1:
            return next(iter(candidates.values()))
        with progress_bar("trial") as on_stage:
            best, self._trial = await fastest(
                list(candidates.values()), self._scenario, self._prompts, on_stage
            )
        return candidates[best]

    @property
    def is_valid(self) -> bool:
        """Whether every measured run may be quoted (trials need not)."""
        closed = self._closed.results if self._closed is not None else ()
        spikes = self._spikes.results if self._spikes is not None else ()
        return not (any(r.violations for r in closed) or any(r.violations for r in spikes))

    def show(self, about: dict[str, Any], *, is_markdown: bool) -> dict[str, Any]:
        """Print tables and notes; return everything measured as JSON values."""
        console = wide_console()
        payload: dict[str, Any] = {
            "benchmark": "peers",
            **about,
            "reference": self._reference,
            "contestants": self._facts,
        }
        notes: list[str] = []
        if self._trial is not None:
            trial_rows = closed_rows(self._trial, self._reference)
            payload["trial"] = closed_to_json(self._trial, trial_rows, ())
            notes += [
                f"trial of {row.label}: {row.tokens_per_second.median:.1f} tokens/s"
                if row.tokens_per_second is not None
                else f"trial of {row.label}: does not run"
                for row in trial_rows
            ]
        if self._closed is not None:
            rows = closed_rows(self._closed, self._reference)
            agreed = agreements(self._closed, self._reference)
            payload["closed"] = closed_to_json(self._closed, rows, agreed)
            if is_markdown:
                text = render_closed_markdown(rows, OURS)
                console.print(text, markup=False, soft_wrap=True)
            else:
                title = closed_title(self._closed, about["model"])
                console.print(render_closed_table(rows, title, OURS))
            notes += render_closed_notes(self._closed, rows, agreed)
        if self._spikes is not None:
            spike_rows = rows_of(self._spikes, self._reference)
            payload["spike"] = to_json(self._spikes, spike_rows, {})
            if is_markdown:
                console.print(render_markdown(spike_rows, OURS), markup=False, soft_wrap=True)
            else:
                scenario = self._spikes.scenario
                title = (
                    f"Spike on {about['model']}: {scenario.num_short} requests decode, a prompt of"
                    f" {scenario.long_prompt_tokens} tokens arrives"
                )
                console.print(render_table(spike_rows, title, OURS))
            notes += render_notes(self._spikes, spike_rows)
        for note in notes:
            console.print(note, markup=False, soft_wrap=True)
        return payload
