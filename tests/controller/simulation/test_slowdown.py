"""A machine that becomes slower must be served as well as one that always was."""

from __future__ import annotations

from dataclasses import replace

from controller.policy.slo import Slo, SloClass
from controller.simulation.hardware import A100_8B, Slowdown
from controller.simulation.run import SimulationConfig, simulate
from controller.simulation.source import WorkloadSource


def test_a_planner_recovers_from_a_change_of_speed() -> None:
    workload = WorkloadSource(generator="poisson:rate=4,duration=40").workload()
    machine = replace(A100_8B, slowdowns=(Slowdown(15.0, 1000.0, 2.0),))
    config = SimulationConfig(classes=(SloClass("default", Slo(1.0, 0.05)),))
    result = simulate(workload, "slo", machine, config)
    late = [request for request in result.requests if request.arrived_at > 20.0]
    assert len(late) > 60
    assert sum(request.is_kept for request in late) / len(late) > 0.7
