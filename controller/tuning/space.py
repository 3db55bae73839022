"""What is tuned: the planner's knobs with their ranges, and a point among them.

Owns names, ranges and the reason for each. Must not simulate, nor know who searches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final

import numpy as np

from controller.policy.settings import PolicyConfig
from engine.config import DEFAULT_MAX_NUM_SEQS

MAX_NUM_SEQS: Final = "max_num_seqs"
_MAX_SEATS: Final = 4096
# Up to the seats that a server has by default this is the planner's own cap; beyond, the engine
# gets as many seats. One knob: two would search the lesser of two numbers.
MAX_RUNNING: Final = "max_running"
# The top of the range of `token_budget` says "no cap below the engine's own".
_NO_CAP: Final = 8192
# Knobs that one neighbour moves at most.
_MOVED: Final = 3

Value = float | int | None


@dataclass(frozen=True, slots=True)
class TunedSettings:
    """What tuning may change: the planner's settings, and how many requests may run at once.

    ValueError names the field.
    """

    planner: PolicyConfig = field(default_factory=PolicyConfig)
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS

    def __post_init__(self) -> None:
        """Check what `PolicyConfig` has not checked."""
        value = self.max_num_seqs
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SEATS:
            raise ValueError(f"max_num_seqs must be an integer in [1, {_MAX_SEATS}], got {value!r}")

    def to_json(self) -> dict[str, Value]:
        """Return every setting by name, flat."""
        return {**asdict(self.planner), MAX_NUM_SEQS: self.max_num_seqs}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TunedSettings:
        """Rebuild settings; what is missing has its default. ValueError names the key."""
        known = {each.name for each in fields(PolicyConfig)} | {MAX_NUM_SEQS}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"{name}: no such setting; known are {', '.join(sorted(known))}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value!r}")
        planner = {name: value for name, value in values.items() if name != MAX_NUM_SEQS}
        return cls(PolicyConfig(**planner), values.get(MAX_NUM_SEQS, DEFAULT_MAX_NUM_SEQS))

    def changes_from(self, other: TunedSettings) -> dict[str, tuple[Value, Value]]:
        """Return what differs, by name: the other's value and this one's."""
        theirs = other.to_json()
        return {
            name: (theirs[name], value)
            for name, value in self.to_json().items()
            if theirs[name] != value
        }


DEFAULTS: Final = TunedSettings()
"""What a server runs with if nobody says otherwise: trial 0 of every study."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting that is searched, from `low` to `high`, both included.

    `is_log` searches ratios instead of differences. `reason` says what the ends of the range are.
    """

    name: str
    low: float
    high: float
    reason: str
    is_integer: bool = False
    is_log: bool = False

    @property
    def default(self) -> float:
        """The shipped value, as a number of the range."""
        return self.number_in(DEFAULTS)

    def number_in(self, settings: TunedSettings) -> float:
        """What these settings have of it, as a number that may lie outside the range."""
        value = settings.to_json()[self.name]
        if value is not None:
            return value
        return settings.max_num_seqs if self.name == MAX_RUNNING else self.high


KNOBS: Final = (
    Knob("pace", 0.7, 1.0, "at 1 everybody ends a little late; below 0.7 capacity is given away"),
    Knob("upper_pace", 1.0, 1.6, "1 trusts no step whose bound exceeds the target, 1.6 nearly all"),
    Knob("bank", 0.0, 1.0, "0 keeps every gap even, 1 spends all that quick tokens have saved"),
    Knob(
        "token_budget", 64, _NO_CAP, "8192 is no cap; a small one shortens the longest gap",
        is_integer=True, is_log=True,
    ),
    Knob("knee_share", 0.5, 1.0, "share of the best rate that a light load asks of a step"),
    Knob(
        "stream_knee_share", 0.1, 1.0, "the same beside paced streams: small steps, quick tokens"
    ),
    Knob("patience", 0.2, 1.0, "little hurries prompts, much leaves the streams short steps"),
    Knob(
        "patience_backlog", 0.1, 4.0, "little keeps room for a burst, much leaves short steps",
        is_log=True,
    ),
    Knob(
        "drain_steps", 1.0, 64.0, "few steps drain a queue at once and make long gaps", is_log=True
    ),
    Knob("split_threshold", 0, 512, "0 splits every prompt, 512 few of a chat", is_integer=True),
    Knob("length_neutrality", 0.0, 1.0, "0 sheds long prompts first, 1 looks at weights alone"),
    Knob(
        "started_factor", 1.0, 64.0, "1 drops started prompts like any other, 64 hardly ever",
        is_log=True,
    ),
    Knob(
        "order_blend", 0.0, 16.0, "0 serves by deadline, 16 nearly the shortest prompt first"
    ),
    Knob(
        "margin_quantile", 0.5, 0.99, "at 0.5 half of the steps exceed their bound, at 0.99 hardly"
    ),
    Knob("exploration", 0.0, 0.05, "share of steps that are spent on learning the machine"),
    Knob("kv_reserve", 0.0, 0.2, "0 fills the pool and risks preemptions, 0.2 wastes a fifth"),
    Knob(
        MAX_RUNNING, 8, 256, "few keep steps short, many keep the machine busy",
        is_integer=True, is_log=True,
    ),
)  # fmt: skip
"""Every knob; a study may search some of them and leave the rest at their defaults."""


def knobs_named(names: Iterable[str]) -> tuple[Knob, ...]:
    """Return the knobs of these names, all if there are none; ValueError lists what there is."""
    wanted = list(names)
    known = {knob.name: knob for knob in KNOBS}
    for name in wanted:
        if name not in known:
            raise ValueError(f"{name!r} is no knob; there are {', '.join(known)}")
    return tuple(knob for knob in KNOBS if knob.name in wanted) if wanted else KNOBS


def settings_at(point: Mapping[str, float], base: TunedSettings = DEFAULTS) -> TunedSettings:
    """Return `base` with the numbers of a point in it; ValueError names a setting."""
    planner: dict[str, Value] = {}
    max_num_seqs = base.max_num_seqs
    for name, number in point.items():
        if name == MAX_RUNNING:
            max_num_seqs = max(base.max_num_seqs, int(number))
            planner[name] = int(number) if number < base.max_num_seqs else None
        elif name == "token_budget":
            planner[name] = None if number >= _NO_CAP else int(number)
        else:
            planner[name] = number
    return TunedSettings(replace(base.planner, **planner), max_num_seqs)  # type: ignore[arg-type]


def neighbour(
    knobs: Sequence[Knob],
    first: Mapping[str, float],
    number: int,
    rng: np.random.Generator,
    *,
    is_alone: bool = False,
) -> dict[str, float]:
    """Return a point near `first`: knob `number` and up to two others, half-way to a draw.

    `is_alone` moves that knob only. A point that is drawn along every knob at once is nearly always
    worse than settings that were chosen with care, and tells little of any one knob.
    """
    point = dict(first)
    num_others = 0 if is_alone else number % _MOVED
    others = rng.permutation(len(knobs))[:num_others].tolist()
    for index in {number % len(knobs), *others}:
        knob = knobs[index]
        here, low, high = first[knob.name], knob.low, knob.high
        if knob.is_log:
            drawn = low * (high / low) ** rng.random()
            value = math.sqrt(here * drawn)
        else:
            drawn = low + (high - low) * rng.random()
            value = (here + drawn) / 2.0
        value = min(max(value, low), high)
        point[knob.name] = round(value) if knob.is_integer else value
    return point


def point_of(settings: TunedSettings, knobs: Iterable[Knob]) -> dict[str, float]:
    """Return the numbers of settings along these knobs, cut to their ranges."""
    return {knob.name: min(max(knob.number_in(settings), knob.low), knob.high) for knob in knobs}
