"""What settings are worth: promises kept by weight, and guards against winning at others' cost.

Owns the definition of the score. Must not search: it simulates the settings that it is given.

The score of settings over scenes is

    mean attainment − what the guards find too much.

Attainment of a scene is the weight of the OFFERED requests that met every target over the weight of
all of them; a refused one is missed, one without targets counts if it was served. Every guard
compares means with those of the shipped defaults on the same scenes, and costs as much as it is
overstepped:

- goodput: useful tokens per second (those of requests that met every target) may fall by 5 %: more
  requests must not be kept by serving only the small ones;
- longest gap: the 99th percentile of requests' longest gaps may grow by a quarter, or by 50 ms if
  that is more: token deadlines on average must not hide a stream that froze;
- worst class: no class may lose more than 2 points of attainment, or one request per scene if that
  is more: a heavy class must not live at a light one's cost.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from controller.simulation.measures import measure
from controller.simulation.run import simulate
from controller.tuning.space import TunedSettings
from controller.tuning.task import Scene, TuningTask

_GOODPUT_SHARE: Final = 0.95
_GAP_FACTOR: Final = 1.25
_GAP_SLACK_S: Final = 0.05
_CLASS_DROP: Final = 0.02
# What is left of sums in another order oversteps nothing.
_TIE: Final = 1e-9

Progress = Callable[[float], None]
"""Called with the share of a simulation that is done."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulation in the numbers that settings are judged by.

    `attainment` is by weight, `attainment_by_class` by count of the `num_offered` of each class.
    Seconds: `ttft_p99_s` and `tpot_p99_s` over the requests that have one, `gap_p99_s` over
    requests' longest gaps; None where nobody has one. `useful_tokens_per_s` as in
    `controller.simulation.measures`.
    """

    attainment: float
    attainment_by_class: Mapping[str, float]
    num_offered: Mapping[str, int]
    useful_tokens_per_s: float
    gap_p99_s: float | None
    ttft_p99_s: float | None
    tpot_p99_s: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outcome:
        """Rebuild an outcome; TypeError if it is none."""
        outcome = cls(**values)
        by_class = (outcome.attainment_by_class, outcome.num_offered)
        if not all(isinstance(each, Mapping) for each in by_class):
            raise TypeError("numbers by class must be objects")
        lengths = (outcome.gap_p99_s, outcome.ttft_p99_s, outcome.tpot_p99_s)
        numbers = [outcome.attainment, outcome.useful_tokens_per_s]
        numbers += [each for each in lengths if each is not None]
        numbers += [number for each in by_class for number in each.values()]
        for each in numbers:
            if isinstance(each, bool) or not isinstance(each, int | float):
                raise TypeError(f"must be a number, got {each!r}")
        return outcome


def run_scene(
    task: TuningTask, settings: TunedSettings, scene: Scene, progress: Progress | None = None
) -> Outcome:
    """Simulate one scene under these settings.

    ValueError if the engine cannot have them, SimulationError if they find nothing to do for
    somebody who waits.
    """
    result = simulate(
        scene.workload,
        "slo",
        task.hardware,
        task.config(settings, scene.seed),
        None if progress is None else lambda done, total: progress(done / max(total, 1)),
    )
    measures = measure(result, task.hardware)
    weights = task.weights
    kept = sum(weights[each.slo_class] for each in result.requests if each.is_kept)
    offered = sum(weights[each.slo_class] for each in result.requests)
    overall = measures.overall
    return Outcome(
        attainment=kept / offered,
        attainment_by_class={each.name: each.attainment for each in measures.classes},
        num_offered={each.name: each.num_offered for each in measures.classes},
        useful_tokens_per_s=measures.useful_tokens_per_s,
        gap_p99_s=None if overall.gap_s is None else overall.gap_s.p99,
        ttft_p99_s=None if overall.ttft_s is None else overall.ttft_s.p99,
        tpot_p99_s=None if overall.tpot_s is None else overall.tpot_s.p99,
    )


def score(outcomes: Sequence[Outcome], defaults: Sequence[Outcome]) -> float:
    """Return what settings are worth that had these outcomes where the defaults had theirs.

    Scene by scene, the first with the first. ValueError if there are fewer of the defaults'.
    """
    return statistics.fmean(each.attainment for each in outcomes) - sum(
        overstepped(outcomes, defaults).values()
    )


def overstepped(outcomes: Sequence[Outcome], defaults: Sequence[Outcome]) -> dict[str, float]:
    """Return by how much each guard is overstepped, as shares; only those that are.

    ValueError if there are fewer outcomes of the defaults.
    """
    if len(defaults) < len(outcomes):
        raise ValueError(f"{len(outcomes)} outcomes need as many of the defaults")
    theirs = defaults[: len(outcomes)]
    found = {}
    goodput, usual = (_mean(each.useful_tokens_per_s for each in o) for o in (outcomes, theirs))
    if goodput is not None and usual:
        found["goodput"] = _GOODPUT_SHARE - goodput / usual
    gap_s, usual_s = (_mean(each.gap_p99_s for each in o) for o in (outcomes, theirs))
    if gap_s is not None and usual_s:
        allowed_s = max(_GAP_FACTOR * usual_s, usual_s + _GAP_SLACK_S)
        found["longest gap"] = min(1.0, gap_s / allowed_s - 1.0)
    drops = [
        _drop(name, outcomes, theirs) for name in sorted({n for o in theirs for n in o.num_offered})
    ]
    found["worst class"] = max(drops, default=0.0)
    return {name: excess for name, excess in found.items() if excess > _TIE}


def _drop(name: str, outcomes: Sequence[Outcome], defaults: Sequence[Outcome]) -> float:
    """Return by how much more than allowed a class loses."""
    pairs = [
        (mine.attainment_by_class[name], usual.attainment_by_class[name], usual.num_offered[name])
        for mine, usual in zip(outcomes, defaults, strict=True)
        if name in usual.num_offered
    ]
    lost = statistics.fmean(usual - mine for mine, usual, _ in pairs)
    one_request = statistics.fmean(1.0 / num for _, _, num in pairs)
    return lost - max(_CLASS_DROP, one_request)


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
