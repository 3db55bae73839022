"""Classes of a mixed load: how long their requests are, and what they are promised.

Owns the sizes, the targets as multiples of the server's normal step, and their words on a command
line. Must not know a rate or an instant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from controller.policy.slo import OnInfeasible, Slo, SloClass
from controller.workload.lengths import LognormalLengths

_NUMBERS: Final = ("share", "ttft", "tpot", "weight")
_LENGTHS: Final = ("prompt", "output")


@dataclass(frozen=True, slots=True)
class LoadClass:
    """A share of the requests that are alike. ValueError names the field.

    `share` is relative to the other classes'. `lengths` are lognormal, in tokens. `ttft_steps` and
    `tpot_steps` are the targets as multiples of the normal step (None = no such target): absolute
    ones would mean something else on every machine. `weight` and `on_infeasible` are those of the
    server's class of that name.
    """

    name: str
    share: float
    lengths: LognormalLengths
    ttft_steps: float | None = None
    tpot_steps: float | None = None
    weight: float = 1.0
    on_infeasible: OnInfeasible = OnInfeasible.REJECT

    def __post_init__(self) -> None:
        """Check every field."""
        if not self.name or any(sign in self.name for sign in ":,= "):
            raise ValueError(f"name of a class must be a word, got {self.name!r}")
        for field in ("share", "ttft_steps", "tpot_steps", "weight"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"{field} of class {self.name!r} must be a positive number, got {value!r}"
                )

    def slo_class(self, normal_s: float) -> SloClass:
        """Return the class with its targets where the normal step takes `normal_s` seconds."""
        ttft_s, tpot_s = (
            None if steps is None else steps * normal_s
            for steps in (self.ttft_steps, self.tpot_steps)
        )
        return SloClass(self.name, Slo(ttft_s, tpot_s), self.weight, self.on_infeasible)

    @property
    def serve_flags(self) -> tuple[str, ...]:
        """The words that make the server know the class; its targets come with each request."""
        return (
            "--slo-class",
            f"{self.name}:weight={self.weight:g},on_infeasible={self.on_infeasible}",
        )

    @property
    def text(self) -> str:
        """The class in the words that `parse_class` reads."""
        lengths = self.lengths
        words = [
            f"share={self.share:g}",
            f"prompt={lengths.prompt_p50:g}/{lengths.prompt_p99:g}",
            f"output={lengths.output_p50:g}/{lengths.output_p99:g}",
        ]
        words += [] if self.ttft_steps is None else [f"ttft={self.ttft_steps:g}"]
        words += [] if self.tpot_steps is None else [f"tpot={self.tpot_steps:g}"]
        words += [f"weight={self.weight:g}", f"on_infeasible={self.on_infeasible}"]
        return f"{self.name}:{','.join(words)}"


DEFAULT_CLASSES: Final = (
    LoadClass("chat", 60, LognormalLengths(48, 128, 24, 64), ttft_steps=12, tpot_steps=3),
    LoadClass("batch", 20, LognormalLengths(192, 512, 48, 96)),
    LoadClass("long", 20, LognormalLengths(640, 1024, 16, 32), ttft_steps=80, tpot_steps=8),
)
"""Short chat with a tight TPOT, batch without targets, long prompts with a loose TTFT.

Sized for the demo model on two cores, where the mix makes about one request per second.
"""


def parse_class(text: str) -> LoadClass:
    """Read `NAME:share=60,prompt=48/128,output=24/64,ttft=12,tpot=3,weight=1,on_infeasible=reject`.

    `prompt` and `output` (tokens: a number, or median/99th percentile) are required; the rest is
    optional. ValueError names what is wrong.
    """
    name, _, rest = text.partition(":")
    values: dict[str, str] = {}
    for pair in filter(None, rest.split(",")):
        key, sign, value = (part.strip() for part in pair.partition("="))
        if not sign or key not in (*_NUMBERS, *_LENGTHS, "on_infeasible"):
            raise ValueError(f"{pair!r} of class {name!r} is not one of its words")
        if key in values:
            raise ValueError(f"{key} of class {name!r} is given twice")
        values[key] = value
    for key in _LENGTHS:
        if key not in values:
            raise ValueError(f"{key} of class {name!r} is missing")
    numbers = {key: _number(values[key], key) for key in _NUMBERS if key in values}
    infeasible = values.get("on_infeasible", OnInfeasible.REJECT)
    if infeasible not in list(OnInfeasible):
        raise ValueError(f"on_infeasible of class {name!r} must be one of {list(OnInfeasible)}")
    return LoadClass(
        name=name.strip(),
        share=numbers.get("share", 1.0),
        lengths=LognormalLengths(
            *_percentiles(values["prompt"], "prompt"), *_percentiles(values["output"], "output")
        ),
        ttft_steps=numbers.get("ttft"),
        tpot_steps=numbers.get("tpot"),
        weight=numbers.get("weight", 1.0),
        on_infeasible=OnInfeasible(infeasible),
    )


def parse_classes(texts: Sequence[str]) -> tuple[LoadClass, ...]:
    """Read several classes, none = the default ones; ValueError says what is wrong."""
    classes = tuple(parse_class(text) for text in texts) or DEFAULT_CLASSES
    names = [each.name for each in classes]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"class {twice[0]!r} is given twice")
    return classes


def _percentiles(text: str, key: str) -> tuple[float, float]:
    median, slash, high = text.partition("/")
    p50 = _number(median, key)
    return p50, _number(high, key) if slash else p50


def _number(text: str, key: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{key} must be a number, got {text!r}") from None
