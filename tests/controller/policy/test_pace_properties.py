"""How long a step may last (docs/control.md), in any state beside any streams: the law is written
down here once more, one stream at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.policy.facts import class_name, live_promise
from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.slo import Slo
from costmodel.features import StepFeatures
from engine.ports import EngineView, RequestView
from engine.step import StepDecision, StepPlan
from tests.controller.policy.doubles import (
    GPU_FLOOR_S,
    GPU_WEIGHTS,
    JumpingModel,
    LinearCostModel,
    decode,
)
from tests.controller.policy.states import PROPERTY, configs, output_lengths, pace_configs, views

margins = st.sampled_from([0.05, 0.2, 0.6])
# Machines on which prompts have steps of their own, beside one pace or another.
jumping_models = st.builds(JumpingModel, st.sampled_from([0.04, 0.07, 0.2]))
EPS_S = 1e-9


def even_machines(margin: float) -> tuple[LinearCostModel, LinearCostModel]:
    """Machines on which prompts are mixed with decodes, a slow one and a fast one."""
    return LinearCostModel(margin=margin), LinearCostModel(GPU_WEIGHTS, GPU_FLOOR_S, margin)


class Due(NamedTuple):
    """Until when, in seconds from now, the mean of a step may keep a stream waiting for its target,
    and its upper bound.
    """

    mean_s: float
    upper_s: float


class Planned(NamedTuple):
    """A plan for a view, the streams in it, and how long a step of those alone takes."""

    view: EngineView
    config: PolicyConfig
    plan: StepPlan
    decision: StepDecision
    streams: list[RequestView]
    decode_s: float

    @property
    def num_prompt(self) -> int:
        """Prompt tokens; a stream that comes back from the host has one to compute, too."""
        return sum(work.num_tokens for work in self.plan.work) - len(self.streams)

    @property
    def mean_s(self) -> float:
        assert self.decision.predicted_mean_s is not None
        return self.decision.predicted_mean_s

    @property
    def upper_s(self) -> float:
        assert self.decision.predicted_upper_s is not None
        return self.decision.predicted_upper_s

    @property
    def is_bound(self) -> bool:
        """Whether there are prompt tokens that must fit."""
        return self.num_prompt > 0 and self.decision.upper_bound_tokens > 0

    @property
    def num_granted(self) -> int:
        """Prompt tokens that are computed although not one fits: a block for who is due, in its
        turn, or without streams.
        """
        is_turn = self.view.step_no % self.config.turn_period == 0
        return self.view.block_size if is_turn or not self.streams else 0

    @property
    def is_probe(self) -> bool:
        """Whether it may be a block that only the mean allows: now and then a margin that forbids
        it must have a chance to shrink.
        """
        is_time = self.view.step_no % self.config.probe_period == 0
        is_small = self.num_prompt <= self.view.block_size
        return is_time and is_small and self.decision.binding_constraint == "explore"


def planned(
    view: EngineView, config: PolicyConfig, model: LinearCostModel, lengths: OutputLengths
) -> Planned:
    plan = SloPlanner(config, model, lengths).plan(view)
    assert plan.decision is not None
    gone = {preemption.request_id for preemption in plan.preemptions}
    streams = [r for r in view.running if r.is_decoding and r.request_id not in gone]
    num_context = sum(stream.num_computed_tokens + 1 for stream in streams)
    alone = StepFeatures(num_decode_requests=len(streams), decode_context_tokens=num_context)
    decode_s = float(model.predict(alone.to_array()[None, :]).mean_s[0])
    return Planned(view, config, plan, plan.decision, streams, decode_s)


def last_at(stream: RequestView) -> float:
    assert stream.last_token_at is not None
    return stream.last_token_at


def target_s(stream: RequestView, decode_s: float, num_expected: int) -> float:
    """The time per token that is asked of steps; +inf where only the gap limit speaks."""
    promise = live_promise(stream)
    if promise is None:
        return math.inf
    asked_s = [math.inf if promise.slo.tpot_s is None else promise.slo.tpot_s]
    left_s = promise.last_deadline_at - last_at(stream)
    if left_s > 0.0:
        num_total = min(stream.max_tokens, num_expected)
        asked_s.append(left_s / max(1, num_total - stream.num_output_tokens))
    # Hopeless, or nearly so: then as if the step of decodes alone were the target.
    return math.inf if min(asked_s) < 0.8 * decode_s else max(min(asked_s), decode_s)


def due(
    stream: RequestView, now: float, config: PolicyConfig, decode_s: float, num_expected: int
) -> Due:
    """When the stream's target wants its next token."""
    each_s = target_s(stream, decode_s, num_expected)
    promise, first_at, num = live_promise(stream), stream.first_token_at, stream.num_output_tokens
    if promise is None or first_at is None or each_s == math.inf:
        return Due(math.inf, math.inf)
    mean_at = last_at(stream) + config.pace * each_s
    if promise.slo.tpot_s is not None and promise.slo.tpot_s <= each_s:
        # What an end-to-end target leaves is in nobody's bank.
        banked_s = first_at + num * config.pace * promise.slo.tpot_s - mean_at
        mean_at += config.bank * max(0.0, banked_s)
    latest_at = last_at(stream) + config.upper_pace * each_s
    upper_at = max(last_at(stream) + each_s, min(first_at + num * each_s, latest_at))
    # What may be spent may be spent by the upper bound, too.
    return Due(mean_at - now, max(mean_at, upper_at) - now)


