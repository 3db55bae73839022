"""Steps that try what only the mean allows: when, for whom, and how they are told from turns."""

from __future__ import annotations

from dataclasses import replace

from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.slo import Slo
from costmodel.base import LatencyEstimate
from costmodel.features import FloatArray
from engine.ports import RequestView
from engine.step import StepDecision
from tests.controller.policy.checking import CheckedPlanner
from tests.controller.policy.doubles import (
    JumpingModel,
    LinearCostModel,
    decode,
    running,
    view_of,
    waiting,
)

PLAIN = PolicyConfig(exploration=0.0, pace=1.0, upper_pace=1.0, probe_period=8, turn_period=8)
STEERED = PolicyConfig(exploration=0.0, upper_pace=1.0)
# 0.1 s and 1 ms per token; beside a context of 1,000 tokens 11 ms, beside one of 60,000 0.6 s. The
# upper bound is tenfold, so that not one token fits by it.
DOUBTFUL = LinearCostModel((0.001, 0.01, 0.0, 1e-5, 0.0), 0.1, margin=9.0)
STREAM = decode("stream", slo=Slo(tpot_s=0.6), last_at=100.0)


def plan(
    step_no: int,
    *prompts: RequestView,
    model: LinearCostModel = DOUBTFUL,
    num_free: int = 64,
    config: PolicyConfig = PLAIN,
    stream: RequestView = STREAM,
) -> tuple[list[tuple[str, int]], StepDecision]:
    """Return who computes how many prompt tokens beside the stream, and why."""
    held = [prompt for prompt in prompts if prompt.num_computed_tokens]
    view = view_of(
        now=100.0,
        step_no=step_no,
        running=[stream, *held],
        waiting=[prompt for prompt in prompts if not prompt.num_computed_tokens],
        num_free=num_free,
    )
    made = CheckedPlanner(SloPlanner(config, model, OutputLengths())).plan(view)
    assert made.decision is not None
    return [(w.request_id, w.num_tokens) for w in made.work[1:]], made.decision


def test_a_margin_that_forbids_mixed_steps_is_probed_now_and_then() -> None:
    prompt = waiting("prompt", 100, at=100.0)
    work, decision = plan(7, prompt)
    assert (work, decision.binding_constraint) == ([], "decode_slack")
    # The mean leaves room for a chunk, the upper bound for none: evidence comes in small bites.
    work, decision = plan(8, prompt)
    assert (work, decision.binding_constraint) == ([("prompt", 16)], "explore")
    assert decision.upper_bound_tokens == 16
    # What the mean forbids is not tried.
    work, decision = plan(8, prompt, model=LinearCostModel(floor_s=0.7))
    assert (work, decision.binding_constraint) == ([], "decode_slack")


def test_whoever_is_seated_instead_of_the_head_of_the_queue_is_probed_for_itself() -> None:
    # The first in the queue finds no blocks: a token of who is seated takes 11 ms, not 1.
    first = waiting("first", 400, at=98.0)
    second = running(waiting("second", 1100, at=99.0), 1000, 0)
    work, decision = plan(8, first, second, num_free=8)
    assert (work, decision.binding_constraint) == ([("second", 16)], "explore")
    # Not one token of this one fits by its mean.
    dear = running(waiting("dear", 60_100, at=99.0), 60_000, 0)
    work, decision = plan(8, first, dear, num_free=8)
    assert (work, decision.binding_constraint) == ([], "decode_slack")


def test_a_turn_within_a_probed_step_is_told_for_what_it_is() -> None:
    # Due by age, and served first in its turn, before who comes first by its priority.
    due = running(waiting("due", 60_100, at=0.0), 60_000, 0)
    prompt = waiting("prompt", 100, at=99.0, slo=Slo(tpot_s=5.0), priority=-1)
    config = replace(PLAIN, max_wait_s=50.0)
    work, decision = plan(8, due, prompt, config=config)
    assert work == [("due", 16)]
    # The mean forbids it: it is the turn's block, beyond what the stream allows.
    assert (decision.binding_constraint, decision.upper_bound_tokens) == ("min_quota", 0)
    # A turn is a block, where the mean allows a few tokens only as well.
    short = running(waiting("due", 10_100, at=0.0), 10_000, 0)
    work, decision = plan(8, short, prompt, config=config)
    assert work == [("due", 16)]
    assert (decision.binding_constraint, decision.upper_bound_tokens) == ("min_quota", 0)
    # Without it the stream has a say.
    work, decision = plan(8, short, config=replace(PLAIN, max_wait_s=200.0))
    assert (work, decision.binding_constraint) == ([("due", 4)], "explore")


class DoubtfulJump(JumpingModel):
    """30 ms; 70 ms with prompts, a fifth more by the upper bound."""

    def predict(self, features: FloatArray) -> LatencyEstimate:
        mean_s = super().predict(features).mean_s
        return LatencyEstimate(mean_s, 1.2 * mean_s)


def test_where_streams_bank_for_prompts_nothing_is_probed() -> None:
    # The mean of a step with prompts fits the pace, its upper bound takes alternating; and of the
    # stream's mean nothing is in hand for that yet.
    behind = decode("stream", slo=Slo(tpot_s=0.078), num_output=2, last_at=100.0)
    behind.first_token_at = 99.9
    prompt = waiting("prompt", 800, at=99.9, slo=Slo(ttft_s=5.0))
    for step_no in (7, 8):
        work, decision = plan(step_no, prompt, model=DoubtfulJump(), config=STEERED, stream=behind)
        assert (work, decision.binding_constraint) == ([], "decode_slack")
    # What is in hand is spent as a whole.
    behind.first_token_at = 99.96
    ahead = plan(8, prompt, model=DoubtfulJump(), config=STEERED, stream=behind, num_free=500)
    assert (ahead[0], ahead[1].binding_constraint) == ([("prompt", 512)], "decode_slack")
