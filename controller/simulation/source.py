"""`WorkloadSource`: a workload as a few words: a trace or a generator, its span and its classes.

Owns how load and seed change what these words give. Must not simulate: it can be sent to another
process and makes the same workload there.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from controller.workload.arrivals import Workload
from controller.workload.specs import generate
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
_RATE: Final = re.compile(r"(?<=[:,;])(\s*rate\s*=)([^,;]+)")
_LENGTHS: Final = re.compile(r"(?<=[:,;])\s*lengths\s*=\s*([^,;]+)")


class SourceError(ValueError):
    """A workload cannot be made of these words; the message names the one that is wrong."""


@dataclass(frozen=True, slots=True)
class WorkloadSource:
    """A trace file, or a generator's line (`controller.workload.specs`).

    `trace_format` is one of `read_trace`'s. Arrivals before `start_s` and from `start_s +
    duration_s` on are left out (`duration_s` None = to the end), at most `max_requests` are kept.
    Requests are cut down to `max_model_len` tokens (None = as they are). `mix` gives classes at
    random, `is_by_length` in order of prompt length. SourceError names the field.
    """

    trace: str | None = None
    generator: str | None = None
    trace_format: str = "auto"
    start_s: float = 0.0
    duration_s: float | None = None
    max_requests: int | None = None
    max_model_len: int | None = None
    mix: Mix = ()
    is_by_length: bool = False

    def __post_init__(self) -> None:
        """Check that there is one source."""
        if (self.trace is None) == (self.generator is None):
            given = "nothing" if self.trace is None else "both"
            raise SourceError(f"give a trace or a generator: {given} was given")
        if self.is_by_length and not self.mix:
            raise SourceError("mix must say which classes are given by length")

    @property
    def files(self) -> list[str]:
        """The trace files that are read."""
        if self.trace is not None:
            return [self.trace]
        return [path.strip() for path in _LENGTHS.findall(self.generator or "")]

    def workload(self, load: float = 1.0, seed: int = 0) -> Workload:
        """Return the workload at `load` times its own rate.

        Of a trace it is the same requests in less time; a generator draws more of them in the same
        time, so that traffic that changes does so at the same pace. `seed` draws arrivals, lengths,
        classes and the jitter of quantised traces. What is wrong with load or words is a
        SourceError; the trace's and the generator's own errors are ValueErrors too.
        """
        if not (math.isfinite(load) and load > 0):
            raise SourceError(f"load must be a positive number, got {load}")
        try:
            workload = self._whole(load, seed)
        except OSError as error:
            raise SourceError(f"{error.filename}: {error.strerror}") from error
        if self.start_s or self.duration_s is not None:
            end_s = math.inf if self.duration_s is None else self.start_s + self.duration_s
            workload = window(workload, self.start_s, end_s)
        if self.max_requests is not None:
            workload = take(workload, self.max_requests)
        if self.trace is not None and load != 1.0:
            workload = scale_rate(workload, load)
        if self.max_model_len is not None:
            workload = clip_lengths(workload, self.max_model_len)
        if self.mix:
            assign = assign_classes_by_length if self.is_by_length else assign_classes
            workload = assign(workload, dict(self.mix), seed)
        if not workload.arrivals:
            raise SourceError(f"workload {workload.name!r} holds no request")
        return workload

    def to_json(self) -> dict[str, Any]:
        """Return the words as JSON values."""
        return asdict(self)

    def _whole(self, load: float, seed: int) -> Workload:
        if self.trace is not None:
            return _trace(self.trace, self.trace_format, seed)
        assert self.generator is not None  # noqa: S101 - there is one of the two
        if load == 1.0:
            return generate(self.generator, seed)
        return generate(_RATE.sub(functools.partial(_scaled, load), self.generator), seed)


def parse_mix(text: str) -> Mix:
    """Read relative shares of classes, `chat=0.5,code=0.3`; SourceError names the class."""
    mix: dict[str, float] = {}
    for item in text.split(","):
        name, _, share = item.partition("=")
        name = name.strip()
        if not name or name in mix:
            raise SourceError(f"{item!r} in mix {text!r}: expected NAME=SHARE, each name once")
        try:
            mix[name] = float(share)
        except ValueError:
            raise SourceError(f"share of {name!r} must be a number, got {share!r}") from None
    return tuple(mix.items())


def _scaled(load: float, match: re.Match[str]) -> str:
    try:
        return f"{match[1]}{float(match[2]) * load!r}"
    except ValueError:
        # Left as it is: the generator says what is wrong with it.
        return match[0]


@functools.lru_cache(maxsize=8)
def _trace(path: str, trace_format: str, seed: int) -> Workload:
    # Kept: a sweep asks for the same file at every load.
    return read_trace(Path(path), format=trace_format, seed=seed)