@PROPERTY
@given(view=views(is_live=True), config=pace_configs, margin=margins, lengths=output_lengths())
def test_a_step_with_prompts_ends_before_any_stream_is_due(
    view: EngineView, config: PolicyConfig, margin: float, lengths: OutputLengths
) -> None:
    for model in even_machines(margin):
        found = planned(view, config, model, lengths)
        decision = found.decision
        dues = {
            stream.request_id: due(
                stream, view.now, config, found.decode_s, lengths.expected(class_name(stream))
            )
            for stream in found.streams
        }
        tightest_s = min((each.mean_s for each in dues.values()), default=math.inf)
        if decision.slack_s is None:
            assert tightest_s == math.inf
        else:
            assert decision.slack_s == pytest.approx(tightest_s)
            assert decision.tightest_request_id is not None
            assert dues[decision.tightest_request_id].mean_s == pytest.approx(tightest_s)
        if found.is_bound:
            assert found.num_prompt <= decision.upper_bound_tokens
            assert found.mean_s <= tightest_s + EPS_S
            if not found.is_probe:
                assert found.upper_s <= min(each.upper_s for each in dues.values()) + EPS_S


@PROPERTY
@given(
    view=views(is_live=True),
    config=pace_configs,
    margin=margins,
    jumping=jumping_models,
    lengths=output_lengths(),
)
def test_a_step_with_prompts_keeps_the_gap_limit_of_every_stream(
    view: EngineView,
    config: PolicyConfig,
    margin: float,
    jumping: JumpingModel,
    lengths: OutputLengths,
) -> None:
    # Where prompts have steps of their own, too: what streams have banked is no gap.
    for each in (*even_machines(margin), jumping):
        found = planned(view, config, each, lengths)
        if not found.is_bound:
            assert found.num_prompt <= found.num_granted
            continue
        limit_s = max(config.gap_limit_s, 2.0 * found.decode_s)
        for since in (view.now, *map(last_at, found.streams)):
            assert view.now + found.mean_s <= since + config.pace * limit_s + EPS_S
            if not found.is_probe:
                assert view.now + found.upper_s <= since + limit_s + EPS_S


# What a stream asks of a step, in steps of decodes alone: below 0.8 of one it would be hopeless.
asked = st.lists(st.floats(0.8, 8.0), max_size=3).map(
    lambda some: sorted([1.0, 8.0, *some, *(1.01 * share for share in some)])
)


def upper_bounds(
    view: EngineView,
    config: PolicyConfig,
    model: LinearCostModel,
    lengths: OutputLengths,
    shares: list[float],
) -> list[int]:
    """N⁺ beside one stream that had its token just now, by how many steps of decodes alone it asks
    for. There are seats, blocks and tokens for everybody: only the stream is in the way.
    """
    # Nor is a block probed where not one token fits.
    config = replace(config, token_budget=None, max_running=None, probe_period=10**6)
    prefills = [request for request in view.running if not request.is_decoding]
    bounds, decode_s = [], 0.0
    for share in (0.0, *shares):
        slo = Slo(tpot_s=share * decode_s) if share else Slo()
        roomy = replace(
            view,
            running=[decode("stream", slo=slo, last_at=view.now), *prefills],
            num_free_blocks=1000,
            num_total_blocks=2000,
            num_holders=lambda block: 1,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            is_draining=False,
        )
        found = planned(roomy, config, model, lengths)
        decode_s = found.decode_s
        bounds.append(found.decision.upper_bound_tokens)
    return bounds[1:]


@PROPERTY
@given(
    view=views(is_live=True),
    config=configs,
    margin=margins,
    jumping=jumping_models,
    lengths=output_lengths(),
    shares=asked,
)
def test_more_slack_never_gives_a_smaller_upper_bound(
    view: EngineView,
    config: PolicyConfig,
    margin: float,
    jumping: JumpingModel,
    lengths: OutputLengths,
    shares: list[float],
) -> None:
    for each in (*even_machines(margin), jumping):
        bounds = upper_bounds(view, config, each, lengths, shares)
        assert bounds == sorted(bounds)


def test_these_states_ask_something_of_the_law() -> None:
    # A property that has hardly ever anything to say would hold whatever a planner did.
    seen: Counter[str] = Counter()

    # Which states are drawn shifts with the literals of every module that is loaded: so many of
    # them that the least count stays far from the threshold.
    @settings(PROPERTY, max_examples=200)
    @given(
        view=views(is_live=True),
        config=pace_configs,
        any_config=configs,
        margin=margins,
        jumping=jumping_models,
        lengths=output_lengths(),
        shares=asked,
    )
    def look(
        view: EngineView,
        config: PolicyConfig,
        any_config: PolicyConfig,
        margin: float,
        jumping: JumpingModel,
        lengths: OutputLengths,
        shares: list[float],
    ) -> None:
        slow, fast = even_machines(margin)
        for machine, each in (("slow", slow), ("fast", fast), ("jumping", jumping)):
            found = planned(view, config, each, lengths)
            seen[machine] += found.is_bound
            seen[f"{machine}, paced"] += found.is_bound and found.decision.slack_s is not None
            bounds = upper_bounds(view, any_config, each, lengths, shares)
            seen[f"{machine}, rising"] += bounds[0] < bounds[-1]

    look()
    assert min(seen.values()) >= 8, seen
