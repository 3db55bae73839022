"""Made-up prompts share what the workload says, answers end where it says."""

from __future__ import annotations

import pytest

from controller.policy.promise import Promise
from controller.policy.slo import Slo, SloClass
from controller.simulation.hardware import A100_8B, Device
from controller.simulation.population import END_TOKEN, WORD_TOKEN, Population, PopulationRunner
from controller.workload.arrivals import Arrival
from costmodel.features import StepFeatures
from engine.clock import VirtualClock
from engine.request import Request
from engine.step import StepPlan, StepWork, WorkKind

CLASSES = {"chat": SloClass("chat", Slo(1.0, 0.05)), "default": SloClass("default")}


def population(max_tokens: int | None = None) -> Population:
    return Population(CLASSES, "default", max_tokens)


def common(a: Request, b: Request) -> int:
    pairs = zip(a.prompt_token_ids, b.prompt_token_ids, strict=False)
    return next(
        (i for i, (x, y) in enumerate(pairs) if x != y),
        min(a.num_prompt_tokens, b.num_prompt_tokens),
    )


def test_prompts_without_ids_share_nothing_not_even_with_answers() -> None:
    crowd = population()
    a, b = (crowd.request(Arrival(0.0, 100, 5), index) for index in (0, 1))
    assert (a.num_prompt_tokens, b.num_prompt_tokens) == (100, 100)
    assert common(a, b) == 0
    assert not {WORD_TOKEN, END_TOKEN} & {*a.prompt_token_ids, *b.prompt_token_ids}


@pytest.mark.parametrize(
    ("first", "second", "num_common"),
    [
        ((1, 2, 3), (1, 2, 3), 150),
        ((1, 2, 3), (1, 2, 4), 100),
        ((1, 2), (1, 2), 100),
        ((1, 2, 3), (1,), 50),
        ((1, 2, 3), (9, 2, 3), 0),
        ((1, 1, 2), (1, 2, 2), 50),
        ((1 << 60,), (1 << 60,), 50),
        ((), (), 0),
    ],
)
def test_prompts_begin_alike_as_far_as_their_ids_do(
    first: tuple[int, ...], second: tuple[int, ...], num_common: int
) -> None:
    crowd = population()
    a, b = (
        crowd.request(Arrival(0.0, 150, 5, None, ids, 50), index)
        for index, ids in enumerate((first, second))
    )
    assert (a.num_prompt_tokens, b.num_prompt_tokens) == (150, 150)
    assert common(a, b) == num_common


def test_requests_carry_the_promise_of_their_class() -> None:
    crowd = population()
    chat = crowd.request(Arrival(2.0, 8, 3, "chat"), 0).promise
    assert isinstance(chat, Promise)
    assert (chat.slo, chat.arrived_at) == (Slo(1.0, 0.05), 2.0)
    other = crowd.request(Arrival(2.0, 8, 3), 1).promise
    assert isinstance(other, Promise)
    assert other.slo.is_best_effort
    with pytest.raises(KeyError):
        crowd.request(Arrival(2.0, 8, 3, "gold"), 2)


def test_nobody_is_told_how_long_an_answer_will_be_unless_asked_to() -> None:
    assert population(500).request(Arrival(0.0, 8, 3), 0).max_tokens == 500
    assert population(500).request(Arrival(0.0, 8, 900), 0).max_tokens == 900
    assert population(None).request(Arrival(0.0, 8, 3), 0).max_tokens == 3


def test_the_last_token_of_an_answer_is_its_end_and_time_passes_as_the_machine_says() -> None:
    crowd, clock = population(500), VirtualClock()
    a = crowd.request(Arrival(0.0, 8, 2), 0)
    b = crowd.request(Arrival(0.0, 8, 1), 1)
    runner = PopulationRunner(clock, Device(A100_8B, 5), crowd.output_lengths)
    twin = Device(A100_8B, 5)
    work = (
        StepWork("0", WorkKind.PREFILL, 8, 0),
        StepWork("1", WorkKind.PREFILL, 4, 0),
    )
    first = runner.execute(StepPlan(work), {"0": a, "1": b})
    assert [(token.request_id, token.token_id) for token in first.tokens] == [("0", WORD_TOKEN)]
    # One of the two prompts ended: its logits are part of the price.
    expected_s = twin.step_s(StepFeatures.of(work, 1), 0.0)
    assert clock.now() == expected_s
    a.output_token_ids.append(WORD_TOKEN)
    a.num_computed_tokens, b.num_computed_tokens = 8, 4
    work = (StepWork("0", WorkKind.DECODE, 1, 8), StepWork("1", WorkKind.PREFILL, 4, 4))
    second = runner.execute(StepPlan(work), {"0": a, "1": b})
    assert [token.token_id for token in second.tokens] == [END_TOKEN, END_TOKEN]
