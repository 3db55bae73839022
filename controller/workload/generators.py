"""Arrivals from a formula: Poisson, Gamma, and traffic that changes in phases.

Owns when requests arrive. Must not know where lengths come from beyond `LengthSource`, nor what a
class promises. The same arguments give the same workload in every process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from controller.workload.arrivals import Arrival, Workload
from controller.workload.draws import check_not_negative, check_positive, rng_for, shares_of
from controller.workload.lengths import LengthSource

FloatArray = npt.NDArray[np.float64]

# Ten million requests are days of any one server; more is a slip in a unit.
MAX_REQUESTS: Final = 10_000_000
# Below it a shape overflows, and the spacing is even to the last digit that matters.
_MIN_BURSTINESS: Final = 1e-9
_MAX_BURSTINESS: Final = 1e4
_CHUNK: Final = 4096


def poisson(
    rate: float, duration_s: float, lengths: LengthSource, seed: int, *, name: str = "poisson"
) -> Workload:
    """Return Poisson arrivals at `rate` requests per second over [0, duration_s).

    Times and lengths come from streams of their own: at another rate the same requests arrive in
    the same pattern, only closer. ValueError names the argument.
    """
    return gamma(rate, duration_s, lengths, seed, burstiness=1.0, name=name)


def gamma(
    rate: float,
    duration_s: float,
    lengths: LengthSource,
    seed: int,
    *,
    burstiness: float,
    name: str = "gamma",
) -> Workload:
    """Return arrivals with Gamma-distributed gaps of mean 1 / rate seconds over [0, duration_s).

    `burstiness` is cv², the squared coefficient of variation of the gaps: 1 is Poisson, 0 evenly
    spaced, above 1 bursts. (It is 1 / shape; vLLM's flag of that name is the shape.) The start is
    no arrival but any instant of an endless stream: the first gap is U·X, U uniform and X a gap
    weighted by its length, so that rate·duration_s requests come in the mean, exactly. ValueError
    names the argument.
    """
    check_positive("rate", rate)
    check_positive("duration_s", duration_s)
    check_not_negative("burstiness", burstiness)
    if burstiness > _MAX_BURSTINESS:
        raise ValueError(f"burstiness must be at most {_MAX_BURSTINESS:g}, got {burstiness!r}")
    _check_size(rate * duration_s, "rate · duration_s")
    # In units of the mean gap: the draws do not depend on the rate.
    times = _gamma_times(burstiness, rate * duration_s, rng_for("arrivals", seed)) / rate
    return _workload(name, times[times < duration_s], lengths, rng_for("lengths", seed))


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of steady traffic: Poisson at `rate` requests per second for `duration_s` seconds.

    `rate` 0 is silence. `mix` gives classes their relative shares (empty = the default class);
    `lengths` draws every request's, `lengths_by_class` those of the classes that it names instead.
    ValueError names the field.
    """

    duration_s: float
    rate: float
    lengths: LengthSource
    mix: Mapping[str, float] = field(default_factory=dict)
    lengths_by_class: Mapping[str, LengthSource] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every field."""
        check_positive("duration_s", self.duration_s)
        check_not_negative("rate", self.rate)
        if self.mix:
            shares_of("mix", self.mix)
        strangers = [name for name in self.lengths_by_class if name not in self.mix]
        if strangers:
            raise ValueError(f"lengths_by_class names {strangers[0]!r}, which mix does not")


def square_wave(
    phases: Sequence[Phase], duration_s: float, seed: int, *, name: str = "square wave"
) -> Workload:
    """Return traffic that goes through `phases` in turn, again and again, for `duration_s` seconds.

    control.md section 9's changing traffic: two phases of 40 s, one of chat, one of code and batch.
    A single phase is Poisson with a class mix. Every turn draws from a stream of its own.
    ValueError names the argument.
    """
    check_positive("duration_s", duration_s)
    if not phases:
        raise ValueError("phases must not be empty")
    cycle_s = sum(phase.duration_s for phase in phases)
    per_cycle = sum(phase.rate * phase.duration_s for phase in phases)
    _check_size(per_cycle * max(1.0, duration_s / cycle_s), "rate · duration_s")
    _check_size(len(phases) * duration_s / cycle_s, "the number of phases")
    arrivals: list[Arrival] = []
    start_s = 0.0
    for turn, phase in enumerate(itertools.cycle(phases)):
        if start_s >= duration_s:
            break
        length_s = min(phase.duration_s, duration_s - start_s)
        arrivals += _phase_arrivals(phase, start_s, length_s, turn, seed)
        start_s += phase.duration_s
    return Workload(name, tuple(arrivals))


def _phase_arrivals(
    phase: Phase, start_s: float, length_s: float, turn: int, seed: int
) -> list[Arrival]:
    if phase.rate == 0.0:
        return []
    rng = rng_for(f"phase {turn} arrivals", seed)
    times = _gamma_times(1.0, phase.rate * length_s, rng) / phase.rate
    times = times[times < length_s]
    rng = rng_for(f"phase {turn} lengths", seed)
    drawn = _workload("phase", times, phase.lengths, rng, start_s).arrivals
    if not phase.mix:
        return list(drawn)
    names, shares = shares_of("mix", phase.mix)
    rng = rng_for(f"phase {turn} classes", seed)
    classes = [names[i] for i in rng.choice(len(names), size=len(drawn), p=shares).tolist()]
    own = {
        key: _workload(
            "phase", times, source, rng_for(f"phase {turn} lengths of {key}", seed), start_s
        )
        for key, source in phase.lengths_by_class.items()
    }
    chosen = (own[c].arrivals[i] if c in own else drawn[i] for i, c in enumerate(classes))
    return [
        Arrival(a.at_s, a.num_prompt_tokens, a.num_output_tokens, slo_class)
        for a, slo_class in zip(chosen, classes, strict=True)
    ]


def _gamma_times(burstiness: float, span: float, rng: np.random.Generator) -> FloatArray:
    """Return ascending instants from 0 to beyond `span`, in units of the mean gap."""
    if burstiness < _MIN_BURSTINESS:
        return rng.random() + np.arange(math.ceil(span) + 1, dtype=np.float64)
    shape = 1.0 / burstiness
    # Weighted by its length, a Gamma(k) gap is Gamma(k + 1).
    times = np.array([rng.random() * rng.standard_gamma(shape + 1.0) * burstiness])
    parts = [times]
    while times[-1] < span:
        # Summed from the last instant on, in order: the result does not depend on the chunk.
        gaps = rng.standard_gamma(shape, size=_CHUNK) * burstiness
        times = np.cumsum(np.concatenate((times[-1:], gaps)))[1:]
        parts.append(times)
        _check_size(len(parts) * _CHUNK, "a burst's requests")
    return np.concatenate(parts)


def _workload(
    name: str,
    times: FloatArray,
    lengths: LengthSource,
    rng: np.random.Generator,
    start_s: float = 0.0,
) -> Workload:
    prompts, outputs = lengths.draw(rng, len(times))
    rows = zip((times + start_s).tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return Workload(name, tuple(Arrival(*row) for row in rows))


def _check_size(num_requests: float, what: str) -> None:
    if not num_requests <= MAX_REQUESTS:
        raise ValueError(f"{what} must be at most {MAX_REQUESTS}, got {num_requests:g}")
