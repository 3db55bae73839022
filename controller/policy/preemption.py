"""How a victim gives way: its KV is computed again, or moved to host memory and back.

Owns that choice (control.md section 6). Must not choose the victims or move anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.ports import EngineView, RequestView
from engine.step import Preemption, PreemptionMethod


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
