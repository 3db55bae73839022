"""The traffic of a mixed load: the same arrival list for every policy, at any rate.

Owns how rate, span and seed become arrivals with classes, and arrivals become requests. Must not
send anything or know a policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from controller.bench.load_classes import DEFAULT_CLASSES, LoadClass
from controller.bench.scenario import PromptSource, ScenarioRequest
from controller.policy.slo import SloClass
from controller.workload.arrivals import Arrival, Workload
from controller.workload.generators import Phase, gamma, square_wave
from controller.workload.traces import read_trace
from controller.workload.transforms import (
    assign_classes_by_length,
    clip_lengths,
    merge,
    scale_lengths,
    take,
    with_rate,
)

KINDS: Final = ("poisson", "gamma", "square")


@dataclass(frozen=True, slots=True)
class LoadTraffic:
    """Where arrivals come from. ValueError names the field.

    `kind` is `poisson`; `gamma` with `shape` as the squared coefficient of variation of each
    class's gaps; or `square`, whose phases of `shape` seconds hold the first class alone and the
    other classes in turn. `trace` (a file) replaces all three: its requests keep their pattern and
    lengths, and get classes by prompt length where it names none. Lengths are multiplied by
    `length_scale`, then cut down to a context of `max_model_len` tokens (None = as they are).
    """

    classes: tuple[LoadClass, ...] = DEFAULT_CLASSES
    kind: str = "poisson"
    shape: float = 1.0
    trace: Path | None = None
    length_scale: float = 1.0
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        """Check kind and classes; numbers are checked where they are used."""
        if self.kind not in KINDS:
            raise ValueError(f"arrivals must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not self.classes:
            raise ValueError("classes must not be empty")
        if self.kind == "square" and len(self.classes) < 2:
            raise ValueError("square needs two classes or more: one of them has a phase alone")

    @property
    def mix(self) -> dict[str, float]:
        """Relative shares of the classes."""
        return {each.name: each.share for each in self.classes}

    def workload(self, rate: float, duration_s: float, seed: int) -> Workload:
        """Return arrivals at `rate` requests per second over `duration_s` seconds.

        The same arguments give the same list. ValueError names what is wrong, or says that nobody
        arrives.
        """
        if self.trace is not None:
            made = self._traced(self.trace, rate, duration_s, seed)
        elif self.kind == "square":
            made = self._square(rate, duration_s, seed)
        else:
            made = self._steady(rate, duration_s, seed)
        if self.length_scale != 1.0:
            made = scale_lengths(made, prompt=self.length_scale, output=self.length_scale)
        if self.max_model_len is not None:
            made = clip_lengths(made, self.max_model_len)
        if not made.arrivals:
            raise ValueError(f"nobody arrives within {duration_s:g} s at {rate:g} per second")
        return made

    def to_json(self) -> dict[str, Any]:
        """Return the words as JSON values."""
        return {
            "classes": [each.text for each in self.classes],
            "kind": self.kind if self.trace is None else "trace",
            "shape": self.shape,
            "trace": None if self.trace is None else str(self.trace),
            "length_scale": self.length_scale,
            "max_model_len": self.max_model_len,
        }

    def _steady(self, rate: float, duration_s: float, seed: int) -> Workload:
        """One stream per class, so that each bursts by itself; merged Poisson stays Poisson."""
        total = sum(each.share for each in self.classes)
        burstiness = self.shape if self.kind == "gamma" else 1.0
        return merge(
            *(
                _of_class(
                    gamma(
                        rate * each.share / total,
                        duration_s,
                        each.lengths,
                        # Of one seed, all classes would arrive at the same instants.
                        seed * len(self.classes) + index,
                        burstiness=burstiness,
                    ),
                    each.name,
                )
                for index, each in enumerate(self.classes)
            ),
            name=self.kind,
        )

    def _square(self, rate: float, duration_s: float, seed: int) -> Workload:
        first, *others = self.classes
        phases = [
            Phase(
                self.shape,
                rate,
                part[0].lengths,
                {each.name: each.share for each in part},
                {each.name: each.lengths for each in part},
            )
            for part in ([first], others)
        ]
        return square_wave(phases, duration_s, seed)

    def _traced(self, path: Path, rate: float, duration_s: float, seed: int) -> Workload:
        num_requests = max(2, round(rate * duration_s))
        trace = read_trace(path, seed=seed)
        if trace.num_requests < num_requests:
            raise ValueError(
                f"{path} holds {trace.num_requests} requests, {num_requests} are needed for"
                f" {duration_s:g} s at {rate:g} per second"
            )
        taken = with_rate(take(trace, num_requests), rate)
        # Prompts are drawn, so what a trace says of shared prefixes does not hold.
        taken = Workload(taken.name, tuple(replace(a, prefix_ids=()) for a in taken.arrivals))
        named = set(taken.class_counts)
        if named == {None}:
            by_length = sorted(self.classes, key=lambda each: each.lengths.prompt_p50)
            return assign_classes_by_length(
                taken, {each.name: each.share for each in by_length}, seed
            )
        strangers = sorted(str(name) for name in named - set(self.mix))
        if strangers:
            raise ValueError(f"{path} names class {strangers[0]!r}; known: {', '.join(self.mix)}")
        return taken


def parse_arrivals(text: str) -> tuple[str, float]:
    """Read `poisson`, `gamma:4` or `square:40`; return kind and shape, ValueError if it is none."""
    kind, sign, number = text.partition(":")
    if kind not in KINDS or bool(sign) == (kind == "poisson"):
        raise ValueError(f"arrivals must be poisson, gamma:CV² or square:SECONDS, got {text!r}")
    if not sign:
        return kind, 1.0
    try:
        shape = float(number)
    except ValueError:
        shape = math.nan
    if not (math.isfinite(shape) and shape > 0):
        raise ValueError(f"{kind} needs a positive number, got {number!r}")
    return kind, shape


def requests_of(
    workload: Workload, classes: Mapping[str, SloClass], prompts: PromptSource
) -> tuple[ScenarioRequest, ...]:
    """Return the request of every arrival, in order, with the targets of its class.

    KeyError on a class that does not exist.
    """
    return tuple(
        ScenarioRequest(
            f"load-{index}",
            prompts.draw(arrival.num_prompt_tokens),
            arrival.num_output_tokens,
            ttft_s=classes[_name(arrival)].slo.ttft_s,
            tpot_s=classes[_name(arrival)].slo.tpot_s,
            slo_class=_name(arrival),
        )
        for index, arrival in enumerate(workload.arrivals)
    )


def _name(arrival: Arrival) -> str:
    assert arrival.slo_class is not None  # noqa: S101 - every request of this traffic has a class
    return arrival.slo_class


def _of_class(workload: Workload, name: str) -> Workload:
    return Workload(name, tuple(replace(a, slo_class=name) for a in workload.arrivals))
