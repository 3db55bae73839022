"""What a server wrote of itself, and the machine that took those steps.

Owns reading one server life back from its telemetry, and the fit of its steps. Must not simulate or
judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from controller.config import Settings
from controller.simulation.hardware import HardwareProfile, Slowdown
from controller.simulation.recorded_noise import RecordedNoise
from controller.simulation.stored_steps import features_of, is_lesson, read_steps
from costmodel.features import Regime, StepFeatures
from costmodel.prior import fit_prior
from engine.config import EngineConfig
from store.errors import StoreError
from store.queries import TelemetryReader

MIN_STEPS: Final = 100
"""Fewer steps do not tell what a machine costs."""

SPEED_WINDOW_S: Final = 2.0
"""Seconds over which a machine's speed is taken for one."""

_MIN_WINDOW_STEPS: Final = 4
_PAGE: Final = 10_000
_MAX_NOISE: Final = 0.3
_CPU_BLOCK_SIZE: Final = 16
_CUDA_BLOCK_SIZE: Final = 256
_SERVED: Final = frozenset({"stop", "length"})
# What decides which request is served when; classes and targets come with the load.
_SETTINGS: Final = (
    "policy", "planner", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "max_waiting_requests", "is_prefix_caching_enabled",
)  # fmt: skip


class ReplayError(RuntimeError):
    """A run cannot be replayed; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of a server: its start in epoch milliseconds, its work, its seconds."""

    at_ms: int
    features: StepFeatures
    duration_s: float


@dataclass(frozen=True, slots=True)
class ServerHistory:
    """What one server life left in its database.

    `steps` are those that a cost model may learn from, oldest first. `verdicts` holds, for each
    request that ended, its arrival in epoch milliseconds, its class, and whether the server itself
    saw every target met.
    """

    settings: Settings
    device: str
    num_blocks: int
    steps: tuple[RecordedStep, ...]
    verdicts: tuple[tuple[int, str, bool], ...]

    @property
    def engine(self) -> EngineConfig:
        """The engine's limits, as far as they decide what is served when."""
        settings = self.settings
        is_cuda = self.device.startswith("cuda")
        block_size = settings.block_size or (_CUDA_BLOCK_SIZE if is_cuda else _CPU_BLOCK_SIZE)
        return EngineConfig(
            block_size=block_size,
            num_blocks=self.num_blocks,
            max_model_len=settings.max_model_len or self.num_blocks * block_size,
            max_num_seqs=settings.effective_max_num_seqs,
            max_num_batched_tokens=settings.effective_max_num_batched_tokens,
            max_waiting_requests=settings.max_waiting_requests,
            is_prefix_cache_enabled=settings.is_prefix_caching_enabled,
        )

    @property
    def policy(self) -> str:
        """The server's policy under the simulator's name."""
        return self.settings.planner_name


def read_history(url: str) -> ServerHistory:
    """Read the newest server life of a telemetry database; ReplayError says what is missing."""
    try:
        reader = TelemetryReader.open(url)
    except StoreError as error:
        raise ReplayError(f"the server's telemetry cannot be read: {error}") from error
    try:
        runs = reader.runs(limit=1)
        if not runs:
            raise ReplayError("the server's telemetry holds no run")
        run_id = runs[0]["run_id"]
        steps = read_steps(reader, run_id)
        ended = _every(lambda cursor: reader.requests(run_id=run_id, limit=_PAGE, cursor=cursor))
    except StoreError as error:
        raise ReplayError(f"the server's telemetry cannot be read: {error}") from error
    finally:
        reader.close()
    if not steps:
        raise ReplayError("the server's telemetry holds no step")
    return ServerHistory(
        settings=_settings(runs[0]["settings"]),
        device=str(runs[0]["device"]),
        num_blocks=int(steps[-1]["num_blocks_total"]),
        steps=tuple(
            RecordedStep(int(row["at"]), features_of(row), float(row["duration_s"]))
            for row in steps
            if is_lesson(row)
        ),
        verdicts=tuple(
            (
                int(row["arrived_at"]),
                str(row["slo_class"]),
                row["finish_reason"] in _SERVED and row["attained"] is not False,
            )
            for row in ended
        ),
    )


