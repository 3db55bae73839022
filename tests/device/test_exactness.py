"""Greedy output equals `transformers.generate`, token by token, under every schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.device import packed
from engine.device.linear import FewRowLinear
from engine.device.model import load_model
from engine.device.packed import PackedLinear
from engine.request import FinishReason
from tests.device.families import NUM_NEW, generate

pytestmark = pytest.mark.device

CHUNKS = [1, 2, 3, 7, 16, 17, 64, None]


@pytest.fixture(scope="session")
def expected(
    tiny: Any, continuations: Callable[[str], Any]
) -> dict[int, tuple[list[int], list[int]]]:
    """Prompt and greedy continuation by prompt length."""
    table = continuations(tiny.name)
    return {length: (item.prompt, item.tokens) for length, item in table.items()}


@pytest.mark.parametrize("chunk", CHUNKS)
def test_alone(
    tiny: Any, expected: Any, make_engine: Any, make_request: Any, chunk: int | None
) -> None:
    for length, (prompt, tokens) in expected.items():
        engine = make_engine(tiny.served, chunk)
        request = make_request(f"r{length}", prompt, NUM_NEW)
        engine.run([request])
        assert request.output_token_ids == tokens, f"prompt of {length} tokens"
        assert request.finish_reason is FinishReason.LENGTH
        assert engine.pool.num_used == 0


@pytest.mark.parametrize("gap_steps", [0, 1, 3])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_mixed_with_running_decodes(
    tiny: Any, expected: Any, make_engine: Any, make_request: Any, chunk: int | None, gap_steps: int
) -> None:
    engine = make_engine(tiny.served, chunk)
    requests = [
        make_request(f"r{length}", prompt, NUM_NEW) for length, (prompt, _) in expected.items()
    ]
    engine.run(requests, gap_steps)
    for request, (_, tokens) in zip(requests, expected.values(), strict=True):
        assert request.output_token_ids == tokens, request.request_id
    # The schedule must really have mixed chunks of several prompts and decodes in one forward.
    kinds = [{work.kind for work in r.plan.work} for r in engine.recorder.reports]
    chunks = [r.plan.num_prefill_tokens for r in engine.recorder.reports]
    assert max(chunks) > 1
    if gap_steps:
        assert any(len(kind) == 2 for kind in kinds)
    assert engine.pool.num_used == 0


@pytest.mark.parametrize("kind", [PackedLinear, FewRowLinear])
@pytest.mark.parametrize("chunk", [7, None])
def test_float32_goes_through_products_of_our_own(
    tiny: Any,
    make_engine: Any,
    make_request: Any,
    make_prompt: Any,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int | None,
    kind: type,
) -> None:
    # float64 above never takes them; Qwen2's projections have biases, Gemma's have none.
    if kind is FewRowLinear:
        monkeypatch.setattr(packed, "is_available", lambda: False)
    served = load_model(str(tiny.folder), "float32", "cpu")
    assert any(type(m) is kind for m in served._model.modules())
    reference = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32).eval()
    requests, tokens = [], []
    for length in (3, 20, 45):
        prompt = make_prompt(length, length)
        tokens.append(generate(reference, prompt).tokens)
        requests.append(make_request(f"r{length}", prompt, NUM_NEW))
    make_engine(served, chunk).run(requests, gap_steps=1)
    assert [request.output_token_ids for request in requests] == tokens


def test_one_forward_per_step_and_logits_only_where_sampled(
    tiny: Any, expected: Any, make_engine: Any, make_request: Any, monkeypatch: Any
) -> None:
    shapes: list[tuple[int, int]] = []
    served = tiny.served
    original = type(served).logits

    def counting(self: Any, ids: Any, positions: Any, rows: Any, context: Any) -> torch.Tensor:
        logits: torch.Tensor = original(self, ids, positions, rows, context)
        shapes.append((ids.shape[1], logits.shape[0]))
        return logits

    monkeypatch.setattr(type(served), "logits", counting)
    engine = make_engine(served, 5)
    requests = [make_request(f"r{n}", expected[n][0], 4) for n in (17, 33, 2)]
    engine.run(requests, gap_steps=2)
    reports = [r for r in engine.recorder.reports if r.is_executed]
    assert len(shapes) == len(reports)
    for (num_tokens, num_rows), report in zip(shapes, reports, strict=True):
        assert num_tokens == report.plan.num_prefill_tokens + report.plan.num_decode_tokens
        assert num_rows == len(report.tokens)


def test_no_mask_spans_the_packed_batch(
    tiny: Any, expected: Any, make_engine: Any, make_request: Any, monkeypatch: Any
) -> None:
    from engine.device.attention import reference

    cells: list[int] = []
    original = reference._Group.mask

    def counting(self: Any, window: int | None) -> Any:
        mask = original(self, window)
        cells.append(mask.numel())
        return mask

    monkeypatch.setattr(reference._Group, "mask", counting)
    monkeypatch.setattr(reference, "TILE_ROWS", 16)
    monkeypatch.setattr(reference, "MAX_GROUP_SCORES", 2000)
    engine = make_engine(tiny.served, None)
    requests = [make_request(f"r{i}", expected[70][0], 1) for i in range(8)]
    engine.run(requests)
    assert all(request.output_token_ids == expected[70][1][:1] for request in requests)
    # Eight prompts of 70 packed would need (8·70)² cells in each of three layers, a prompt alone
    # 70². Tiles of 16 rows need at most 16·70, however long the chunk, groups of them at most what
    # is allowed; and tiles skip what lies after them.
    assert max(cells) <= 2000
    assert sum(cells) <= 3 * 8 * (70 * 70) * 0.75


def test_a_preempted_request_continues_as_if_undisturbed(
    tiny: Any, expected: Any, make_engine: Any, make_request: Any
) -> None:
    from dataclasses import replace

    from engine.step import Preemption, StepPlan

    class Preempting:
        """Preempts `victim` once, at the given step, by a planner that otherwise runs everyone."""

        def __init__(self, inner: Any, step_no: int) -> None:
            self.inner, self.step_no = inner, step_no

        def plan(self, view: Any) -> StepPlan:
            plan: StepPlan = self.inner.plan(view)
            running = {request.request_id for request in view.running}
            if view.step_no == self.step_no and "victim" in running:
                work = tuple(item for item in plan.work if item.request_id != "victim")
                return replace(plan, work=work, preemptions=(Preemption("victim"),))
            return plan

    num_preempted = 0
    for step_no in range(2, 20):
        engine = make_engine(tiny.served, 7)
        engine.loop._planner = Preempting(engine.loop._planner, step_no)
        victim = make_request("victim", expected[33][0], NUM_NEW)
        other = make_request("other", expected[17][0], NUM_NEW)
        engine.run([victim, other])
        assert victim.output_token_ids == expected[33][1]
        assert other.output_token_ids == expected[17][1]
        num_preempted += victim.num_preemptions
    assert num_preempted >= 14
