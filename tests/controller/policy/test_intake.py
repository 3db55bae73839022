"""Who comes in where blocks are short, and what is foreseen for those who never fit."""

from __future__ import annotations

import heapq

import numpy as np

from controller.policy.foresight import End, Newcomer, foresee_starts
from controller.policy.slo import Slo
from controller.policy.streams import Joiner
from tests.controller.policy.doubles import waiting
from tests.controller.policy.test_stream_guards import CHAT, intake_of


def test_who_finds_no_blocks_leaves_the_room_that_it_took() -> None:
    # With nobody running only the prompt must fit, and it does not: five blocks for 100 tokens.
    big = waiting("big", 100, slo=Slo(ttft_s=2.0, tpot_s=0.1), of=CHAT)
    door, queue, room = intake_of(None, [big], num_blocks=5)
    joiners = door._joiners(queue).at(np.arange(1))
    assert not door.admit(big)
    assert door.is_short
    assert not door.is_outpaced
    assert room._num_joined == 0
    assert room.can_all_join(joiners)


def _newcomer(needed: float, *, holds_back: bool = False) -> Newcomer:
    return Newcomer(needed, needed, 5.0, Joiner(float("inf")), holds_back)


def test_who_never_fits_starts_with_the_last_that_ends() -> None:
    ends = [End(3.0, 2.0, 10.0, 0), End(7.0, 2.0, 10.0, 0)]
    heapq.heapify(ends)
    # Four blocks come free in all; the second needs more than there will ever be.
    assert foresee_starts([_newcomer(3.0), _newcomer(90.0)], ends, 4, 0.0, None) == [7.0, 12.0]


def test_who_fits_nowhere_and_waits_for_nobody_starts_now() -> None:
    assert foresee_starts([_newcomer(90.0), _newcomer(1.0)], [], 1, 0.0, None) == [0.0, 0.0]


def test_a_smaller_one_passes_who_does_not_fit_yet() -> None:
    ends = [End(4.0, 9.0, 10.0, 0)]
    found = foresee_starts([_newcomer(10.0), _newcomer(1.0)], ends, 4, 1.0, None)
    # The small one ends after five steps and gives its block back: then the large one fits.
    assert found == [5.0, 0.0]
    ends = [End(4.0, 9.0, 10.0, 0)]
    held = foresee_starts([_newcomer(10.0, holds_back=True), _newcomer(1.0)], ends, 4, 1.0, None)
    assert held == [4.0, 9.0]
