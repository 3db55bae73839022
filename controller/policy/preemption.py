"""Who gives way when KV blocks run out, and how: KV is computed again, or moved to host memory and
back (control.md section 6).

Owns both choices, shared by every policy. Must not know a deadline beyond the sort key that it is
handed, or move anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from controller.policy.kv import BlockLedger
from engine.ports import EngineView, RequestView
from engine.step import Preemption, PreemptionMethod

# A request preempted this often is spared as long as another victim is left.
MAX_PREEMPTIONS = 3


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


def choose_methods(
    view: EngineView,
    victims: Sequence[RequestView],
    recompute_s: Callable[[int], float],
    swap_block_s: float | None,
) -> tuple[Preemption, ...]:
    """Return each victim with the cheaper method, as far as the host's free blocks go.

    `recompute_s(n)` predicts seconds for computing n tokens again; a swap moves every block twice.
    """
    num_free = view.num_free_host_blocks
    preemptions = []
    for request in victims:
        method = PreemptionMethod.RECOMPUTE
        num_blocks = len(request.block_table)
        if (
            swap_block_s is not None
            and 0 < num_blocks <= num_free
            and 2.0 * num_blocks * swap_block_s < recompute_s(request.num_computed_tokens)
        ):
            method = PreemptionMethod.SWAP
            num_free -= num_blocks
        preemptions.append(Preemption(request.request_id, method))
    return tuple(preemptions)
