"""Room for work: who gives way when KV blocks run out, and who may come in (control.md sections 5
and 6).

Owns the arithmetic of victims and of expected growth, shared by every policy. Must not predict
latency or know a deadline beyond the sort key that it is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from controller.policy.kv import BlockLedger
from controller.policy.ordering import class_name
from engine.blocks import num_blocks_for
from engine.ports import EngineView, RequestView

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
    victims: list[RequestView] = []
    num_needed = 0
    if ledger.num_free < len(decodes):
        num_needed = sum(ledger.needed(request, 1) for request in decodes)
    if num_needed > ledger.num_free:
        queue = sorted((*decodes, *prefills), key=_sparing(victim_key))
        for victim in queue[:-1]:
            if num_needed <= ledger.num_free:
                break
            if victim.is_decoding:
                num_needed -= ledger.needed(victim, 1)
            ledger.release(victim)
            victims.append(victim)
    elif not decodes and all(ledger.most_tokens(request) == 0 for request in prefills):
        for victim in sorted(prefills, key=_sparing(victim_key))[:-1]:
            if ledger.num_free > 0:
                break
            ledger.release(victim)
            victims.append(victim)
    for request in decodes:
        if request not in victims:
            ledger.take(request, 1)
    return victims


def _sparing(
    victim_key: Callable[[RequestView], tuple[float, ...]],
) -> Callable[[RequestView], tuple[float, ...]]:
    def key(request: RequestView) -> tuple[float, ...]:
        return (request.num_preemptions >= MAX_PREEMPTIONS, *victim_key(request))

    return key


def expected_blocks(request: RequestView, num_expected: int, view: EngineView) -> int:
    """Blocks that the request is expected to hold at its end, given `num_expected` output tokens of
    its class.

    An answer that outgrew the expectation is expected to go on for one block more.
    """
    num_output = max(num_expected, request.num_output_tokens + view.block_size)
    num_tokens = request.num_prompt_tokens + min(request.max_tokens, num_output)
    limit = min(num_tokens, view.max_model_len)
    return min(num_blocks_for(limit, view.block_size), view.num_total_blocks)


class Intake:
    """Seats and KV headroom for those who want to start, as the plan takes shape.

    Headroom is what is free once every running request has grown as expected and the reserve is
    left alone. What is set aside for a due request (`set_aside`) is closed to the others.
    """

    __slots__ = ("_expected", "_headroom", "_ledger", "_num_running", "_seats", "_view", "is_short")

    def __init__(
        self,
        view: EngineView,
        ledger: BlockLedger,
        running: Sequence[RequestView],
        max_running: int,
        kv_reserve: float,
        expected: Callable[[str], int],
    ) -> None:
        self._view = view
        self._ledger = ledger
        self._expected = expected
        self._num_running = len(running)
        self._seats = max_running - len(running)
        growth = sum(
            max(0, self._blocks(request) - len(request.block_table)) for request in running
        )
        held = sum(len(request.block_table) for request in running)
        reserve = int(kv_reserve * view.num_total_blocks)
        self._headroom = view.num_total_blocks - held - growth - reserve
        self.is_short = False

    def _blocks(self, request: RequestView) -> int:
        return expected_blocks(request, self._expected(class_name(request)), self._view)

    def set_aside(self, request: RequestView) -> None:
        """Keep a seat and the expected blocks of a due request from everybody else."""
        self._seats -= 1
        self._headroom -= self._blocks(request)

    @property
    def is_full(self) -> bool:
        """Whether no seat is left."""
        return self._seats < 1

    def admit(self, request: RequestView) -> bool:
        """Take a seat and blocks for all known tokens of a request that wants to start or resume;
        False if there is no room.

        With nobody running the reserve and the expectation do not count: a request alone must
        always be able to go on. `is_short` remembers that blocks, not seats, were the obstacle.
        """
        if self._seats < 1:
            return False
        blocks = self._blocks(request)
        is_alone = self._num_running == 0
        if (blocks > self._headroom and not is_alone) or not self._ledger.take(
            request, request.num_remaining_tokens
        ):
            self.is_short = True
            return False
        self._seats -= 1
        self._num_running += 1
        self._headroom -= blocks
        return True
