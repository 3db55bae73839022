"""The cases of the goals: which requests, which targets, which machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.bench.goals_cases import (
    Inputs,
    Kind,
    changing_cases,
    machine_rate,
    one_class_cases,
    steady_cases,
    targets_of,
)
from controller.simulation.hardware import A100_8B, H100_70B
from controller.workload.generators import poisson
from controller.workload.lengths import FixedLengths, LognormalLengths
from controller.workload.traces import write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "conv.csv"
    write_trace(poisson(4.0, 12.0, LognormalLengths(1500, 5000, 4, 8), 0), path)
    return path


def inputs(trace: Path, **changes: Any) -> Inputs:
    return replace(Inputs(None, trace, None, (A100_8B,), num_requests=24, start_s=1.0), **changes)


def test_cases_are_traces_on_machines_with_their_targets(trace: Path) -> None:
    source = inputs(trace, mooncake=trace, hardware=(A100_8B, H100_70B), num_requests=15)

    cases = steady_cases(source)

    assert [case.name for case in cases] == [
        "azure-conv, a100-8b",
        "mooncake, a100-8b",
        "azure-conv, h100-70b",
        "mooncake, h100-70b",
    ]
    assert targets_of(cases[1]) == [("chat", 4.0, 0.05), ("code", 10.0, 0.1), ("batch", 60.0, 0.5)]
    assert targets_of(cases[2]) == [("chat", 1.0, 0.1), ("code", 2.0, 0.2), ("batch", 60.0, 1.0)]
    # As many of Azure's code as asked for; runs of the others last about as long.
    assert [case.num_requests for case in cases] == [45, 9, 45, 9]
    assert steady_cases(replace(source, azure_code=trace))[1].num_requests == 15
    assert one_class_cases(source)[0].num_requests == 15
    assert [each.weight for each in cases[0].weighted().scene.config.classes] == [1000.0, 30.0, 1.0]
    assert targets_of(one_class_cases(source)[0]) == [("chat", 1.0, 0.05)]
    assert one_class_cases(replace(source, azure_conv=None)) == []


def test_mooncakes_shortest_prompts_are_mostly_chat(trace: Path) -> None:
    case = steady_cases(inputs(trace, azure_conv=None, mooncake=trace))[0]

    first, second = (case.scene.workload(1.0, seed).arrivals for seed in (3, 4))

    chat = [a.num_prompt_tokens for a in first if a.slo_class == "chat"]
    rest = [a.num_prompt_tokens for a in first if a.slo_class != "chat"]
    assert len(chat) == 7
    assert sum(chat) / len(chat) < sum(rest) / len(rest)
    # Not by length alone: seeds would differ in nothing.
    assert [a.slo_class for a in first] != [a.slo_class for a in second]


def test_a_seed_draws_classes_but_no_arrivals_of_a_trace(trace: Path) -> None:
    case = steady_cases(inputs(trace))[0]
    first, second = (case.scene.workload(case.load(5.0), seed).arrivals for seed in (0, 1))

    assert [a.at_s for a in first] == [a.at_s for a in second]
    assert [a.slo_class for a in first] != [a.slo_class for a in second]
    assert case.scene.workload(case.load(5.0), 0).rate == pytest.approx(5.0)


@pytest.mark.parametrize("is_given", [True, False])
def test_traffic_that_changes_has_its_phases(trace: Path, is_given: bool) -> None:
    source = replace(inputs(trace), azure_conv=trace if is_given else None, num_requests=500)
    case = changing_cases(source)[0]

    arrivals = case.scene.workload(case.load(8.0), 0).arrivals

    assert case.kind is Kind.CHANGING
    assert len(arrivals) == pytest.approx(8 * 160, rel=0.1)
    assert {a.slo_class for a in arrivals if a.at_s % 80.0 < 40.0} == {"chat"}
    assert {a.slo_class for a in arrivals if a.at_s % 80.0 > 40.0} == {"code", "batch"}
    if is_given:
        assert max(a.num_output_tokens for a in arrivals) < 20


def test_the_first_guess_is_about_what_the_machine_can_do() -> None:
    workload = poisson(1.0, 50.0, FixedLengths(1024, 128), 0)
    # 64 decodes and 512 prompt tokens: 5 ms + 576 · 85 µs + 64 · 1088 · 66 ns + a little attention.
    step_s = 0.005 + 576 * 85e-6 + 64 * 1088 * 66e-9
    assert machine_rate(workload, A100_8B) == pytest.approx(64 / 128 / step_s, rel=0.02)
