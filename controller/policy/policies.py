"""Policies by name: the one table from which the simulator and the command line make planners.

Owns names. Must not hold a decision of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from controller.policy.baselines import StaticPlanner
from controller.policy.baselines_dynamic import SlackGreedyPlanner, SmallestFeasiblePlanner
from controller.policy.baselines_shedding import SheddingPlanner
from controller.policy.demand import Demand
from controller.policy.lengths import OutputLengths
from controller.policy.planner import SloPlanner
from controller.policy.settings import PolicyConfig
from costmodel.base import CostModel
from engine.ports import Planner

POLICY_NAMES = (
    "slo",
    "fcfs-N",
    "edf-N",
    "edf-shed-N",
    "whole",
    "slack-greedy",
    "smallest-feasible",
)
"""What `make_planner` understands; N is the tokens of a step, decodes included."""

_WITH_BUDGET = re.compile(r"(fcfs|edf|edf-shed)-([1-9][0-9]{0,8})")


def make_planner(
    name: str,
    cost_model: CostModel,
    output_lengths: OutputLengths,
    config: PolicyConfig | None = None,
    *,
    model_version: Callable[[], int] | None = None,
    swap_block_s: float | None = None,
    demand: Demand | None = None,
) -> Planner:
    """Return the planner called `name` (`POLICY_NAMES`, with a number for N).

    `config` (default `PolicyConfig()`) counts for "slo" and, but for what paces a step, for
    "edf-shed-N"; `model_version`, `swap_block_s` and `demand` are
    `SloPlanner`'s. Baselines without a cost
    model ignore it. ValueError lists the names.
    """
    config = config or PolicyConfig()
    match name:
        case "slo":
            return SloPlanner(
                config, cost_model, output_lengths, model_version, swap_block_s, demand
            )
        case "whole":
            return StaticPlanner(None)
        case "slack-greedy":
            return SlackGreedyPlanner(cost_model)
        case "smallest-feasible":
            return SmallestFeasiblePlanner(cost_model)
    family, token_budget = budget_of(name)
    if family == "edf-shed":
        return SheddingPlanner(
            token_budget, config, cost_model, output_lengths, model_version, demand
        )
    return StaticPlanner(token_budget, is_edf=family == "edf")


def budget_of(name: str) -> tuple[str, int]:
    """Return family and tokens of a policy with a fixed budget; ValueError lists all names."""
    found = _WITH_BUDGET.fullmatch(name)
    if found is None:
        raise ValueError(f"policy must be one of {', '.join(POLICY_NAMES)}, got {name!r}")
    return found[1], int(found[2])


def fixed_budget(name: str) -> int | None:
    """Return the tokens of a policy with a fixed budget, None of another; ValueError lists all."""
    has_none = name in POLICY_NAMES and not name.endswith("-N")
    return None if has_none else budget_of(name)[1]
