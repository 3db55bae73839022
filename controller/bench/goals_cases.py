"""The workloads that the goals are judged on: traces and machines, classes and what they are
promised.

Owns which requests, which targets, which machine. Must not simulate.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from controller.bench.goals_scene import GoalScene
from controller.policy.slo import Slo, SloClass
from controller.simulation.hardware import HardwareProfile
from controller.simulation.run import SimulationConfig, engine_for
from controller.simulation.source import Mix, WorkloadSource
from controller.workload.arrivals import Workload
from costmodel.features import StepFeatures

DEFAULT_REQUESTS: Final = 1000
DEFAULT_START_S: Final = 600.0
MIX: Final[Mix] = (("chat", 50.0), ("code", 30.0), ("batch", 20.0))
# In an overload the top class must be able to fit: a paid tier, beside a majority that can wait.
OVERLOAD_MIX: Final[Mix] = (("chat", 20.0), ("code", 30.0), ("batch", 50.0))
# Weights stand against prompt lengths: ratios beyond those of the lengths are priorities.
WEIGHTS: Final = {"chat": 1000.0, "code": 30.0, "batch": 1.0}
TOP_CLASS: Final = "chat"
# Arrivals of an overload: four times the longest TTFT target, so that a backlog cannot hide it.
OVERLOAD_S: Final = 240.0
# Seconds and seconds per token.
_AZURE: Final = {"chat": (1.0, 0.05), "code": (2.0, 0.1), "batch": (60.0, 0.5)}
_MOONCAKE: Final = {"chat": (4.0, 0.05), "code": (10.0, 0.1), "batch": (60.0, 0.5)}
_CHANGING: Final = {"chat": (1.0, 0.03), "code": (3.0, 0.25), "batch": (20.0, 0.5)}
# A decode of this machine alone takes 30 ms, a mixed step 54 ms.
_TPOT_FACTOR: Final = {"h100-70b": 2.0}
_PERIOD_S: Final = 40.0
_CYCLES: Final = 4
_BUSY_DECODES: Final = 64.0


class Kind(enum.StrEnum):
    """Which traffic a case has."""

    AZURE_CODE = "azure-code"
    AZURE_CONV = "azure-conv"
    MOONCAKE = "mooncake"
    CHANGING = "changing"
    ONE_CLASS = "azure-conv, one class"


# Requests of a trace for each one of Azure's code. A run has to last three times as long as batch
# may wait, or an overload hides in its backlog: of conversations a machine serves four times as
# many in a second, of Mooncake's long prompts half as many. One class waits for a second only.
_SHARES: Final = {
    Kind.AZURE_CODE: 1.0, Kind.AZURE_CONV: 3.0, Kind.MOONCAKE: 0.6, Kind.ONE_CLASS: 1.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the study is made of: trace files (None = left out), machines, its size.

    Of Azure's code the first `num_requests` after `start_s` are taken, of its conversations three
    times as many (as many where everybody is promised the same), of Mooncake's 60 %.
    """

    azure_code: Path | None
    azure_conv: Path | None
    mooncake: Path | None
    hardware: tuple[HardwareProfile, ...]
    num_requests: int = DEFAULT_REQUESTS
    start_s: float = DEFAULT_START_S


@dataclass(frozen=True, slots=True)
class Case:
    """One traffic on one machine. `base_rate` is the rate in requests per second at load 1,
    `start_rate` a guess at what the machine can do, where a search may begin.
    """

    kind: Kind
    scene: GoalScene
    base_rate: float
    start_rate: float
    num_requests: int

    @property
    def name(self) -> str:
        """The case in a word or two, as it stands in the report."""
        return f"{self.kind.value}, {self.scene.hardware.name}"

    def load(self, rate: float) -> float:
        """Return the multiple of the workload's own rate that is `rate` requests per second."""
        return rate / self.base_rate

    def lasting(self) -> Case:
        """Return the case with arrivals that last as long as an overload is watched."""
        return replace(self, scene=replace(self.scene, horizon_s=OVERLOAD_S))

    def weighted(self) -> Case:
        """Return the case with the shares, the weights and the length of an overload."""
        scene, config = self.scene, self.scene.config
        classes = tuple(replace(each, weight=WEIGHTS[each.name]) for each in config.classes)
        source = replace(scene.source, mix=OVERLOAD_MIX)
        config = replace(config, classes=classes)
        scene = replace(scene, source=source, config=config, horizon_s=OVERLOAD_S)
        return replace(self, scene=scene)