def fit_machine(steps: Iterable[RecordedStep], name: str = "measured") -> HardwareProfile:
    """Return the machine that took these steps; ReplayError if they are too few.

    The planes are the cost model's own fit to all of them (`costmodel.prior.fit_prior`), scaled so
    that the steps together take what they took; what it cannot tell is noise, as it was recorded.
    """
    samples = [(step.features, step.duration_s) for step in steps]
    if len(samples) < MIN_STEPS:
        raise ReplayError(f"{len(samples)} recorded steps are too few: {MIN_STEPS} are needed")
    rough = HardwareProfile(name, fit_prior(samples).coefficients, noise=0.0)
    seconds = np.array([each for _, each in samples])
    features = np.array([each for each, _ in samples], dtype=np.float64)
    predicted = rough.seconds_of(features)
    scale = float(seconds.sum() / predicted.sum())
    noise = min(_MAX_NOISE, float(np.log(seconds / (scale * predicted)).std()))
    planes = tuple(tuple(scale * each for each in plane) for plane in rough.planes)
    recorded = RecordedNoise.of(
        (step.regime, real_s, scale * formula_s)
        for (step, real_s), formula_s in zip(samples, predicted.tolist(), strict=True)
    )
    source = f"fitted to {len(samples)} recorded steps"
    return HardwareProfile(name, planes, noise, source=source, recorded=recorded)


def machine_over_time(
    machine: HardwareProfile, steps: Iterable[RecordedStep], started_ms: int
) -> HardwareProfile:
    """Return `machine` with the speed that it had in each `SPEED_WINDOW_S` seconds of a run.

    A neighbour on the same cores slows many steps in a row, which independent noise cannot show.
    The windows count from `started_ms` (epoch milliseconds), as virtual time does; one with fewer
    than `_MIN_WINDOW_STEPS` steps keeps the machine's own speed. What is left is the noise.
    """
    windows: dict[int, list[tuple[Regime, float, float]]] = {}
    for step in steps:
        window = int((step.at_ms - started_ms) / 1e3 // SPEED_WINDOW_S)
        mean_s = machine.seconds(step.features)
        windows.setdefault(window, []).append((step.features.regime, step.duration_s, mean_s))
    slowdowns: list[Slowdown] = []
    rests: list[tuple[Regime, float, float]] = []
    for window, pairs in sorted(windows.items()):
        factor = 1.0
        if window >= 0 and len(pairs) >= _MIN_WINDOW_STEPS:
            factor = sum(real for _, real, _ in pairs) / sum(mean for *_, mean in pairs)
            start_s = window * SPEED_WINDOW_S
            slowdowns.append(Slowdown(start_s, start_s + SPEED_WINDOW_S, factor))
        rests += [(regime, real, factor * mean) for regime, real, mean in pairs]
    if not slowdowns:
        return machine
    noise = min(_MAX_NOISE, float(np.std([math.log(real / mean) for _, real, mean in rests])))
    recorded = RecordedNoise.of(rests)
    return replace(machine, slowdowns=tuple(slowdowns), noise=noise, recorded=recorded)


def _settings(document: Mapping[str, Any]) -> Settings:
    """Return the settings that a run was stored with (ReplayError: of another version)."""
    try:
        return Settings(**{name: document[name] for name in _SETTINGS})
    except (KeyError, ValueError) as error:
        raise ReplayError(f"the server's stored settings cannot be used: {error}") from error


def _every(page_of: Callable[[str | None], Any]) -> list[dict[str, Any]]:
    """Return all rows of a listing, newest first."""
    rows: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        page = page_of(cursor)
        rows += page.rows
        cursor = page.next_cursor
        if cursor is None:
            return rows
