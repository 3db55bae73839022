"""The words of `paceline simulate`: loads, rates, seeds and knobs as people type them.

Owns how they are read; every ValueError names the option. Must not run anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from controller.policy.settings import PolicyConfig
from controller.simulation.hardware import HardwareProfile, Slowdown
from controller.workload.arrivals import Workload


def changed_machine(
    machine: HardwareProfile, noise: float | None, slowdowns: list[str]
) -> HardwareProfile:
    """Return the machine with another noise, and with slowdowns (`60:120:2`) beside its own."""
    found = [*machine.slowdowns]
    for text in slowdowns:
        try:
            start_s, end_s, factor = map(float, text.split(":"))
        except ValueError:
            raise ValueError(f"--slowdown must be START:END:FACTOR, got {text!r}") from None
        found.append(Slowdown(start_s, end_s, factor))
    if noise is not None:
        machine = dataclasses.replace(machine, noise=noise, recorded=None)
    return dataclasses.replace(machine, slowdowns=tuple(found))


def planner_config(pairs: list[str]) -> PolicyConfig:
    """Read `pace=0.9` and the like; ValueError names the knob."""
    fields = {each.name for each in dataclasses.fields(PolicyConfig)}
    values: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if name not in fields or not sign:
            raise ValueError(
                f"--planner {pair!r}: expected one of {', '.join(sorted(fields))} with ="
            )
        values[name] = _plain(text)
    return PolicyConfig(**values)


def _plain(text: str) -> int | float | str | None:
    if text.lower() == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def loads_of(load: str | None, rate: str | None, base: Workload) -> list[float]:
    """Return multiples of the workload's own rate, from one of the two options or neither."""
    if load is not None and rate is not None:
        raise ValueError("give --load or --rate, not both")
    if rate is None:
        return _numbers(load or "1", "--load")
    if base.rate == 0.0:
        raise ValueError(f"--rate: {base.name} has no rate of its own that could be scaled")
    return [each / base.rate for each in _numbers(rate, "--rate")]


def _numbers(text: str, name: str) -> list[float]:
    try:
        values = [float(item) for item in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} must be numbers with commas between, got {text!r}") from None
    if not all(0.0 < value < float("inf") for value in values):
        raise ValueError(f"{name} must be positive numbers, got {text!r}")
    return sorted(dict.fromkeys(values))


def seeds_of(text: str) -> list[int]:
    """Return 0 … n-1 for one number n, or the numbers of a list, each of them once."""
    items = text.split(",")
    if not all(item.isdecimal() for item in items):
        raise ValueError(f"--seeds must be a number, or numbers with commas between, got {text!r}")
    values = [int(item) for item in items]
    if len(values) > 1:
        # Dropped silently, results would be of fewer runs than were asked for.
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise ValueError(f"--seeds names {twice[0]} twice, got {text!r}")
        return values
    if values[0] < 1:
        raise ValueError("--seeds must be at least 1")
    return list(range(values[0]))
