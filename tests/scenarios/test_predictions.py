"""Predicted first tokens against those that came, where seats, blocks or paces keep prompts out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.slo import OnInfeasible, Slo
from engine.config import EngineConfig
from engine.request import Request
from engine.step import StepReport
from tests.controller.policy.doubles import LinearCostModel, Simulation
from tests.scenarios.workloads import GPU_MODEL, arrivals


class Teaching(Simulation):
    """Tells the planner how long answers were, and keeps the first prediction of each request."""

    def __init__(self, model: LinearCostModel, config: EngineConfig) -> None:
        self.lengths = OutputLengths(default=128)
        self.predicted_s: dict[str, float] = {}
        super().__init__(
            SloPlanner(PolicyConfig(exploration=0.0), model, self.lengths), model, config
        )

    def hear(self, report: StepReport) -> None:
        super().hear(report)
        for verdict in report.plan.admissions:
            if verdict.predicted_ttft_s is not None:
                self.predicted_s.setdefault(verdict.request_id, verdict.predicted_ttft_s)
        for request_id in report.finished:
            self.lengths.observe("chat", self.requests[request_id].num_output_tokens)


def ratios(requests: list[Request], config: EngineConfig) -> list[float]:
    """Predicted over actual seconds to the first token, of those that waited 0.3 s or were told
    so; ranked."""
    sim = Teaching(GPU_MODEL, config)
    sim.run(requests)
    found = []
    for request in requests:
        assert request.first_token_at is not None
        actual_s = request.first_token_at - request.arrived_at
        predicted_s = sim.predicted_s[request.request_id]
        if max(actual_s, predicted_s) > 0.3:
            found.append(predicted_s / actual_s)
    assert len(found) > 30
    return sorted(found)


LOOSE, TIGHT = Slo(ttft_s=20.0, tpot_s=0.05), Slo(ttft_s=20.0, tpot_s=0.018)
ENGINE = EngineConfig(num_blocks=8192, max_model_len=8192, max_waiting_requests=10_000)


@pytest.mark.parametrize(
    ("slo", "rate", "config"),
    [
        (LOOSE, 6.0, replace(ENGINE, num_blocks=500)),
        (LOOSE, 6.0, replace(ENGINE, max_num_seqs=8)),
        (TIGHT, 8.0, ENGINE),
    ],
    ids=["blocks", "seats", "paces"],
)
def test_predictions_are_of_the_size_of_what_happens(
    slo: Slo, rate: float, config: EngineConfig
) -> None:
    ranked = ratios(arrivals(rate, 10.0, slo, OnInfeasible.QUEUE), config)
    assert 0.7 < ranked[len(ranked) // 2] < 1.2
    assert ranked[int(0.9 * len(ranked))] < 2.5
    assert ranked[-1] < 10.0
