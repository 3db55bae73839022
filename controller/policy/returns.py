"""When those are to come back who are refused: one after another, not all at once.

Owns what was given away of the next minute (`Returns`) and the search for room in it (`spread`).
Must not decide who is refused, nor when the queue has drained.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.step import Admission

# A minute is given away in slots. Beyond it nobody knows what the load is, and OpenAI's clients
# follow no retry-after that is longer.
_SLOT_S = 0.25
_NUM_SLOTS = 240
_HORIZON_S = _SLOT_S * _NUM_SLOTS
# Who comes back streams, too, and takes that from the prompts behind it.
_MARGIN = 1.1


class Returns:
    """Prompt tokens of those who were refused, by when they were told to come back.

    Fed by the runtime, read by planners. What is over is forgotten: who came back is in the queue.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}

    def book(self, now: float, at: float, num_tokens: int) -> None:
        """Remember that a prompt of so many tokens was told, at instant `now`, to come at `at`."""
        first, slot = math.floor(now / _SLOT_S), math.floor(at / _SLOT_S)
        if len(self._tokens) > 2 * _NUM_SLOTS:
            self._tokens = {each: num for each, num in self._tokens.items() if each >= first}
        if slot < first + _NUM_SLOTS:
            self._tokens[slot] = self._tokens.get(slot, 0) + num_tokens

    def free_s(self, now: float, token_s: float) -> list[float]:
        """Return how many seconds are left of each slot of the next minute, at `token_s` seconds a
        token; the first one is that of `now`.
        """
        first = math.floor(now / _SLOT_S)
        free_s: list[float] = []
        rest_s = 0.0
        for slot in range(first, first + _NUM_SLOTS):
            rest_s += self._tokens.get(slot, 0) * token_s * _MARGIN
            used_s = min(rest_s, _SLOT_S)
            rest_s -= used_s
            free_s.append(_SLOT_S - used_s)
        return free_s


def spread(
    verdicts: Sequence[Admission],
    num_tokens: Mapping[str, int],
    now: float,
    token_s: float,
    returns: Returns | None = None,
) -> list[Admission]:
    """Return the verdicts with each retry-after moved behind those before it and those who were
    told already, so that everybody finds the room that it was told of, if all of them come back
    and nobody else does.

    `num_tokens` are the prompts' by request id, `token_s` is what one takes. Gaps that are large
    enough are filled. Where the next minute is full its instants are shared out evenly.
    """
    free_s = [_SLOT_S] * _NUM_SLOTS if returns is None else returns.free_s(now, token_s)
    # No slot before this one has anything left.
    full_before = 0
    offset_s = now - math.floor(now / _SLOT_S) * _SLOT_S
    told: list[Admission] = []
    for verdict in verdicts:
        own_s = verdict.retry_after_s
        if own_s is None or own_s >= _HORIZON_S:
            told.append(verdict)
            continue
        needed_s = num_tokens[verdict.request_id] * token_s * _MARGIN
        while full_before < _NUM_SLOTS and free_s[full_before] <= 0.0:
            full_before += 1
        slot = max(full_before, math.floor((offset_s + own_s) / _SLOT_S))
        at = _take(free_s, slot, needed_s)
        if at is None:
            share = zlib.crc32(verdict.request_id.encode()) / 2.0**32
            back_s = own_s + share * (_HORIZON_S - own_s)
        else:
            back_s = max(own_s, at - offset_s)
        told.append(replace(verdict, retry_after_s=back_s))
    return told


def _take(free_s: list[float], first: int, needed_s: float) -> float | None:
    """Take `needed_s` from the slots from `first` on, where they have as much together as it lasts
    and one slot more; return from when, in seconds after the start of the first slot. None if there
    is no such room.
    """
    num = math.ceil(needed_s / _SLOT_S) + 1
    last = min(first + num, len(free_s))
    found_s = sum(free_s[first:last])
    for slot in range(first, len(free_s)):
        if free_s[slot] > 0.0 and found_s >= needed_s:
            start_s = (slot + 1) * _SLOT_S - free_s[slot]
            for each in range(slot, last):
                taken_s = min(free_s[each], needed_s)
                needed_s -= taken_s
                free_s[each] -= taken_s
            return start_s
        found_s -= free_s[slot]
        if last < len(free_s):
            found_s += free_s[last]
            last += 1
    return None
