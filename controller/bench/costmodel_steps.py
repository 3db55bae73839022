"""Steps to judge a cost model by: stored, measured elsewhere, or synthetic.

Owns where series of steps come from and what is left out of them. Must not hold a model.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from controller.simulation.stored_steps import StepReader, features_of, is_lesson, read_steps
from costmodel.features import StepFeatures
from costmodel.synthetic import ACCELERATOR, TWO_CORES, SyntheticDevice, synthetic_steps

DEVICES: dict[str, SyntheticDevice] = {"accelerator": ACCELERATOR, "two cores": TWO_CORES}
# More than this factor off the truth is an outlier that was put there, not noise.
_OUTLIER = 2.0
# A larger batch may be measured a little quicker by chance, not by this factor.
_QUICKER = 1.3
_TABLE_COLUMNS = (
    "model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size",
    "prompt_time", "token_time",
)  # fmt: skip


class SourceError(ValueError):
    """A source of steps cannot be used; the message names the place."""


class TimedStep(NamedTuple):
    """One executed step; `is_outlier` where the source knows that its duration means nothing."""

    features: StepFeatures
    latency_s: float
    is_outlier: bool = False


@dataclass(frozen=True, slots=True)
class StepSeries:
    """Steps in order, and how many the source held that no model may learn from."""

    name: str
    steps: tuple[TimedStep, ...]
    num_left_out: int = 0

    def slowed(self, factor: float, first: int) -> StepSeries:
        """Return the series on a machine that is `factor` times as slow from step `first` on."""
        steps = tuple(
            step._replace(latency_s=step.latency_s * (factor if index >= first else 1.0))
            for index, step in enumerate(self.steps)
        )
        return StepSeries(f"{self.name} ×{factor:g}", steps, self.num_left_out)

    def blinded(self) -> StepSeries:
        """Return the series as seen by a model that knows of neither chunks nor prompt logits."""
        steps = tuple(
            step._replace(features=step.features._replace(num_chunks=0.0, num_prompt_logits=0.0))
            for step in self.steps
        )
        return StepSeries(f"{self.name}, blind", steps, self.num_left_out)


def synthetic_series(
    name: str, num_steps: int, *, noise: float = 0.03, outlier_share: float = 0.005, seed: int = 0
) -> StepSeries:
    """Return steps of a make-believe device of `DEVICES`."""
    stream = synthetic_steps(DEVICES[name], seed, noise=noise, outlier_share=outlier_share)
    steps = tuple(
        TimedStep(s.features, s.measured_s, s.measured_s > _OUTLIER * s.true_s)
        for s in islice(stream, num_steps)
    )
    return StepSeries(f"synthetic {name}", steps)


def stored_series(reader: StepReader, run_id: str, max_steps: int = 20_000) -> StepSeries:
    """Return the steps that a server run stored, oldest first; SourceError if there are none.

    Left out are steps that the server itself would not have learnt from (`is_lesson`).
    """
    rows = read_steps(reader, run_id, max_steps)
    if not rows:
        raise SourceError(f"run {run_id!r} stored no step")
    usable = [row for row in rows if is_lesson(row)]
    steps = tuple(TimedStep(features_of(row), float(row["duration_s"])) for row in usable)
    return StepSeries(f"run {run_id}", steps, len(rows) - len(usable))


def measured_series(
    path: Path, model: str, num_steps: int, seed: int = 0
) -> tuple[StepSeries, ...]:
    """Return one series per hardware and degree of parallelism that a table of measured prompt and
    token times (splitwise-sim's `perf_model.csv`) holds for `model`.

    Each row gives a prefill step of the whole batch and a decode step at mid-output context; steps
    are drawn from them at random. Left out are prefills that were measured quicker than smaller
    batches of the same prompts: the table holds runs that cannot have computed what it says (64
    prompts of 512 tokens in a sixth of the time of 32). SourceError names line and column.
    """
    try:
        kinds = _measured_steps(path, model)
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"{path}: no table of text in UTF-8: {error}") from error
    if not kinds:
        raise SourceError(f"{path}: no row of model {model!r}")
    series = []
    for (hardware, parallel), steps in sorted(kinds.items()):
        possible = _possible(steps)
        name = f"{model} on {parallel} {hardware}"
        num_left_out = len(steps) - len(possible)
        series.append(StepSeries(name, _drawn(possible, num_steps, seed), num_left_out))
    return tuple(series)


def _measured_steps(path: Path, model: str) -> dict[tuple[str, str], list[TimedStep]]:
    """Return the steps of a table by hardware and degree of parallelism."""
    kinds: dict[tuple[str, str], list[TimedStep]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = set(_TABLE_COLUMNS) - set(reader.fieldnames or ())
        if missing:
            raise SourceError(f"{path}: no column {', '.join(sorted(missing))}")
        for row in reader:
            if row["model"] == model:
                place = f"{path}, line {reader.line_num}"
                kind = (row["hardware"], row["tensor_parallel"])
                kinds.setdefault(kind, []).extend(_steps_of(row, place))
    return kinds


def _possible(steps: Sequence[TimedStep]) -> list[TimedStep]:
    """Return the steps but for prefills that a smaller batch of prompts as long outlasted."""
    longest: dict[float, list[tuple[float, float]]] = {}
    for features, latency_s, _ in steps:
        if features.num_chunks:
            length = features.num_prefill_tokens / features.num_chunks
            longest.setdefault(length, []).append((features.num_chunks, latency_s))

    def is_possible(step: TimedStep) -> bool:
        chunks = step.features.num_chunks
        if not chunks:
            return True
        others = longest[step.features.num_prefill_tokens / chunks]
        return all(latency_s <= _QUICKER * step.latency_s for n, latency_s in others if n < chunks)

    return [step for step in steps if is_possible(step)]


def _steps_of(row: dict[str, str], place: str) -> Iterable[TimedStep]:
    numbers = {}
    for name in _TABLE_COLUMNS[3:]:
        try:
            numbers[name] = float(row[name])
        except (TypeError, ValueError):
            raise SourceError(f"{place}, {name}: no number in {row[name]!r}") from None
        if not 0.0 < numbers[name] < 1e12:
            raise SourceError(f"{place}, {name}: must be positive, got {row[name]}")
    prompt, batch = numbers["prompt_size"], numbers["batch_size"]
    context = batch * (prompt + numbers["token_size"] / 2.0)
    prefill = StepFeatures(
        prompt * batch,
        chunk_squared_tokens=batch * prompt * prompt,
        num_chunks=batch,
        num_prompt_logits=batch,
    )
    yield TimedStep(prefill, numbers["prompt_time"] / 1000.0)
    decode = StepFeatures(num_decode_requests=batch, decode_context_tokens=context)
    yield TimedStep(decode, numbers["token_time"] / 1000.0)


def _drawn(steps: Sequence[TimedStep], num_steps: int, seed: int) -> tuple[TimedStep, ...]:
    rng = np.random.default_rng(seed)
    return tuple(steps[index] for index in rng.integers(0, len(steps), num_steps).tolist())
