"""Generators as one line of text, for a command line: `poisson:rate=8,classes=chat:70/batch:30`.

Owns the keys, their defaults and what is said of a wrong one. Must not draw: a line becomes
arguments of the generators.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from controller.workload.arrivals import Workload
from controller.workload.draws import check_positive
from controller.workload.generators import Phase, gamma, poisson, square_wave
from controller.workload.lengths import LengthSource, LognormalLengths, TraceLengths
from controller.workload.traces import TraceError, read_trace
from controller.workload.transforms import assign_classes, assign_classes_by_length

DEFAULT_DURATION_S: Final = 600.0
# Median and 99th percentile, in tokens, of Azure's conversation trace of 2023.
DEFAULT_PROMPT: Final = "1020/4142"
DEFAULT_OUTPUT: Final = "129/601"

_LENGTH_KEYS: Final = frozenset({"prompt", "output", "lengths"})
_STEADY_KEYS: Final = frozenset({"rate", "duration", "classes", "correlation"}) | _LENGTH_KEYS
_KEYS: Final = {
    "poisson": _STEADY_KEYS,
    "gamma": _STEADY_KEYS | {"burstiness"},
    "square": frozenset({"duration"}),
}
_PHASE_KEYS: Final = frozenset({"period", "rate", "classes"}) | _LENGTH_KEYS


class SpecError(ValueError):
    """A generator's line cannot be understood; the message quotes it and names the key."""


def generate(spec: str, seed: int) -> Workload:
    """Return the workload of a line such as `gamma:rate=8,burstiness=4`, named like the line.

    `poisson` and `gamma` take rate (requests per second, required), duration (seconds), prompt and
    output (tokens: `512` is fixed, `1020/4142` lognormal by median and 99th percentile) or lengths
    (a trace file whose pairs are drawn instead), classes (`name:share/name:share`) and correlation
    (0 to 1, between classes and prompt lengths: the first class has the shortest), `gamma` also
    burstiness (cv² of the gaps, required). `square` takes duration, then its phases, each after a
    semicolon: `square:duration=1200;period=40,rate=6,classes=chat:1;period=40,rate=2`.

    SpecError for the line or the seed, TraceError for the file of lengths.
    """
    kind, _, rest = spec.partition(":")
    kind = kind.strip()
    if kind not in _KEYS:
        raise SpecError(f"generator {spec!r} must begin with one of {', '.join(_KEYS)} and a colon")
    try:
        return replace(_build(kind, rest.split(";"), seed), name=spec)
    except TraceError:
        raise
    except ValueError as error:
        raise SpecError(f"generator {spec!r}: {error}") from error


def _build(kind: str, parts: list[str], seed: int) -> Workload:
    values, phases = _Values(parts[0], _KEYS[kind]), parts[1:]
    duration_s = values.positive("duration", DEFAULT_DURATION_S)
    if kind == "square":
        if not phases:
            raise ValueError("square needs phases, each after a semicolon")
        built = [_phase(phase, number) for number, phase in enumerate(phases, start=1)]
        return square_wave(built, duration_s, seed)
    if phases:
        raise ValueError(f"{kind} has no phases (`;` belongs to square)")
    rate, lengths = values.positive("rate"), values.lengths()
    if kind == "poisson":
        workload = poisson(rate, duration_s, lengths, seed)
    else:
        burstiness = values.number("burstiness")
        workload = gamma(rate, duration_s, lengths, seed, burstiness=burstiness)
    return _with_classes(workload, values, seed)


def _with_classes(workload: Workload, values: _Values, seed: int) -> Workload:
    mix = values.mix()
    if "correlation" in values:
        if not mix:
            raise ValueError("correlation needs classes")
        correlation = values.number("correlation")
        return assign_classes_by_length(workload, mix, seed, correlation=correlation)
    return assign_classes(workload, mix, seed) if mix else workload


def _phase(text: str, number: int) -> Phase:
    try:
        values = _Values(text, _PHASE_KEYS)
        return Phase(
            values.positive("period"), values.number("rate"), values.lengths(), values.mix()
        )
    except TraceError:
        raise
    except ValueError as error:
        raise ValueError(f"phase {number}: {error}") from error


class _Values:
    """The keys of one part of a line, checked against those that it may have."""

    def __init__(self, text: str, known: frozenset[str]) -> None:
        self._values: dict[str, str] = {}
        for pair in text.split(",") if text.strip() else ():
            key, equals, value = (part.strip() for part in pair.partition("="))
            if not equals or not value:
                raise ValueError(f"must be key=value with commas between, got {pair!r}")
            if key not in known:
                raise ValueError(f"{key} is unknown here; known are {', '.join(sorted(known))}")
            if key in self._values:
                raise ValueError(f"{key} is given twice")
            self._values[key] = value

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number; without a default it must be there. Its range is the generator's."""
        text = self._values.get(key)
        if text is None:
            if default is None:
                raise ValueError(f"{key} is missing")
            return default
        return _number(key, text)

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a number above 0, named by its key and not by a generator's argument."""
        value = self.number(key, default)
        check_positive(key, value)
        return value

    def mix(self) -> dict[str, float]:
        """Return the relative shares of classes; empty without the key."""
        mix: dict[str, float] = {}
        for part in self._values["classes"].split("/") if "classes" in self else ():
            name, colon, share = (word.strip() for word in part.partition(":"))
            if not colon or not name:
                raise ValueError(f"classes must be name:share/name:share, got {part!r}")
            if name in mix:
                raise ValueError(f"classes names {name} twice")
            mix[name] = _number(f"share of {name} in classes", share)
        return mix

    def lengths(self) -> LengthSource:
        """Return the lengths: those of a trace, or lognormal."""
        if "lengths" in self:
            if "prompt" in self or "output" in self:
                raise ValueError("lengths (a trace) excludes prompt and output")
            return TraceLengths(read_trace(self._values["lengths"]))
        prompt_p50, prompt_p99 = self._percentiles("prompt", DEFAULT_PROMPT)
        output_p50, output_p99 = self._percentiles("output", DEFAULT_OUTPUT)
        return LognormalLengths(prompt_p50, prompt_p99, output_p50, output_p99)

    def _percentiles(self, key: str, default: str) -> tuple[float, float]:
        p50, slash, p99 = self._values.get(key, default).partition("/")
        median = _number(key, p50)
        return median, _number(key, p99) if slash else median


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{key} must be a number, got {text!r}") from None
