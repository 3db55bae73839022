"""Hardware profiles from measurements: a table of GPU latencies, or a cost model that learnt.

Owns the fit and its error, and what `--hardware` may name. Must not run a step.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from controller.simulation.hardware import (
    BUILT_IN,
    HardwareError,
    HardwareProfile,
    read_document,
)
from costmodel.features import FloatArray, StepFeatures
from costmodel.fields import SnapshotError, read_mapping
from costmodel.nonneg import solve_nonnegative
from costmodel.snapshot import SnapshotKey, load_model

BoolArray = npt.NDArray[np.bool_]

_COLUMNS: Final = (
    "model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size",
    "prompt_time", "token_time",
)  # fmt: skip
_MAX_ROUNDS: Final = 20
# By how much one more plane must lessen the error to be worth it.
_LEAST_GAIN: Final = 0.1
_RIDGE: Final = 1e-9
_LEAST_SHARE: Final = 0.5
# E|N(0, σ)| = σ·√(2/π): from a mean absolute error to the σ of a log-normal factor.
_SIGMA_OF_MAE: Final = math.sqrt(math.pi / 2.0)
_MAX_NOISE: Final = 0.3


@dataclass(frozen=True, slots=True)
class FittedProfile:
    """A profile and how far it is from what was measured, as shares of the measured seconds.

    `num_points` distinct steps were fitted, each the median of its repeats; `num_left_out` took
    less than half of what a step with no more work of any kind took, and were not believed.
    `num_samples` counts the measurements.
    """

    profile: HardwareProfile
    num_samples: int
    num_points: int
    num_left_out: int
    mape: float
    p90_error: float
    max_error: float


def fit_profile(
    path: Path, model: str, hardware: str, tensor_parallel: int | None = None
) -> FittedProfile:
    """Fit a table in the format of splitwise-sim's `perf_model.csv` (times in milliseconds).

    Each row is a prefill step of `batch_size` prompts of `prompt_size` tokens, and a decode step
    of as many requests half-way through their answers. `tensor_parallel` None takes the largest
    degree that was measured. HardwareError names the file, the line and the column, or what the
    table holds instead.
    """
    repeats, degree = _read(path, model, hardware, tensor_parallel)
    features = np.array(list(repeats), dtype=np.float64)
    seconds = np.array([float(np.median(values)) for values in repeats.values()])
    is_sound = _is_sound(features, seconds)
    planes = _fit_planes(features[is_sound], seconds[is_sound])
    name = f"{model}-{hardware}-tp{degree}"
    spread = [
        abs(value / middle - 1.0)
        for values, middle in zip(repeats.values(), seconds.tolist(), strict=True)
        for value in values
    ]
    noise = min(_MAX_NOISE, _SIGMA_OF_MAE * float(np.mean(spread)))
    profile = HardwareProfile(name, planes, noise)
    errors = np.abs(profile.seconds_of(features) / seconds - 1.0)[is_sound]
    source = f"fitted to {path.name}: mean error {errors.mean():.1%}, largest {errors.max():.0%}"
    return FittedProfile(
        replace(profile, source=source),
        num_samples=sum(map(len, repeats.values())),
        num_points=len(errors),
        num_left_out=len(repeats) - len(errors),
        mape=float(errors.mean()),
        p90_error=float(np.quantile(errors, 0.9)),
        max_error=float(errors.max()),
    )


@runtime_checkable
class _HasPlanes(Protocol):
    """A learner whose prediction is a maximum over planes."""

    @property
    def coefficients(self) -> tuple[tuple[float, ...], ...]:
        """Seconds per unit and plane, in the order of `BASIS_NAMES`."""
        ...


def profile_of_snapshot(document: Mapping[str, Any]) -> HardwareProfile:
    """Return the machine that a stored cost model believes in (see `costmodel.snapshot`).

    Its noise is what the model could not predict of its last steps. HardwareError names the field.
    """
    try:
        stored = read_mapping(document, "key", "snapshot")
        names = SnapshotKey.__slots__
        key = SnapshotKey(**{name: stored.get(name) for name in names})  # type: ignore[arg-type]  # checked by it
        learner = load_model(document, key)
    except SnapshotError as error:
        raise HardwareError(str(error)) from error
    if not isinstance(learner, _HasPlanes):
        raise HardwareError(f"kind: a {learner.kind!r} has no planes to take for a machine")
    return HardwareProfile(
        f"{key.model}-{key.device}",
        learner.coefficients,
        noise=min(_MAX_NOISE, _SIGMA_OF_MAE * learner.quality().mape),
        source=f"learnt by {learner.kind} of {key.engine_version}",
    )


def _read(
    path: Path, model: str, hardware: str, tensor_parallel: int | None
) -> tuple[dict[StepFeatures, list[float]], int]:
    """Return seconds per distinct step, and the degree of parallelism taken."""
    by_degree: dict[int, dict[StepFeatures, list[float]]] = {}
    seen: set[str] = set()
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise HardwareError(f"{path}: line 1: column {missing[0]!r} is missing")
            for row in reader:
                seen.add(f"{row['model']} on {row['hardware']}")
                if (row["model"], row["hardware"]) != (model, hardware):
                    continue
                where = f"{path}: line {reader.line_num}"
                degree = int(_positive(row, "tensor_parallel", where))
                repeats = by_degree.setdefault(degree, {})
                for features, seconds in _steps(row, where):
                    repeats.setdefault(features, []).append(seconds)
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise HardwareError(f"{path}: {error}") from error
    if not by_degree:
        raise HardwareError(
            f"{path}: nothing was measured of {model!r} on {hardware!r};"
            f" there is {', '.join(sorted(seen)) or 'no row'}"
        )
    degree = max(by_degree) if tensor_parallel is None else tensor_parallel
    if degree not in by_degree:
        known = ", ".join(map(str, sorted(by_degree)))
        raise HardwareError(f"{path}: tensor_parallel {degree} was not measured; there is {known}")
    return by_degree[degree], degree


def _steps(row: Mapping[str, Any], where: str) -> Iterable[tuple[StepFeatures, float]]:
    prompt, batch = _positive(row, "prompt_size", where), _positive(row, "batch_size", where)
    context = prompt + _positive(row, "token_size", where) / 2.0
    prefill = StepFeatures(
        prompt * batch,
        chunk_squared_tokens=batch * prompt * prompt,
        num_chunks=batch,
        num_prompt_logits=batch,
    )
    decode = StepFeatures(num_decode_requests=batch, decode_context_tokens=batch * context)
    return (
        (prefill, _positive(row, "prompt_time", where) / 1e3),
        (decode, _positive(row, "token_time", where) / 1e3),
    )


def _positive(row: Mapping[str, Any], column: str, where: str) -> float:
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        raise HardwareError(f"{where}: {column} must be a number, got {row[column]!r}") from None
    if not (math.isfinite(value) and value > 0):
        raise HardwareError(f"{where}: {column} must be positive and finite, got {value}")
    return value


def _is_sound(features: FloatArray, seconds: FloatArray) -> BoolArray:
    """Which steps do not contradict another: more work cannot take less than half the time."""
    has_no_more = (features[None, :, :] <= features[:, None, :]).all(axis=2)
    too_fast = has_no_more & (seconds[:, None] < _LEAST_SHARE * seconds[None, :])
    return np.asarray(~too_fast.any(axis=1), dtype=np.bool_)


def _fit_planes(features: FloatArray, seconds: FloatArray) -> tuple[tuple[float, ...], ...]:
    """Fit `max over planes of (base + jump·[prefill] + token·tokens + extra·decodes)
    + read·context + pair·pairs` with non-negative coefficients to relative errors.

    The table never mixes prompts and decodes: that a token costs a mixed step what it costs a
    prompt, and that reading and attending are on top whatever the plane, is the formula of
    control.md section 9, and lets pure steps tell of mixed ones. A chunk has chunk·past + chunk²/2
    pairs, so what whole prompts tell holds for chunks too.

    Samples are shared among the planes and all are fitted, in turns until the shares settle
    (Magnani and Boyd, "Convex piecewise-linear fitting", 2009); of many ways to begin, the one that
    ends best is kept, with fewer planes where more gain little.
    """
    prefill, decodes, context, past, squared = features.T[:5]
    ones, has_prefill = np.ones(len(seconds)), (prefill > 0.0).astype(float)
    own = np.stack([ones, has_prefill, prefill + decodes, decodes], axis=1)
    shared = np.stack([context, past + squared / 2.0], axis=1)
    best = _Fit(math.inf, np.zeros((0, own.shape[1])), np.zeros(shared.shape[1]))
    for owners in _beginnings(prefill, decodes):
        found = _alternate(own, shared, seconds, owners)
        is_larger = len(found.planes) > len(best.planes)
        if found.error < best.error * (1.0 - _LEAST_GAIN if is_larger else 1.0):
            best = found
    read, pair = best.shared.tolist()
    return tuple(
        (base, jump, token, token + extra, read, pair, pair / 2.0, 0.0, 0.0)
        for base, jump, token, extra in best.planes.tolist()
    )


class _Fit(NamedTuple):
    """Mean relative error, coefficients per plane, and those that all planes share."""

    error: float
    planes: FloatArray
    shared: FloatArray


def _beginnings(prefill: FloatArray, decodes: FloatArray) -> Iterator[FloatArray]:
    """Yield first shares of the samples, those of few planes first."""
    tokens = prefill + decodes
    is_prefill = (prefill > 0.0).astype(int)
    cuts = np.unique(np.quantile(tokens, np.linspace(0.1, 0.9, 9)))
    yield np.zeros(len(tokens), dtype=int)
    yield is_prefill
    for cut in cuts:
        yield (tokens > cut).astype(int)
    for cut in cuts:
        yield is_prefill * (1 + (tokens > cut))


def _alternate(
    own: FloatArray, shared: FloatArray, seconds: FloatArray, owners: FloatArray
) -> _Fit:
    """Return the best fit of a few rounds."""
    best = _Fit(math.inf, np.zeros((0, own.shape[1])), np.zeros(shared.shape[1]))
    for _ in range(_MAX_ROUNDS):
        names = np.unique(owners)
        blocks = [own * (owners == name)[:, None] for name in names]
        solution = _solve(np.hstack([*blocks, shared]), seconds)
        planes = solution[: -shared.shape[1]].reshape(len(names), -1)
        rest = solution[-shared.shape[1] :]
        predicted = own @ planes.T
        error = float(np.abs((predicted.max(axis=1) + shared @ rest) / seconds - 1.0).mean())
        if error < best.error:
            best = _Fit(error, planes, rest)
        renewed = names[predicted.argmax(axis=1)]
        if (renewed == owners).all():
            break
        owners = renewed
    return best


def _solve(rows: FloatArray, seconds: FloatArray) -> FloatArray:
    """Non-negative least squares on relative errors, in scaled columns."""
    relative = rows / seconds[:, None]
    scales = np.maximum(relative.max(axis=0), 1e-300)
    scaled = relative / scales
    gram = scaled.T @ scaled + _RIDGE * np.eye(scaled.shape[1])
    moment = scaled.sum(axis=0)
    solution: FloatArray = solve_nonnegative(gram, moment, np.zeros(len(moment)), 200) / scales
    return solution


def hardware_of(text: str) -> HardwareProfile:
    """Return the machine that `--hardware` names.

    A built-in name; a JSON file with a profile or with a cost model's snapshot; or
    `TABLE.csv:MODEL:HARDWARE[:TENSOR_PARALLEL]`, fitted. HardwareError says what is wrong.
    """
    if text in BUILT_IN:
        return BUILT_IN[text]
    table, *names = text.split(":")
    if table.endswith(".csv"):
        if len(names) not in (2, 3):
            raise HardwareError(f"{text!r}: expected {table}:MODEL:HARDWARE[:TENSOR_PARALLEL]")
        degree = None
        if len(names) == 3:
            if not names[2].isdecimal():
                raise HardwareError(f"{text!r}: tensor_parallel must be a number")
            degree = int(names[2])
        return fit_profile(Path(table), names[0], names[1], degree).profile
    path = Path(text)
    if not path.is_file():
        raise HardwareError(
            f"no hardware {text!r}: choose from {', '.join(BUILT_IN)}, or name a JSON file or a"
            " table as TABLE.csv:MODEL:HARDWARE"
        )
    document = read_document(path)
    try:
        if "state" in document:
            return profile_of_snapshot(document)
        return HardwareProfile.from_json(document)
    except HardwareError as error:
        raise HardwareError(f"{path}: {error}") from error
