"""Arrivals for scenarios: Poisson, with skewed lengths."""

from __future__ import annotations

import random

from controller.policy.slo import OnInfeasible, Slo
from engine.request import Request
from tests.controller.policy.doubles import (
    GPU_FLOOR_S,
    GPU_WEIGHTS,
    LinearCostModel,
    slo_class,
    waiting,
)

GPU_MODEL = LinearCostModel(GPU_WEIGHTS, GPU_FLOOR_S)
CHAT = Slo(ttft_s=1.0, tpot_s=0.05)


def arrivals(
    rate: float,
    duration_s: float,
    slo: Slo | None = CHAT,
    on_infeasible: OnInfeasible = OnInfeasible.REJECT,
    seed: int = 1,
) -> list[Request]:
    """Poisson arrivals with skewed lengths."""
    draw = random.Random(seed)
    requests: list[Request] = []
    at = draw.expovariate(rate)
    while at < duration_s:
        num_prompt = max(8, min(4000, round(draw.lognormvariate(6.7, 0.8))))
        num_output = max(2, min(400, round(draw.lognormvariate(4.5, 0.8))))
        requests.append(
            waiting(
                f"r{len(requests)}",
                num_prompt,
                at=at,
                slo=slo,
                of=slo_class(on_infeasible=on_infeasible),
                max_tokens=num_output,
            )
        )
        at += draw.expovariate(rate)
    return requests
