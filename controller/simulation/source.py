"""`WorkloadSource`: a workload as a few words: a trace or generators, its classes, its span.

Owns the words of `--trace` and `--generate`, and how load and seed change what they give. Must not
simulate: it can be sent to another process and makes the same workload there.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from controller.workload.arrivals import Workload
from controller.workload.generators import Phase, gamma, square_wave
from controller.workload.lengths import FixedLengths, LengthSource, LognormalLengths, TraceLengths
from controller.workload.traces import read_trace
from controller.workload.transforms import (
    assign_classes,
    assign_classes_by_length,
    clip_lengths,
    scale_rate,
    take,
    window,
)

Mix = tuple[tuple[str, float], ...]
# Azure's conversations (2023): medians and 99th percentiles of prompts and answers.
_PROMPT: Final = "1020/4142"
_OUTPUT: Final = "129/601"
_KEYS: Final = ("rate", "duration", "burstiness", "prompt", "output", "lengths", "mix")


class SourceError(ValueError):
    """A workload cannot be made of these words; the message names the one that is wrong."""


class GeneratorSpec(NamedTuple):
    """Traffic from a formula: `rate` requests per second for `duration_s` seconds.

    `prompt` and `output` are a length, or a median and a 99th percentile (`p50/p99`); `lengths` is
    a trace file whose pairs of lengths are drawn instead.
    """

    rate: float
    duration_s: float
    burstiness: float = 1.0
    prompt: str = _PROMPT
    output: str = _OUTPUT
    lengths: str | None = None
    mix: Mix = ()


@dataclass(frozen=True, slots=True)
class WorkloadSource:
    """A trace, or one generator, or several that take turns.

    `trace_format` is one of `read_trace`'s. Arrivals before `start_s` and from `start_s +
    duration_s` on are left out of a trace; generators take turns until `duration_s`. `mix` gives
    classes at random, `is_by_length` in order of prompt length. Requests are cut down to
    `max_model_len` tokens (None = as they are), at most `max_requests` are kept. SourceError names
    the field.
    """

    trace: str | None = None
    generators: tuple[GeneratorSpec, ...] = ()
    trace_format: str = "auto"
    start_s: float = 0.0
    duration_s: float | None = None
    max_requests: int | None = None
    max_model_len: int | None = None
    mix: Mix = ()
    is_by_length: bool = False

    def __post_init__(self) -> None:
        """Check that there is one source."""
        if (self.trace is None) == (not self.generators):
            raise SourceError("give a trace or a generator, and not both")
        bursty = [each for each in self.generators if each.burstiness != 1.0]
        if bursty and len(self.generators) > 1:
            raise SourceError("burstiness: generators that take turns are Poisson")
        if self.generators and self.start_s:
            raise SourceError("start_s: only a trace has a start to leave out")

    def workload(self, load: float = 1.0, seed: int = 0) -> Workload:
        """Return the workload at `load` times its own rate.

        Of a trace it is the same requests in less time; a generator draws more of them in the same
        time. `seed` draws arrivals, lengths, classes and the jitter of quantised traces.
        SourceError or the trace's own error (both ValueErrors) say what is wrong.
        """
        if not (math.isfinite(load) and load > 0):
            raise SourceError(f"load must be a positive number, got {load}")
        try:
            workload = self._traced(load, seed) if self.trace else self._generated(load, seed)
            if self.max_model_len is not None:
                workload = clip_lengths(workload, self.max_model_len)
            if self.mix:
                assign = assign_classes_by_length if self.is_by_length else assign_classes
                workload = assign(workload, dict(self.mix), seed)
        except OSError as error:
            raise SourceError(f"{error.filename}: {error.strerror}") from error
        if not workload.arrivals:
            raise SourceError(f"workload {workload.name!r} holds no request")
        return workload

    @property
    def files(self) -> list[str]:
        """The trace files that are read."""
        named = [self.trace, *(each.lengths for each in self.generators)]
        return [path for path in named if path is not None]

    def to_json(self) -> dict[str, Any]:
        """Return the words as JSON values."""
        values = asdict(self)
        values["generators"] = [each._asdict() for each in self.generators]
        return values

    def _traced(self, load: float, seed: int) -> Workload:
        assert self.trace is not None  # noqa: S101 - asked before
        workload = _trace(self.trace, self.trace_format, seed)
        if self.start_s or self.duration_s is not None:
            end_s = math.inf if self.duration_s is None else self.start_s + self.duration_s
            workload = window(workload, self.start_s, end_s)
        if self.max_requests is not None:
            workload = take(workload, self.max_requests)
        return workload if load == 1.0 else scale_rate(workload, load)

    def _generated(self, load: float, seed: int) -> Workload:
        specs = self.generators
        if len(specs) == 1 and not specs[0].mix:
            spec = specs[0]
            workload = gamma(
                spec.rate * load,
                self.duration_s or spec.duration_s,
                _lengths(spec),
                seed,
                burstiness=spec.burstiness,
                name="poisson" if spec.burstiness == 1.0 else "gamma",
            )
        else:
            if any(each.burstiness != 1.0 for each in specs):
                raise SourceError("burstiness: a generator with a mix is Poisson")
            phases = [
                Phase(each.duration_s, each.rate * load, _lengths(each), dict(each.mix))
                for each in specs
            ]
            total_s = self.duration_s or sum(each.duration_s for each in specs)
            name = "poisson" if len(specs) == 1 else "square wave"
            workload = square_wave(phases, total_s, seed, name=name)
        return workload if self.max_requests is None else take(workload, self.max_requests)


def parse_generator(text: str) -> GeneratorSpec:
    """Read `poisson:rate=5,duration=60` or `gamma:rate=5,duration=60,burstiness=4`.

    Further keys: `prompt` and `output` (tokens, or `p50/p99`), `lengths` (a trace file to draw them
    from), `mix` (`chat:0.5+code:0.3`). SourceError names the key.
    """
    kind, _, rest = text.partition(":")
    if kind not in ("poisson", "gamma"):
        raise SourceError(f"{text!r} must begin with poisson: or gamma:")
    table: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, sign, value = item.partition("=")
        if key not in _KEYS or not sign:
            raise SourceError(f"{item!r} in {text!r}: expected one of {', '.join(_KEYS)} with =")
        if key in table:
            raise SourceError(f"{key} is given twice in {text!r}")
        table[key] = value
    for key in ("rate", "duration"):
        if key not in table:
            raise SourceError(f"{key} is missing in {text!r}")
    if kind == "poisson" and "burstiness" in table:
        raise SourceError(f"burstiness in {text!r} is gamma's")
    spec = GeneratorSpec(
        rate=_number(table["rate"], "rate"),
        duration_s=_number(table["duration"], "duration"),
        burstiness=_number(table.get("burstiness", "1"), "burstiness"),
        prompt=table.get("prompt", _PROMPT),
        output=table.get("output", _OUTPUT),
        lengths=table.get("lengths"),
        mix=parse_mix(table["mix"], "+", ":") if "mix" in table else (),
    )
    if spec.lengths is None:
        _lengths(spec)
    return spec


def parse_mix(text: str, between: str = ",", sign: str = "=") -> Mix:
    """Read shares of classes, `chat=0.5,code=0.3`; SourceError names the class."""
    mix: dict[str, float] = {}
    for item in text.split(between):
        name, _, share = item.partition(sign)
        if not name or name in mix:
            raise SourceError(f"{item!r} in mix {text!r}: expected NAME{sign}SHARE, each name once")
        mix[name] = _number(share, f"share of {name!r}")
    return tuple(mix.items())


@functools.lru_cache(maxsize=8)
def _trace(path: str, trace_format: str, seed: int) -> Workload:
    # Kept: a sweep asks for the same file at every load.
    return read_trace(Path(path), format=trace_format, seed=seed)


def _lengths(spec: GeneratorSpec) -> LengthSource:
    if spec.lengths is not None:
        return TraceLengths(_trace(spec.lengths, "auto", 0))
    prompt, output = _pair(spec.prompt, "prompt"), _pair(spec.output, "output")
    if prompt[0] == prompt[1] and output[0] == output[1]:
        return FixedLengths(round(prompt[0]), round(output[0]))
    return LognormalLengths(prompt[0], prompt[1], output[0], output[1])


def _pair(text: str, name: str) -> tuple[float, float]:
    median, _, high = text.partition("/")
    p50 = _number(median, name)
    p99 = _number(high, name) if high else p50
    if p99 < p50 or p50 < 1:
        raise SourceError(f"{name} must be tokens or p50/p99 with p99 not below p50, got {text!r}")
    return p50, p99


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise SourceError(f"{name} must be a number, got {text!r}") from None
    if not (math.isfinite(value) and value > 0):
        raise SourceError(f"{name} must be positive and finite, got {text!r}")
    return value
