"""`TuningTask`: what settings are tried on: a machine, promises, and traffic in two parts.

Owns which requests are tuned on and which are held out, and what makes two tasks the same. Must not
simulate or search.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from controller.policy.slo import SloClass
from controller.simulation.hardware import HardwareProfile
from controller.simulation.run import SimulationConfig
from controller.simulation.source import WorkloadSource
from controller.tuning.space import DEFAULTS, TunedSettings
from controller.workload.arrivals import Workload
from controller.workload.transforms import window
from engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Scene:
    """One simulation: requests, and the seed of the machine's noise."""

    workload: Workload
    seed: int


@dataclass(frozen=True, slots=True)
class TuningTask:
    """Everything that is the same for all settings that are tried.

    `engine` gives the machine's limits; `max_num_seqs` is replaced by what is tried. `max_tokens`
    is what clients ask for (None = exactly what they get). `tuning` scenes choose, `held_out` ones
    judge: no request is in both. ValueError names what is missing.
    """

    name: str
    hardware: HardwareProfile
    engine: EngineConfig
    classes: tuple[SloClass, ...]
    default_class: str
    tuning: tuple[Scene, ...]
    held_out: tuple[Scene, ...]
    max_tokens: int | None = 2048

    def __post_init__(self) -> None:
        """Check that both parts hold requests."""
        for name in ("tuning", "held_out"):
            scenes = getattr(self, name)
            if not scenes:
                raise ValueError(f"{name} needs at least one seed")
            if not all(scene.workload.arrivals for scene in scenes):
                raise ValueError(f"{self.name}: the {name.replace('_', '-')} part has no request")

    def config(self, settings: TunedSettings, seed: int) -> SimulationConfig:
        """Return the simulation of these settings; ValueError if the engine cannot have them."""
        return SimulationConfig(
            engine=replace(self.engine, max_num_seqs=self.num_seats(settings)),
            classes=self.classes,
            default_class=self.default_class,
            seed=seed,
            planner=settings.planner,
            max_tokens=self.max_tokens,
        )

    def num_seats(self, settings: TunedSettings) -> int:
        """Return how many requests may run: the shipped number within the tokens of a step, as in a
        server; another number as it is.
        """
        seats = settings.max_num_seqs
        is_shipped = seats == DEFAULTS.max_num_seqs
        return min(seats, self.engine.max_num_batched_tokens) if is_shipped else seats

    @property
    def weights(self) -> dict[str, float]:
        """Weight by class, `default` among them."""
        return {"default": 1.0} | {each.name: each.weight for each in self.classes}

    def fingerprint(self) -> dict[str, str]:
        """Return what must be equal for results to be compared, each number by its name.

        The shipped settings are among them: trial 0 and every guard compare with those.
        """
        engine = asdict(self.engine)
        del engine["max_num_seqs"]  # a knob
        classes = {each.name: asdict(each) for each in self.classes}
        return {
            "version": metadata.version("paceline"),
            "workload": self.name,
            **_flat("hardware", _without_record(self.hardware.to_json())),
            **_flat("engine", engine),
            "classes": ", ".join(classes),
            **_flat("class", classes),
            "default class": self.default_class,
            "max_tokens": json.dumps(self.max_tokens),
            **_flat("shipped", DEFAULTS.to_json()),
            "tuning part": _summary(self.tuning),
            "held-out part": _summary(self.held_out),
        }


def task_of_source(
    source: WorkloadSource,
    hardware: HardwareProfile,
    engine: EngineConfig,
    classes: Sequence[SloClass],
    *,
    default_class: str = "default",
    load: float = 1.0,
    seed: int = 0,
    num_seeds: int = 3,
    num_held_out_seeds: int = 5,
    held_out_share: float = 0.4,
    max_tokens: int | None = 2048,
    progress: Callable[[str, int, int], None] | None = None,
) -> TuningTask:
    """Return a task over a trace or a generator at `load` times their own rate.

    A generator draws other requests for every seed, and the held-out part has seeds of its own. A
    trace is cut in time: its last `held_out_share` is held out; seeds then draw what is left to
    chance, which is classes, the jitter of quantised arrivals and the machine's noise. `progress`
    is told before each of them is made. ValueError says what is wrong.
    """
    num_scenes = num_seeds + num_held_out_seeds
    scenes = []
    for index in range(num_scenes):
        if progress is not None:
            progress("making the traffic", index, num_scenes)
        workload = source.workload(load, seed + index)
        if source.trace is not None:
            workload = cut_in_time(workload, held_out_share)[index >= num_seeds]
        scenes.append(Scene(workload, seed + index))
    return TuningTask(
        name=_name_of(source, load),
        hardware=hardware,
        engine=engine,
        classes=tuple(classes),
        default_class=default_class,
        tuning=tuple(scenes[:num_seeds]),
        held_out=tuple(scenes[num_seeds:]),
        max_tokens=max_tokens,
    )


def cut_in_time(workload: Workload, held_out_share: float) -> tuple[Workload, Workload]:
    """Return a workload's beginning and its last `held_out_share`, by time.

    ValueError unless the share is between 0 and 1, or if all arrive at once.
    """
    if not 0.0 < held_out_share < 1.0:
        raise ValueError(f"held_out_share must be between 0 and 1, got {held_out_share}")
    cut_s = workload.duration_s * (1.0 - held_out_share)
    if cut_s <= 0.0:
        raise ValueError(f"workload {workload.name!r} arrives at once and cannot be cut in two")
    return window(workload, 0.0, cut_s), window(workload, cut_s, math.inf)


def _name_of(source: WorkloadSource, load: float) -> str:
    words = [source.generator if source.trace is None else Path(source.trace).name]
    if source.start_s or source.duration_s is not None:
        words.append(f"from {source.start_s:g} s")
    if source.duration_s is not None:
        words.append(f"for {source.duration_s:g} s")
    if source.max_requests is not None:
        words.append(f"({source.max_requests} requests)")
    if load != 1.0:
        words.append(f"at {load:g} times its rate")
    return " ".join(word for word in words if word)


def _scene_json(scene: Scene) -> list[Any]:
    return [
        scene.seed,
        [
            [a.at_s, a.num_prompt_tokens, a.num_output_tokens, a.slo_class, list(a.prefix_ids)]
            for a in scene.workload.arrivals
        ],
    ]


def _summary(scenes: Sequence[Scene]) -> str:
    """Return what can be said of scenes in a line, and a digest of the rest."""
    seeds = ", ".join(str(scene.seed) for scene in scenes)
    num = sum(scene.workload.num_requests for scene in scenes)
    text = json.dumps([_scene_json(scene) for scene in scenes])
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
    return f"{num} requests over seeds {seeds} ({digest})"


def _without_record(machine: dict[str, Any]) -> dict[str, Any]:
    """Return a machine with what can be said of its recorded noise in a line."""
    recorded = machine.get("recorded")
    if recorded is None:
        return machine
    digest = hashlib.sha256(json.dumps(recorded).encode("utf-8")).hexdigest()[:16]
    return machine | {"recorded": f"{len(recorded['factors'])} steps ({digest})"}


def _flat(name: str, value: Any) -> dict[str, str]:
    """Return every number of nested tables as JSON by its path, so that one can be named."""
    if not isinstance(value, Mapping):
        return {name: json.dumps(value)}
    return {
        path: text
        for key, each in value.items()
        for path, text in _flat(f"{name} {key}", each).items()
    }
