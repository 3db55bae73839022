"""`SimulatedRunner`: obeys a latency function on a virtual clock instead of a device.

Owns pretended execution, so that the production loop and planner run unchanged in the simulator and
in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.clock import VirtualClock
from engine.request import Request
from engine.step import SampledToken, StepOutput, StepPlan


class SimulatedRunner:
    """Advances the clock by `latency_of(plan)` seconds and samples one fixed token.

    `swap_block_s` seconds pass for every block that is moved to host memory or back.
    """

    def __init__(
        self,
        clock: VirtualClock,
        latency_of: Callable[[StepPlan], float],
        token_id: int = 0,
        swap_block_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._latency_of = latency_of
        self._token_id = token_id
        self._swap_block_s = swap_block_s

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        """Let the step's time pass; sample where a request's known tokens are complete."""
        self._clock.advance(self._latency_of(plan))
        return StepOutput(
            [
                SampledToken(work.request_id, self._token_id)
                for work in plan.work
                if work.num_context_tokens == requests[work.request_id].num_known_tokens
            ]
        )

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Let the copy's time pass."""
        self._clock.advance(self._swap_block_s * len(blocks))

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Let the copy's time pass."""
        self._clock.advance(self._swap_block_s * len(blocks))

    def forget(self, request_id: str) -> None:
        """Nothing is kept per request."""
