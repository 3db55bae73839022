"""What the prefix cache costs, in lines that run: no event is dearer because many wait."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.engine.prefix_rig import Rig, matches

COMMON = [1000] * 16


def count_lines(act: Callable[[], object]) -> int:
    """Return how many lines of the engine run in `act`: a count of operations, not a time."""
    num_lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_lines
        if not frame.f_globals["__name__"].startswith("engine."):
            return None
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return num_lines


def cost_of_one_life(num_waiting: int) -> list[int]:
    """Lines per event of one request's life, beside so many others that wait.

    Half of them share nothing with anybody, half hope for a prefix that nobody computes meanwhile.
    """
    rig = Rig(num_blocks=24)
    stale = rig.remember([1] * 8)
    rig.remember(COMMON)
    for number in range(num_waiting):
        rig.arrive([*COMMON, number, *range(9)] if number % 2 else [3000 + number] * 17)
    assert rig.cache.num_watchers == num_waiting
    request = rig.arrive(range(2000, 2021))
    costs = [
        count_lines(lambda: rig.start(request)),
        count_lines(lambda: rig.compute(request, 9)),
        count_lines(lambda: rig.compute(request, 12)),
        count_lines(lambda: rig.decode(request, range(9))),
        count_lines(lambda: rig.preempt(request)),
        count_lines(lambda: rig.run(request)),
        count_lines(lambda: rig.cache.release(request)),
        count_lines(lambda: rig.arrive(range(2000, 2021))),
    ]
    rig.fill_unnamed()
    costs.append(count_lines(lambda: rig.pool.allocate(2)))
    assert [rig.pool.name_of(block) for block in stale] == [None, None]
    return costs


def test_no_event_costs_more_because_many_wait() -> None:
    few = cost_of_one_life(num_waiting=2)
    assert min(few) > 0
    assert cost_of_one_life(num_waiting=300) == few


def test_a_common_prefix_is_filed_once_however_many_wait_for_it() -> None:
    rig = Rig(num_blocks=64)
    rig.remember(range(200))
    first = count_lines(lambda: rig.arrive([*range(200), 1]))
    second = count_lines(lambda: rig.arrive([*range(200), 2]))
    # Hashing and matching its 50 blocks is everybody's own.
    assert second < first - 50 * 3


def test_a_commit_costs_what_it_adds_not_what_was_there() -> None:
    def cost(num_blocks: int) -> int:
        rig = Rig(num_blocks=num_blocks + 4)
        rig.remember(range(4 * num_blocks))
        request = rig.arrive([*range(4 * num_blocks), *range(9)])
        assert rig.start(request) == 4 * num_blocks
        return count_lines(lambda: rig.compute(request, 9)) + count_lines(
            lambda: rig.decode(request, range(4))
        )

    assert cost(2) == cost(100)


def cost_of_a_cut(num_waiting: int, num_blocks: int) -> int:
    """Lines that it takes to cut so many matches of so many blocks down to nothing."""
    rig = Rig(num_blocks=num_blocks + 2)
    prompt = range(4 * num_blocks)
    rig.remember(prompt)
    waiting = [rig.arrive([*prompt, number]) for number in range(num_waiting)]
    rig.pool.touch(range(1, num_blocks))
    rig.fill_unnamed()
    cost = count_lines(lambda: rig.pool.allocate(1))
    assert matches(*waiting) == [0] * num_waiting
    return cost


def test_a_changed_match_costs_the_same_however_long_it_was() -> None:
    costs = {
        length: cost_of_a_cut(num_waiting=20, num_blocks=length)
        - cost_of_a_cut(num_waiting=10, num_blocks=length)
        for length in (5, 50)
    }
    assert 0 < costs[5] == costs[50]
