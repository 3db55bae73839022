"""Strategies: any state that an engine, a cost model and what was fed to a planner could be in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st

from controller.policy.demand import Demand
from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig
from controller.policy.slo import OnInfeasible, Slo, SloClass
from engine.ports import EngineView
from engine.request import Request, RequestPhase
from engine.step import Admission, AdmissionAction
from tests.controller.policy.doubles import (
    BrokenCostModel,
    GarbageCostModel,
    JumpingModel,
    LinearCostModel,
    running,
    view_of,
    waiting,
)

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)

targets = st.one_of(st.none(), st.floats(0.01, 20.0))
slos = st.builds(Slo, ttft_s=targets, tpot_s=targets, e2e_s=targets)
# A step of decodes alone takes 0.01 to 0.15 s: paces that can be kept, nearly so, or not at all.
paced_slos = st.builds(
    Slo,
    ttft_s=targets,
    tpot_s=st.one_of(st.floats(0.03, 0.15), st.floats(0.03, 1.0)),
    e2e_s=targets,
)
classes = st.builds(
    SloClass,
    name=st.sampled_from(["chat", "code", "batch"]),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    on_infeasible=st.sampled_from(list(OnInfeasible)),
)
_garbage = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-9, 0.02, 0.1, 1e9, 1e300])
garbage_models = st.builds(
    GarbageCostModel,
    answers_s=st.lists(_garbage, min_size=2, max_size=16),
    costs_s=st.tuples(*[_garbage] * 6),
    knee=st.sampled_from([-1, 0, 1, 512]),
)
models = st.one_of(
    st.sampled_from(
        [
            LinearCostModel(),
            LinearCostModel(margin=0.5),
            LinearCostModel((1e-9,) * 5, 1e-9),
            JumpingModel(),
            BrokenCostModel(math.nan),
            BrokenCostModel(math.inf),
            BrokenCostModel(-1.0),
            BrokenCostModel(0.0),
            BrokenCostModel(1e300),
        ]
    ),
    garbage_models,
)
configs = st.builds(
    PolicyConfig,
    bank=st.sampled_from([0.0, 0.5, 1.0]),
    token_budget=st.sampled_from([None, 8, 64]),
    drain_steps=st.sampled_from([1.0, 8.0, math.inf]),
    patience=st.sampled_from([0.1, 1.0]),
    patience_s=st.sampled_from([0.05, 10.0]),
    patience_backlog=st.sampled_from([0.1, 0.5, math.inf]),
    stream_knee_share=st.sampled_from([0.05, 1.0]),
    upper_pace=st.sampled_from([1.0, 1.5]),
    gap_limit_s=st.sampled_from([0.08, 1.0]),
    max_overtaken=st.sampled_from([None, 1, 64]),
    exploration=st.sampled_from([0.0, 0.5]),
    split_threshold=st.sampled_from([0, 64]),
    turn_period=st.integers(1, 4),
    max_waiting_tokens=st.sampled_from([None, 100]),
    max_judged=st.sampled_from([1, 512]),
    length_neutrality=st.sampled_from([0.0, 1.0]),
    kv_reserve=st.sampled_from([0.0, 0.1]),
    order_blend=st.sampled_from([0.0, 8.0]),
    max_running=st.sampled_from([None, 1, 4]),
)
# Those that say how long a step may last, and when the law makes an exception.
pace_configs = st.builds(
    PolicyConfig,
    pace=st.sampled_from([0.7, 0.95, 1.0]),
    upper_pace=st.sampled_from([1.0, 1.2, 1.5]),
    bank=st.sampled_from([0.0, 0.5, 1.0]),
    gap_limit_s=st.sampled_from([0.08, 0.3, 1.0]),
    exploration=st.sampled_from([0.0, 0.5]),
    turn_period=st.integers(1, 4),
    max_wait_s=st.sampled_from([1.0, 30.0]),
    probe_period=st.sampled_from([1, 8]),
)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    """Arrivals of any rate and size, some refused, and some of those told to come back."""
    demand = Demand()
    for no in range(1, 1 + draw(st.integers(0, 12))):
        slo, of = draw(slos), draw(classes)
        if slo.is_best_effort:
            continue
        at, num_prompt = draw(st.floats(0.0, 100.0)), draw(st.integers(1, 9000))
        demand.observe(of.name, f"d{no}", no, at, num_prompt, slo, of.weight)
        if draw(st.booleans()):
            demand.refuse(f"d{no}")
            if draw(st.booleans()):
                demand.returns.book(at, at + draw(st.floats(0.0, 60.0)), num_prompt)
    return demand


@st.composite
def output_lengths(draw: st.DrawFn) -> OutputLengths:
    """Answers of some classes, of others none."""
    known = OutputLengths(default=draw(st.sampled_from([1, 16, 256])))
    for name in ("chat", "code", ""):
        for num_tokens in draw(st.lists(st.integers(1, 60), max_size=4)):
            known.observe(name, num_tokens)
    return known


@st.composite
def views(draw: st.DrawFn, *, is_live: bool | None = None) -> EngineView:
    """Any state that the loop could be in: blocks held by the running ones, or lent.

    A live one is as between two steps: streams had their last tokens a moment ago, and one of them
    at least runs beside a prompt that wants to. In the others everything has stood still for up to
    a minute: every stream is late.
    """
    if is_live is None:
        is_live = draw(st.booleans())
    now = draw(st.floats(0.0, 100.0))
    most_late = draw(st.sampled_from([0.0, 0.05, 0.4]))
    groups: dict[RequestPhase, list[Request]] = {phase: [] for phase in RequestPhase}
    for i in range(draw(st.integers(2 if is_live else 0, 8))):
        kind = draw(st.sampled_from(["new", "told", "prefill", "decode", "preempted"]))
        slo = draw(st.one_of(st.none(), slos))
        if is_live:
            kind = {0: "decode", 1: "told"}.get(i, kind)
            if i == 0 or (kind == "decode" and draw(st.booleans())):
                slo = draw(paced_slos)
        num_prompt, num_output = draw(st.integers(1, 200)), draw(st.integers(1, 40))
        at = first_at = last_at = now - draw(st.floats(0.0, 60.0))
        if is_live:
            pace_s = 0.5 if slo is None or slo.tpot_s is None else slo.tpot_s
            last_at = now - draw(st.floats(0.0, most_late)) * pace_s
            first_at = last_at - draw(st.floats(0.3, 1.1)) * pace_s * (num_output - 1)
            at = first_at - draw(st.floats(0.0, 2.0))
        request = waiting(
            f"r{i}",
            num_prompt,
            at=at,
            slo=slo,
            of=draw(classes),
            priority=draw(st.integers(-1, 1)),
        )
        if kind == "told":
            request.admission = Admission(request.request_id, AdmissionAction.WAIT, "queued")
        elif kind == "decode":
            running(request, num_prompt + num_output - 1, num_output, last_at=first_at)
            request.last_token_at = last_at
        elif kind == "prefill":
            running(request, draw(st.integers(0, num_prompt - 1)), 0)
        elif kind == "preempted":
            running(request, 0, draw(st.sampled_from([0, num_output])), last_at=first_at)
            request.phase = RequestPhase.PREEMPTED
            request.num_preemptions = draw(st.integers(1, 4))
        _share(draw, request, [*itertools.chain(*groups.values())])
        groups[request.phase].append(request)
    held = len({b for r in groups[RequestPhase.RUNNING] for b in r.block_table})
    num_running = len(groups[RequestPhase.RUNNING])
    waiting_tables = (r.block_table for r in itertools.chain(*groups.values()))
    cached = len(set(itertools.chain(*waiting_tables))) - held
    # Every block is held or free, and anybody fits alone.
    num_free = max(cached + draw(st.integers(0, 40)), 16 - held)
    return view_of(
        now=now,
        step_no=draw(st.integers(1, 20)),
        waiting=groups[RequestPhase.WAITING],
        running=groups[RequestPhase.RUNNING],
        preempted=groups[RequestPhase.PREEMPTED],
        num_blocks=held + num_free,
        num_free=num_free,
        max_num_seqs=max(num_running + is_live, draw(st.integers(1, 8))),
        max_num_batched_tokens=draw(st.sampled_from([8, 64, 512])),
        max_waiting=draw(st.sampled_from([1, 100])),
        is_draining=draw(st.booleans()),
        num_free_host=draw(st.integers(0, 12)),
    )


def _share(draw: st.DrawFn, request: Request, others: Sequence[Request]) -> None:
    """Let a request begin with the blocks of another one, or hope for cached ones."""
    most = (request.num_known_tokens - 1) // 16
    table = draw(st.sampled_from([*(other.block_table for other in others), [-1, -2, -3, -4]]))
    num_shared = draw(st.integers(0, min(most, len(table))))
    if request.phase is RequestPhase.RUNNING:
        num_shared = min(num_shared, request.num_computed_tokens // 16)
        if table[:1] != [-1]:
            request.block_table[:num_shared] = table[:num_shared]
    elif draw(st.booleans()):
        request.block_table = table[:num_shared]
        request.num_computed_tokens = 16 * num_shared
    elif request.phase is RequestPhase.PREEMPTED and request.num_output_tokens:
        # Moved to the host: all but the newest token's keys and values stand there.
        request.num_computed_tokens = request.num_known_tokens - 1
        request.host_block_table = list(range(-(-request.num_computed_tokens // 16)))
