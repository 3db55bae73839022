"""Room for work: who may come in, and when (control.md section 5).

Owns the arithmetic of seats, of expected growth and of the streams' room. Must not predict latency
or know a deadline.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

import numpy as np

from controller.policy.facts import (
    CLASS,
    E2E_S,
    MAX_TOKENS,
    NUM_PROMPT,
    TPOT_S,
    WEIGHT,
    ClassNames,
    IntArray,
    RunningTable,
    class_name,
    live_promise,
)
from controller.policy.foresight import End, Newcomer, foresee_starts
from controller.policy.kv import BlockLedger
from controller.policy.lengths import OutputLengths
from controller.policy.on_time import Outlook
from controller.policy.ordering import BoolArray, PrefillQueue
from controller.policy.pacing import Pacing
from controller.policy.streams import Joiner, Joiners, StreamRoom, paced_target_s
from costmodel.features import FloatArray
from engine.blocks import num_blocks_for
from engine.ports import EngineView, RequestView
from engine.request import RequestPhase

# Newcomers whose start is foreseen one by one.
_FORESEEN = 32
_MIDDLE = np.full(_FORESEEN, 0.5)
# Of those so many who are kept out for others' sake.
_FORESEEN_KEPT_OUT = 8


def split_running(
    running: Iterable[RequestView],
) -> tuple[list[RequestView], list[RequestView]]:
    """Split running requests into decodes and prefills, each in the given order."""
    decodes: list[RequestView] = []
    prefills: list[RequestView] = []
    for request in running:
        (decodes if request.is_decoding else prefills).append(request)
    return decodes, prefills


class Intake:
    """Seats and KV headroom for those who want to start, as the plan takes shape.

    Headroom is what is free once every running request has grown as expected and the reserve is
    left alone. What is set aside for a due request
    (`set_aside`) is closed to the others.
    """

    __slots__ = (
        "_headroom",
        "_known_blocks",
        "_known_joiners",
        "_known_steps",
        "_ledger",
        "_lengths",
        "_names",
        "_num_running",
        "_pace",
        "_reserve",
        "_room",
        "_running",
        "_seats",
        "_view",
        "is_outpaced",
        "is_short",
    )

    def __init__(
        self,
        view: EngineView,
        ledger: BlockLedger,
        running: RunningTable,
        names: ClassNames,
        max_running: int,
        kv_reserve: float,
        lengths: OutputLengths,
        room: StreamRoom | None = None,
        pace: float = 1.0,
    ) -> None:
        self._view = view
        self._room = room
        self._pace = pace
        self._ledger = ledger
        self._lengths = lengths
        self._running = running
        self._names = names
        self._num_running = len(running)
        self._seats = max_running - len(running)
        self._reserve = int(kv_reserve * view.num_total_blocks)
        self._known_blocks: FloatArray | None = None
        self._known_steps: FloatArray | None = None
        self._known_joiners: tuple[PrefillQueue, Joiners] | None = None
        # Counted when somebody asks to come in: most steps nobody does.
        self._headroom: int | None = None
        self.is_short = False
        self.is_outpaced = False

    def _blocks(self, request: RequestView) -> int:
        """Blocks that the request is expected to hold at its end.

        An answer that outgrew the expectation is expected to go on for one block more.
        """
        view = self._view
        num_output = max(
            self._lengths.expected(class_name(request)), request.num_output_tokens + view.block_size
        )
        num_tokens = request.num_prompt_tokens + min(request.max_tokens, num_output)
        limit = min(num_tokens, view.max_model_len)
        return min(num_blocks_for(limit, view.block_size), view.num_total_blocks)

    def _needed(self, request: RequestView) -> int:
        """Free blocks that a newcomer is expected to take: none for what it shares."""
        return self._blocks(request) - self._ledger.shared(request)

    def _expected_blocks(self, facts: FloatArray, num_output: FloatArray) -> FloatArray:
        """`_blocks` of many requests, by their facts."""
        view = self._view
        usual = self._names.each(self._lengths.expected, facts)
        usual = np.maximum(usual, num_output + view.block_size)
        num_tokens = facts[NUM_PROMPT] + np.minimum(facts[MAX_TOKENS], usual)
        blocks = np.ceil(np.minimum(num_tokens, view.max_model_len) / view.block_size)
        most: FloatArray = np.minimum(blocks, view.num_total_blocks)
        return most

    def _count_headroom(self) -> int:
        if self._headroom is None:
            to_grow = int(np.maximum(self._running_blocks() - self._running.num_held, 0.0).sum())
            num_free = self._view.num_free_blocks + self._ledger.num_returned
            self._headroom = num_free - to_grow - self._reserve
        return self._headroom

    def start_delays_s(
        self, queue: PrefillQueue, places: IntArray, step_s: float, is_kept_out: BoolArray
    ) -> FloatArray | None:
        """Predict how long each of the requests at `places` of the queue, served in that order,
        waits for a seat, blocks and a pace, in seconds; `is_kept_out` is what `yielding` says.

        None if nobody has to. A running request is expected to end after as many tokens as others
        of its class had left at that point, one per step of `step_s` seconds, and to leave its seat
        and expected blocks to the next in order; so is one that starts. The first `_FORESEEN` are
        followed one by one; beyond them seats are taken to come free at the same rate.
        """
        running = self._running
        newcomers = places[queue.index[places] >= len(running) - running.num_decodes]
        if not newcomers.size:
            return None
        facts = queue.facts_at(newcomers)
        num_output = queue.past[newcomers] + queue.remaining[newcomers] - facts[NUM_PROMPT]
        blocks = self._expected_blocks(facts, num_output)
        needed = blocks.copy()
        for k in queue.past[newcomers].nonzero()[0].tolist():
            needed[k] -= self._ledger.shared(queue.at(int(newcomers[k])))
        headroom = float(self._count_headroom())
        joiners, room = self._joiners(queue), self._room
        if (
            newcomers.size <= self._seats
            and needed.sum() <= headroom
            and (room is None or room.can_all_join(joiners.at(newcomers)))
        ):
            return None
        near, beyond = self._foreseen(is_kept_out[newcomers])
        columns = (
            needed[near].tolist(),
            blocks[near].tolist(),
            self._steps_left(facts[:, near], num_output[near], _MIDDLE[: near.size]).tolist(),
            joiners.at(newcomers[near]),
            queue.is_started[newcomers[near]].tolist(),
        )
        starts = foresee_starts(
            list(map(Newcomer, *columns)),
            self._ends(),
            self._seats,
            headroom,
            None if room is None else room.copy(),
        )
        delays_s = np.zeros(len(queue))
        delays_s[newcomers[near]] = starts
        if beyond.size:
            half = len(starts) // 2
            pace = (max(starts) - max(starts[: half + 1])) / (len(starts) - 1 - half)
            delays_s[newcomers[beyond]] = max(starts) + pace * np.arange(1, beyond.size + 1)
        return delays_s[places] * step_s

    def _foreseen(self, is_kept_out: BoolArray) -> tuple[IntArray, IntArray]:
        """Split the places of newcomers (n,) into those that are followed one by one and the
        others.

        Who is kept out for others' sake keeps nobody from being followed; some of them are, too.
        """
        num = is_kept_out.size
        places = np.arange(num)
        if num <= _FORESEEN or not is_kept_out.any():
            return places[:_FORESEEN], places[_FORESEEN:]
        num_kept_out = min(int(is_kept_out.sum()), _FORESEEN_KEPT_OUT)
        first = places[~is_kept_out][: _FORESEEN - num_kept_out]
        near = np.sort(np.concatenate((first, places[is_kept_out][: _FORESEEN - first.size])))
        return near, np.setdiff1d(places, near)

    def _joiners(self, queue: PrefillQueue) -> Joiners:
        """The streams that everybody in the queue will be."""
        known = self._known_joiners
        if known is None or known[0] is not queue:
            facts = queue.facts[:, queue.index]
            rents = np.zeros(len(queue))
            if self._room is not None and self._room.rents is not None:
                num_output = np.minimum(
                    self._names.each(self._lengths.typical, facts), facts[MAX_TOKENS]
                )
                rents = self._room.rents.of(facts[NUM_PROMPT], num_output, facts[WEIGHT])
                # A stream has its place already, an end-to-end target says nothing of a pace.
                rents[queue.is_started | (facts[E2E_S] < math.inf)] = 0.0
            num_tokens, class_no = queue.past + queue.remaining, facts[CLASS].astype(np.intp)
            joiners = Joiners(self._pace * facts[TPOT_S], num_tokens, rents, class_no)
            known = self._known_joiners = (queue, joiners)
        return known[1]

    def yielding(self, queue: PrefillQueue) -> BoolArray:
        """Whether each of the queue is kept out for the sake of those who are expected, shape
        (n,).
        """
        room = self._room
        if room is None or room.rents is None:
            return np.zeros(len(queue), dtype=np.bool_)
        return room.yielding(self._joiners(queue)) & ~queue.is_started

    def feed_tokens(self, queue: PrefillQueue) -> float:
        """Prompt tokens per step that keep the engine as full as it is: as many prompts start as
        answers end.
        """
        remaining = queue.remaining
        typical = self._names.each(self._lengths.typical, queue.facts)
        # The means, written out: `mean` costs as much as four sums.
        num_ends = float(typical.sum() / typical.size)
        return len(self._running) * (float(remaining.sum() / remaining.size) / num_ends)

    def _steps_left(
        self, facts: FloatArray, num_output: FloatArray, share: FloatArray
    ) -> FloatArray:
        """Tokens that each of the requests is expected to emit yet, at a quantile of what answers
        of its class had left.
        """
        left = self._names.each_of(self._lengths.remaining, facts, num_output, share)
        left = np.minimum(left, facts[MAX_TOKENS] - num_output)
        return np.where(left >= 1.0, left, float(self._view.block_size))

    def _running_steps_left(self) -> FloatArray:
        """Tokens that each of the running requests is expected to emit yet.

        The first of n similar answers ends long before the average one: those who run are spread
        over the quantiles, in the order of their medians.
        """
        if self._known_steps is None:
            running = self._running
            num = len(running)
            middle = np.full(num, 0.5)
            medians = self._steps_left(running.facts, running.num_output, middle)
            share = np.empty(num)
            share[medians.argsort(kind="stable")] = (np.arange(num) + 0.5) / max(1, num)
            self._known_steps = self._steps_left(running.facts, running.num_output, share)
        return self._known_steps

    def _running_blocks(self) -> FloatArray:
        """`_blocks` of each of the running requests."""
        if self._known_blocks is None:
            running = self._running
            self._known_blocks = self._expected_blocks(running.facts, running.num_output)
        return self._known_blocks

    def _ends(self) -> list[End]:
        """The ends of everybody running, as a heap."""
        running = self._running
        steps, blocks = self._running_steps_left(), self._running_blocks()
        class_no = running.facts[CLASS].astype(np.intp)
        columns = (steps, blocks, running.num_known, class_no)
        ends = list(map(End, *(column.tolist() for column in columns)))
        heapq.heapify(ends)
        return ends

    def outlook(self, pacing: Pacing, relief_s: float, step_s: float) -> Outlook:
        """Predict how the running decodes end, at `step_s` seconds a token."""
        running, num = self._running, self._running.num_decodes
        steps = self._running_steps_left()[:num]
        order = steps.argsort(kind="stable")
        periods_s = np.empty(num + 1)
        periods_s[:num] = running.facts[TPOT_S, :num][order]
        periods_s[num] = pacing.gap_limit_s
        np.minimum(periods_s, pacing.gap_limit_s, out=periods_s)
        np.multiply(periods_s, self._pace, out=periods_s)
        # Who runs slower than promised already claims what it gets.
        np.maximum(periods_s[:num], pacing.period_s, out=periods_s[:num])
        periods_s = np.minimum.accumulate(periods_s[::-1])[::-1]
        periods_s[0] = pacing.period_s
        return Outlook(steps[order] * step_s, periods_s, relief_s)

    def _joiner(self, request: RequestView) -> Joiner:
        """The stream that the request will be."""
        target_s, num_tokens = paced_target_s(request, self._pace), float(request.num_known_tokens)
        name = class_name(request)
        rents = None if self._room is None else self._room.rents
        promise = live_promise(request)
        is_by_end = promise is not None and promise.slo.e2e_s is not None
        rent = 0.0
        if rents is not None and request.phase is RequestPhase.WAITING and not is_by_end:
            num_output = min(self._lengths.typical(name), request.max_tokens)
            weight = 0.0 if promise is None else promise.weight
            rent = rents.of_one(request.num_prompt_tokens, num_output, weight)
        return Joiner(target_s, num_tokens, rent, self._names.index(name))

    def set_aside(self, request: RequestView) -> None:
        """Keep a seat and the expected blocks of a due request from everybody else."""
        self._seats -= 1
        self._headroom = self._count_headroom() - self._needed(request)

    def is_roomy(self, num_wanting: int) -> bool:
        """Whether seats are no concern: half of them stay free with everybody who wants one.

        Where they are, whoever takes time over a prompt keeps a seat from others.
        """
        num_seats = self._num_running + self._seats
        return 2 * (num_wanting + self._running.num_decodes) <= num_seats

    @property
    def is_full(self) -> bool:
        """Whether no seat is left."""
        return self._seats < 1

    def admit(
        self, request: RequestView, *, has_turn: bool = False, is_elder: bool = False
    ) -> bool:
        """Take a seat and blocks for all known tokens of a request that wants to start or resume;
        False if there is no room.

        With nobody running the reserve and the expectation do not count: a request alone must
        always be able to go on. `is_short` remembers that blocks, not seats, were the obstacle,
        `is_outpaced` that one stream more would break a token promise, or take the room of those
        who are expected. A preempted stream has its place already, and who has its turn by age
        comes in all the same; who has been overtaken as often as is allowed (`is_elder`) makes room
        for nobody any more.
        """
        if self._seats < 1:
            return False
        headroom = self._count_headroom()
        blocks = self._needed(request)
        if blocks > headroom and self._num_running > 0:
            self.is_short = True
            return False
        room, joiner = self._room, self._joiner(request)
        is_joining = room is None or room.join(joiner._replace(rent=0.0) if is_elder else joiner)
        if not (is_joining or has_turn or request.phase is RequestPhase.PREEMPTED):
            self.is_outpaced = True
            return False
        if not self._ledger.take(request, request.num_remaining_tokens):
            self.is_short = True
            if is_joining and room is not None:
                room.leave(joiner.num_tokens, joiner.class_no)
            return False
        self._seats -= 1
        self._num_running += 1
        self._headroom = headroom - blocks
        return True