def steady_cases(inputs: Inputs) -> list[Case]:
    """Return mixed classes on every trace that there is, on every machine.

    Raises what reading a trace raises: `SourceError`, `TraceError`.
    """
    files = (
        (Kind.AZURE_CONV, inputs.azure_conv, _AZURE),
        (Kind.AZURE_CODE, inputs.azure_code, _AZURE),
        (Kind.MOONCAKE, inputs.mooncake, _MOONCAKE),
    )
    return [
        _case(kind, _trace_source(kind, path, inputs, MIX), hardware, targets)
        for hardware in inputs.hardware
        for kind, path, targets in files
        if path is not None
    ]


def one_class_cases(inputs: Inputs) -> list[Case]:
    """Return everybody being promised the same, on Azure's conversations."""
    if inputs.azure_conv is None:
        return []
    source = _trace_source(Kind.ONE_CLASS, inputs.azure_conv, inputs, ((TOP_CLASS, 1.0),))
    targets = {TOP_CLASS: _AZURE[TOP_CLASS]}
    return [_case(Kind.ONE_CLASS, source, hardware, targets) for hardware in inputs.hardware]


def changing_cases(inputs: Inputs) -> list[Case]:
    """Return traffic that alternates between chat and code with batch, 40 s each.

    Lengths are those of Azure's conversations if they are given, otherwise lognormal like them.
    """
    lengths = "" if inputs.azure_conv is None else f",lengths={inputs.azure_conv}"
    phase = f"period={_PERIOD_S:g},rate=1{lengths},classes="
    cycles = max(1, round(_CYCLES * inputs.num_requests / DEFAULT_REQUESTS))
    line = f"square:duration={cycles * 2 * _PERIOD_S:g};{phase}chat:1;{phase}code:60/batch:40"
    source = WorkloadSource(generator=line)
    return [_case(Kind.CHANGING, source, hardware, _CHANGING) for hardware in inputs.hardware]


def targets_of(case: Case) -> list[tuple[str, float, float]]:
    """Return (class, TTFT in seconds, TPOT in seconds) of every class."""
    found = []
    for each in case.scene.config.classes:
        slo = each.slo
        assert slo.ttft_s is not None  # noqa: S101 - every class here has both
        assert slo.tpot_s is not None  # noqa: S101
        found.append((each.name, slo.ttft_s, slo.tpot_s))
    return found


def machine_rate(workload: Workload, hardware: HardwareProfile) -> float:
    """Return about how many requests per second of such lengths the machine can serve.

    A step of 64 decodes and the prompt tokens that go with them, over the answers that it moves on.
    """
    arrivals: Sequence[tuple[int, int]] = [
        (each.num_prompt_tokens, each.num_output_tokens) for each in workload.arrivals
    ]
    prompt, output = np.mean(arrivals, axis=0).tolist()
    chunk = _BUSY_DECODES * prompt / output
    step_s = hardware.seconds(
        StepFeatures(
            num_prefill_tokens=chunk,
            num_decode_requests=_BUSY_DECODES,
            decode_context_tokens=_BUSY_DECODES * (prompt + output / 2.0),
            chunk_past_tokens=chunk * prompt / 2.0,
            num_chunks=1.0,
        )
    )
    return float(_BUSY_DECODES / output / step_s)


def _trace_source(kind: Kind, path: Path, inputs: Inputs, mix: Mix) -> WorkloadSource:
    share = _SHARES[kind]
    return WorkloadSource(
        trace=str(path),
        start_s=inputs.start_s,
        max_requests=max(1, round(inputs.num_requests * share)),
        mix=mix,
        is_by_length=kind is Kind.MOONCAKE,
    )


def _case(
    kind: Kind,
    source: WorkloadSource,
    hardware: HardwareProfile,
    targets: dict[str, tuple[float, float]],
) -> Case:
    factor = _TPOT_FACTOR.get(hardware.name, 1.0)
    classes = tuple(
        SloClass(name, Slo(ttft_s=ttft_s, tpot_s=tpot_s * factor))
        for name, (ttft_s, tpot_s) in targets.items()
    )
    config = SimulationConfig(engine=engine_for(hardware), classes=classes)
    scene = GoalScene(source, hardware, config)
    workload = scene.workload(1.0, 0)
    # A generator's rate is the one that it was asked for, a trace's the one that it has.
    base_rate = 1.0 if source.trace is None else workload.rate
    if base_rate <= 0.0:
        raise ValueError(f"{kind.value}: the window of the trace has no rate: too few requests")
    start_rate = machine_rate(workload, hardware)
    return Case(kind, scene, base_rate, start_rate, workload.num_requests)
