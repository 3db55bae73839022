"""Who gives way when KV blocks run out, how (KV is computed again, or moved to host memory and
back), and who may come back (control.md section 6).

Owns these choices, shared by every policy, and the bound on how often anybody gives way. Must not
know a deadline beyond the sort key that it is handed, or move anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from controller.policy.kv import BlockLedger
from engine.blocks import num_blocks_for
from engine.ports import EngineView, RequestView
from engine.step import Preemption, PreemptionMethod

MAX_PREEMPTIONS = 3
"""How often a request gives way at most. Whoever did as often is spared from then on."""


def hold_back(view: EngineView) -> EngineView:
    """Return the view as policies plan by it: without those preempted requests that cannot come
    back for good yet.

    Spared requests run together only if the pool holds all of them at their longest. Then the
    others' blocks are enough whenever one of them needs a block, and none has to give way again.
    They come back in the order of arrival, so none waits for more than those that arrived before it
    and those that run; who is not spared passes them, for it takes nothing that it could not give
    back. Blocks that several share are counted for each.
    """
    spared = [request for request in view.preempted if _is_spared(request)]
    if not spared:
        return view
    num_left = view.num_total_blocks
    num_left -= sum(_most_blocks(view, request) for request in view.running if _is_spared(request))
    spared.sort(key=lambda request: request.arrival_no)
    for place, request in enumerate(spared):
        num_left -= _most_blocks(view, request)
        if num_left < 0:
            late = {each.request_id for each in spared[place:]}
            return replace(
                view, preempted=[each for each in view.preempted if each.request_id not in late]
            )
    return view


def _is_spared(request: RequestView) -> bool:
    return request.num_preemptions >= MAX_PREEMPTIONS


def _most_blocks(view: EngineView, request: RequestView) -> int:
    """Blocks that the request may hold at its end: prompt and `max_tokens` within the context."""
    num_tokens = request.num_prompt_tokens + max(1, request.max_tokens)
    limit = min(num_tokens, view.max_model_len)
    return min(num_blocks_for(limit, view.block_size), view.num_total_blocks)


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
    what the pool cannot hold. Nor is a spared one: with the others gone those fit (`hold_back`).
    In a state that cannot have come about by that rule they give way after everybody else, rather
    than that a plan lacks blocks.
    """
    if decodes:
        if ledger.take_next_tokens(decodes):
            return []
    elif not prefills or any(ledger.most_tokens(request) for request in prefills):
        return []
    victims: list[RequestView] = []
    staying = list(decodes)
    for victim in sorted((*decodes, *prefills), key=_sparing(victim_key))[:-1]:
        if victims and _is_spared(victim) and ledger.take_next_tokens(staying):
            # What the victims held is others' as well: no block is free, and none is needed.
            break
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
        return (_is_spared(request), *victim_key(request))

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
