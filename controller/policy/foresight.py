"""Who starts when: seats, blocks and paces as they are expected to come free.

Owns that one simulation, in steps of the engine. Must not know a request or a clock, or spend
anything.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from controller.policy.streams import Joiner, StreamRoom


class Newcomer(NamedTuple):
    """Somebody who wants to start: free blocks that it takes, blocks that it gives back at its end,
    steps until then, and the stream that it will be.

    `holds_back` says that nobody behind it starts before it.
    """

    needed: float
    blocks: float
    num_steps: float
    stream: Joiner
    holds_back: bool


class End(NamedTuple):
    """When somebody who runs is expected to end, in steps; the blocks that come free then, the
    tokens that leave the step, and the number of its class.
    """

    num_steps: float
    blocks: float
    num_tokens: float
    class_no: int


def foresee_starts(
    newcomers: Sequence[Newcomer],
    ends: list[End],
    seats: int,
    headroom: float,
    room: StreamRoom | None,
) -> list[float]:
    """Return after how many steps each of the newcomers, in serving order, starts.

    `ends` is a heap of those who run; it is used up.
    Whoever does not fit lets smaller ones by, as a step's plan does. What nobody's end makes
    possible starts with the last.
    """
    starts = [0.0] * len(newcomers)
    pending = list(range(len(newcomers)))
    now = 0.0
    while pending:
        blocked: list[int] = []
        least = min(newcomers[k].needed for k in pending)
        for position, k in enumerate(pending):
            who = newcomers[k]
            if seats < 1 or least > headroom or (blocked and newcomers[blocked[-1]].holds_back):
                blocked.extend(pending[position:])
                break
            if who.needed > headroom or not (room is None or room.join(who.stream)):
                blocked.append(k)
                continue
            starts[k] = now
            seats -= 1
            headroom -= who.needed
            stream = who.stream
            end = End(now + who.num_steps, who.blocks, stream.num_tokens, stream.class_no)
            heapq.heappush(ends, end)
        pending = blocked
        if not ends:
            break
        # Whoever ends makes room; nobody looks before it can suffice.
        now, freed, num_tokens, class_no = heapq.heappop(ends)
        seats += 1
        headroom += freed
        if room is not None:
            room.leave(num_tokens, class_no)
    for k in pending:
        starts[k] = now
    return starts
