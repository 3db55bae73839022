"""Causes: what bound the steps and why promises were missed, as shares over seeds and in words.

Owns how such shares are read from rows, their order and their words. Must not count or draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from controller.simulation.records import MissCause

CAUSE_WORDS: Final = {
    MissCause.REFUSED: "refused",
    MissCause.LATE: "first token late",
    MissCause.SLOW: "tokens too slow",
    MissCause.OTHER: "other",
}
# A promise to somebody, room, nothing: the order in which they are shown.
_ORDER: Final = (
    "decode_slack", "gap_limit", "ttft_demand", "min_quota", "token_budget", "kv_blocks", "explore",
    "idle",
)  # fmt: skip
_WORDS: Final = {"ttft_demand": "TTFT demand", "kv_blocks": "KV blocks"}


def binding_word(name: str) -> str:
    """Return a binding constraint in words: `decode slack`."""
    return _WORDS.get(name, name.replace("_", " "))


def binding_names(found: Iterable[Mapping[str, float] | None]) -> list[str]:
    """Return the constraints that bound any step, in the order in which they are shown."""
    names = {name for each in found if each is not None for name in each}
    return sorted(names, key=lambda name: (_ORDER.index(name) if name in _ORDER else 99, name))


def miss_names(found: Iterable[Mapping[str, float] | None]) -> list[MissCause]:
    """Return the causes to show: the first three always, another one where it happened."""
    names = {name for each in found if each is not None for name in each}
    return [cause for cause in MissCause if cause is not MissCause.OTHER or cause in names]


def miss_shares(group: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the shares of a group's offered requests that missed a target, by cause.

    `group` is `GroupMeasures` as JSON values; None if it was recorded before causes were.
    """
    misses = group.get("misses")
    if misses is None:
        return None
    return {name: count / group["num_offered"] for name, count in misses.items()}


def mean_shares(found: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
    """Return the mean of shares over the seeds that have them; None if no seed has.

    A name that a seed lacks is 0 there.
    """
    known = [each for each in found if each is not None]
    if not known:
        return None
    names = dict.fromkeys(name for each in known for name in each)
    return {name: sum(each.get(name, 0.0) for each in known) / len(known) for name in names}
