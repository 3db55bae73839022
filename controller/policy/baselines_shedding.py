"""`SheddingPlanner`: deadline order and a fixed budget, with the admission of the control law.

Owns the baseline that says what the budget alone is worth: whom not to serve is decided as
`SloPlanner` does, how many tokens a step computes is not. Must not look at a pace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from controller.policy.budget import WORST_S, DecodeLoad
from controller.policy.demand import Demand
from controller.policy.facts import RunningTable
from controller.policy.judging import Judged
from controller.policy.lengths import OutputLengths
from controller.policy.pacing import Pacing
from controller.policy.planner import Budget, Fit, SloPlanner
from controller.policy.seating import Seated
from controller.policy.settings import PolicyConfig
from costmodel.base import CostModel
from engine.ports import EngineView


class SheddingPlanner(SloPlanner):
    """Earliest deadline first up to `token_budget` tokens per step, decodes included; who cannot be
    served in time at that rate is refused, degraded or queued as under the control law.

    The other settings are those of `config`. ValueError names the argument.
    """

    policy_name = "edf-shed"

    def __init__(
        self,
        token_budget: int,
        config: PolicyConfig,
        cost_model: CostModel,
        output_lengths: OutputLengths,
        model_version: Callable[[], int] | None = None,
        demand: Demand | None = None,
    ) -> None:
        super().__init__(
            replace(config, token_budget=token_budget),
            cost_model,
            output_lengths,
            model_version,
            demand=demand,
        )

    def _pace(self, view: EngineView, running: RunningTable) -> Pacing:
        return (
            super()
            ._pace(view, running)
            ._replace(
                limit_s=WORST_S,
                upper_limit_s=WORST_S,
                period_s=WORST_S,
                gap_limit_s=WORST_S,
                tightest_id=None,
                slack_s=None,
                is_gap_limited=False,
                holds_periods=False,
            )
        )

    def _choose(
        self,
        view: EngineView,
        judged: Judged,
        seated: Seated,
        decodes: DecodeLoad,
        pacing: Pacing,
        fit: Fit,
        room: int,
    ) -> Budget:
        num_tokens = min(room, seated.load.num_tokens)
        binding = "token_budget" if num_tokens == room else "idle"
        if seated.is_short_of_blocks and num_tokens < room:
            binding = "kv_blocks"
        return Budget(num_tokens, judged.lower_tokens, room, binding)
