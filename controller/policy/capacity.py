"""Room for work: who gives way when KV blocks run out, and who may come in (control.md sections 5
and 6).

Owns the arithmetic of victims and of expected growth, shared by every policy. Must not predict
latency or know a deadline beyond the sort key that it is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from controller.policy.kv import BlockLedger
from controller.policy.lengths import OutputLengths
from controller.policy.ordering import class_name, live_promise
from controller.policy.streams import StreamRoom, paced_target_s
from engine.blocks import num_blocks_for
from engine.ports import EngineView, RequestView
from engine.request import RequestPhase

# A request preempted this often is spared as long as another victim is left.
MAX_PREEMPTIONS = 3


def split_running(
    running: Iterable[RequestView],
) -> tuple[list[RequestView], list[RequestView]]:
    """Split running requests into decodes and prefills, each in the given order."""
    decodes: list[RequestView] = []
    prefills: list[RequestView] = []
    for request in running:
        (decodes if request.is_decoding else prefills).append(request)
    return decodes, prefills


def make_room(
    decodes: Sequence[RequestView],
    prefills: Sequence[RequestView],
    ledger: BlockLedger,
    victim_key: Callable[[RequestView], tuple[float, ...]],
) -> list[RequestView]:
    """Choose who is preempted, smallest key first, and reserve one token's blocks for every
    remaining decode.

    Every decode must get the block of its next token; without decodes at least one prefill must be
    able to go on. The last one left is never preempted: alone it fits, because admission refused
    what the pool cannot hold.
    """
    if decodes:
        if ledger.take_next_tokens(decodes):
            return []
    elif not prefills or any(ledger.most_tokens(request) for request in prefills):
        return []
    victims: list[RequestView] = []
    staying = list(decodes)
    for victim in sorted((*decodes, *prefills), key=_sparing(victim_key))[:-1]:
        ledger.release(victim)
        victims.append(victim)
        if victim in staying:
            staying.remove(victim)
        if ledger.num_free > 0 and ledger.take_next_tokens(staying):
            break
    return victims


def _sparing(
    victim_key: Callable[[RequestView], tuple[float, ...]],
) -> Callable[[RequestView], tuple[float, ...]]:
    def key(request: RequestView) -> tuple[float, ...]:
        return (request.num_preemptions >= MAX_PREEMPTIONS, *victim_key(request))

    return key


class Intake:
    """Seats and KV headroom for those who want to start, as the plan takes shape.

    Headroom is what is free once every running request has grown as expected and the reserve is
    left alone. What is set aside for a due request
    (`set_aside`) is closed to the others.
    """

    __slots__ = (
        "_headroom",
        "_ledger",
        "_lengths",
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
        running: Sequence[RequestView],
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
        self._num_running = len(running)
        self._seats = max_running - len(running)
        self._reserve = int(kv_reserve * view.num_total_blocks)
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

    def _count_headroom(self) -> int:
        if self._headroom is None:
            # The one loop over everybody running: `_blocks` written out, without its calls.
            size = self._view.block_size
            longest = min(self._view.max_model_len, self._view.num_total_blocks * size)
            expected = self._lengths.expected
            to_grow = 0
            for request in self._running:
                num_output = request.num_output_tokens + size
                usual = expected(class_name(request))
                if usual > num_output:
                    num_output = usual
                if request.max_tokens < num_output:
                    num_output = request.max_tokens
                num_tokens = request.num_prompt_tokens + num_output
                blocks = -(-(num_tokens if num_tokens < longest else longest) // size)
                held = len(request.block_table)
                if blocks > held:
                    to_grow += blocks - held
            num_free = self._view.num_free_blocks + self._ledger.num_returned
            self._headroom = num_free - to_grow - self._reserve
        return self._headroom

    def start_delays_s(self, requests: Sequence[RequestView], step_s: float) -> list[float] | None:
        """Predict how long each request, in serving order, waits for a seat and blocks, in seconds.

        None if nobody has to. A running request is expected to end after as many tokens as is
        typical for its class, one per step of `step_s` seconds (one block more if it is beyond
        that), and to leave its seat and expected blocks to the next in order.
        """
        newcomers = [i for i, r in enumerate(requests) if r.phase is not RequestPhase.RUNNING]
        headroom = self._count_headroom()
        blocks = [self._needed(requests[i]) for i in newcomers[: max(0, self._seats) + 1]]
        room = self._copy_room()
        targets = [paced_target_s(requests[i], self._pace) for i in newcomers]
        is_open = room is None or all(room.join(target_s) for target_s in targets)
        if is_open and len(newcomers) <= self._seats and sum(blocks) <= headroom:
            return None
        room = self._copy_room()
        ends = sorted(((self._steps_left(r), self._blocks(r)) for r in self._running), reverse=True)
        delays = [0.0] * len(requests)
        seats, delay_s = self._seats, 0.0
        for i, target_s in zip(newcomers, targets, strict=True):
            needed = self._needed(requests[i])
            has_pace = room is None or room.join(target_s)
            while ends and (seats < 1 or needed > headroom or not has_pace):
                steps, freed = ends.pop()
                delay_s = steps * step_s
                seats += 1
                headroom += freed
                if room is not None:
                    room.leave()
                    has_pace = has_pace or room.join(target_s)
            delays[i] = delay_s
            seats -= 1
            headroom -= needed
        return delays

    def longest_stream_s(self, step_s: float) -> float:
        """Predict when the last running request with a promise has ended, at `step_s` a token."""
        steps = [self._steps_left(r) for r in self._running if live_promise(r) is not None]
        return max(steps, default=0) * step_s

    def _copy_room(self) -> StreamRoom | None:
        return None if self._room is None else self._room.copy()

    def _steps_left(self, request: RequestView) -> int:
        typical = min(request.max_tokens, self._lengths.typical(class_name(request)))
        left = typical - request.num_output_tokens
        return left if left > 0 else self._view.block_size

    def set_aside(self, request: RequestView) -> None:
        """Keep a seat and the expected blocks of a due request from everybody else."""
        self._seats -= 1
        self._headroom = self._count_headroom() - self._needed(request)

    @property
    def is_full(self) -> bool:
        """Whether no seat is left."""
        return self._seats < 1

    def admit(self, request: RequestView, *, has_turn: bool = False) -> bool:
        """Take a seat and blocks for all known tokens of a request that wants to start or resume;
        False if there is no room.

        With nobody running the reserve and the expectation do not count: a request alone must
        always be able to go on. `is_short` remembers that blocks, not seats, were the obstacle,
        `is_outpaced` that one stream more would break a token promise. A preempted stream has its
        place already, and who has its turn by age comes in all the same.
        """
        if self._seats < 1:
            return False
        is_joining = self._room is None or self._room.join(paced_target_s(request, self._pace))
        if not (is_joining or has_turn or request.phase is RequestPhase.PREEMPTED):
            self.is_outpaced = True
            return False
        headroom = self._count_headroom()
        blocks = self._needed(request)
        has_room = blocks <= headroom or self._num_running == 0
        if not has_room or not self._ledger.take(request, request.num_remaining_tokens):
            self.is_short = True
            return False
        self._seats -= 1
        self._num_running += 1
        self._headroom = headroom - blocks
        return True
