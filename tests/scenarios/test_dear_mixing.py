"""A machine on which every prompt costs a jump: promises are kept by steps that prompts have to
themselves.
"""

from __future__ import annotations

from controller.policy.slo import Slo, SloClass
from controller.simulation.hardware import H100_70B
from controller.simulation.measures import measure
from controller.simulation.run import SimulationConfig, simulate
from controller.workload.specs import generate

# A decode step of a few streams takes 35 ms there, one with any prompt tokens 58 ms.
CHAT = SloClass("default", Slo(ttft_s=1.0, tpot_s=0.06))


def test_streams_bank_for_the_steps_of_prompts_where_mixing_would_make_them_late() -> None:
    workload = generate("poisson:rate=4,duration=40,prompt=1020/4142,output=129/601", 3)
    config = SimulationConfig(classes=(CHAT,), seed=1)
    kept = {
        policy: measure(simulate(workload, policy, H100_70B, config), H100_70B).overall.attainment
        for policy in ("slo", "edf-shed-512")
    }
    # Mixing alone would keep a third of them: no prompt could be computed beside eight streams.
    assert kept["slo"] > 0.8
    assert kept["slo"] > kept["edf-shed-512"]
