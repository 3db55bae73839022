"""Prompt scores against one float64 forward of transformers, for every chunking."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.device import drawing
from engine.device.attention.reference import ReferenceAttention
from engine.device.inputs import ScoreSpan
from engine.device.runner import TorchRunner
from engine.device.sampler import NOT_FINITE
from engine.device.scores import prompt_scores, score_rows
from engine.request import Request, SamplingParams
from engine.step import PromptToken, StepOutput, StepPlan, StepWork, WorkKind

pytestmark = pytest.mark.device

BLOCK_SIZE = 4
LENGTH = 29
CHUNKS = [1, 2, 3, 7, 16, LENGTH]


def make_runner(tiny: Any) -> TorchRunner:
    return TorchRunner(tiny.served, ReferenceAttention(), 64, BLOCK_SIZE, seed=0)


def work_of(request: Request, num_tokens: int) -> StepWork:
    kind = WorkKind.DECODE if request.is_decoding else WorkKind.PREFILL
    return StepWork(request.request_id, kind, num_tokens, request.num_computed_tokens)


def step(engine: TorchRunner, *shares: tuple[Request, int]) -> StepOutput:
    """Execute one step and commit it as the loop would."""
    requests = {request.request_id: request for request, _ in shares}
    work = tuple(work_of(request, num_tokens) for request, num_tokens in shares)
    output = engine.execute(StepPlan(work=work), requests)
    for item in work:
        requests[item.request_id].num_computed_tokens += item.num_tokens
    for token in output.tokens:
        assert token.failure is None
        requests[token.request_id].output_token_ids.append(token.token_id)
    for scores in output.prompt_scores:
        request = requests[scores.request_id]
        # Delivered once and without a hole.
        assert scores.start == request.num_scored_tokens + 1
        request.num_scored_tokens += len(scores.tokens)
    return output


@pytest.fixture(scope="session")
def expected(tiny: Any, make_prompt: Any) -> Any:
    """A prompt and its log-softmax by position, from one forward of transformers."""
    prompt = make_prompt(6, LENGTH)
    # The eager attention of the fixture takes its softmax in float32, whatever the model's dtype.
    reference = AutoModelForCausalLM.from_pretrained(
        tiny.folder, dtype=torch.float64, attn_implementation="sdpa"
    ).eval()
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0]
    assert logits.dtype == torch.float64
    return prompt, torch.log_softmax(logits, dim=-1)


def check(tokens: list[PromptToken], prompt: list[int], table: Any, count: int) -> None:
    """Compare the scores of the tokens at 1..len(prompt)-1."""
    assert [token.token_id for token in tokens] == prompt[1:]
    for position, token in enumerate(tokens):
        line = table[position]
        assert token.logprob == pytest.approx(float(line[token.token_id]), abs=1e-9)
        assert token.rank == 1 + int((line > line[token.token_id]).sum())
        values, ids = line.topk(count) if count else (line[:0], line[:0])
        assert [item.token_id for item in token.top_logprobs] == ids.tolist()
        assert [item.logprob for item in token.top_logprobs] == pytest.approx(
            values.tolist(), abs=1e-9
        )


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_scores_equal_one_forward_whatever_the_chunks(
    tiny: Any, expected: Any, make_request: Any, make_prompt: Any, chunk: int, is_mixed: bool
) -> None:
    prompt, table = expected
    engine = make_runner(tiny)
    request = make_request("scored", prompt, 5, num_prompt_logprobs=3, temperature=0.7, seed=1)
    request.block_table = list(range(20, 30))
    decode = make_request("decode", make_prompt(8, 6), 60, num_logprobs=2)
    decode.block_table = list(range(40, 60))
    plain = make_request("plain", make_prompt(9, LENGTH), 5)
    plain.block_table = list(range(10))
    alone = make_request("decode", decode.prompt_token_ids, 60, num_logprobs=2)
    alone.block_table = list(range(40, 60))
    if is_mixed:
        step(engine, (decode, 6))
    tokens: list[PromptToken] = []
    sampled = 0
    while request.num_computed_tokens < LENGTH:
        num_tokens = min(chunk, LENGTH - request.num_computed_tokens)
        shares = [(request, num_tokens)]
        if is_mixed:
            shares = [(decode, 1), (request, num_tokens), (plain, num_tokens)]
        output = step(engine, *shares)
        assert len(output.prompt_scores) <= 1
        tokens += [token for scores in output.prompt_scores for token in scores.tokens]
        sampled += sum(token.request_id == "scored" for token in output.tokens)
    check(tokens, prompt, table, 3)
    assert sampled == 1
    if is_mixed:
        # Its neighbour's scores changed nothing for the decode.
        solo = make_runner(tiny)
        step(solo, (alone, 6))
        while alone.num_output_tokens < decode.num_output_tokens:
            step(solo, (alone, 1))
        assert alone.output_token_ids == decode.output_token_ids
    # Ranks above 1 must occur, or counting them was not tested.
    assert max(token.rank for token in tokens) > 5


def test_scored_tokens_are_not_scored_again(tiny: Any, expected: Any, make_request: Any) -> None:
    prompt, table = expected
    engine = make_runner(tiny)
    request = make_request("a", prompt, 5, num_prompt_logprobs=0)
    request.block_table = list(range(12))
    tokens: list[PromptToken] = []
    for chunk in (7, 4):
        tokens += step(engine, (request, chunk)).prompt_scores[0].tokens
    # Preempted: everything is computed again, from other blocks and in other chunks.
    request.num_preemptions += 1
    request.num_computed_tokens = 0
    request.block_table = list(range(30, 45))
    assert not step(engine, (request, 9)).prompt_scores
    for chunk in (6, 10, 4):
        tokens += step(engine, (request, chunk)).prompt_scores[0].tokens
    check(tokens, prompt, table, 0)
    # And again with its output: nothing of the prompt is left to score.
    request.num_preemptions += 1
    request.num_computed_tokens = 0
    output = step(engine, (request, LENGTH + 1))
    assert not output.prompt_scores
    assert len(output.tokens) == 1


def test_a_prompt_of_one_token_has_no_scores(tiny: Any, make_request: Any) -> None:
    request = make_request("a", [5], 5, num_prompt_logprobs=2)
    request.block_table = [3]
    output = step(make_runner(tiny), (request, 1))
    assert not output.prompt_scores
    assert len(output.tokens) == 1


def test_logits_only_for_sampled_and_scored_rows(
    tiny: Any, expected: Any, make_request: Any, make_prompt: Any, monkeypatch: Any
) -> None:
    counts: list[int] = []
    original = type(tiny.served).logits

    def counting(self: Any, ids: Any, positions: Any, rows: Any, context: Any) -> Any:
        logits = original(self, ids, positions, rows, context)
        counts.append(logits.shape[0])
        return logits

    monkeypatch.setattr(type(tiny.served), "logits", counting)
    engine = make_runner(tiny)
    scored = make_request("scored", expected[0], 5, num_prompt_logprobs=1)
    plain = make_request("plain", make_prompt(3, 12), 5)
    scored.block_table, plain.block_table = list(range(10)), list(range(20, 30))
    step(engine, (plain, 5), (scored, 8))
    step(engine, (plain, 7), (scored, LENGTH - 8))
    # Eight scores; then one sample of each, and scores for all but the last token of the prompt.
    assert counts == [8, 2 + LENGTH - 8 - 1]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_score_fails_its_request_alone(
    tiny: Any, expected: Any, make_request: Any, make_prompt: Any, monkeypatch: Any, poison: float
) -> None:
    prompt, table = expected
    original = type(tiny.served).logits

    def poisoned(self: Any, ids: Any, positions: Any, rows: Any, context: Any) -> Any:
        logits = original(self, ids, positions, rows, context)
        # Rows: the sample of the first, then the scores of the two.
        logits[1 + LENGTH - 1 + 3, 7] = poison
        return logits

    monkeypatch.setattr(type(tiny.served), "logits", poisoned)
    good = make_request("good", prompt, 5, num_prompt_logprobs=2)
    bad = make_request("bad", make_prompt(3, 12), 5, num_prompt_logprobs=2)
    good.block_table, bad.block_table = list(range(10)), list(range(20, 30))
    work = (work_of(good, LENGTH), work_of(bad, 9))
    output = make_runner(tiny).execute(StepPlan(work=work), {"good": good, "bad": bad})
    assert {token.request_id: token.failure for token in output.tokens} == {
        "good": None,
        "bad": NOT_FINITE,
    }
    (scores,) = output.prompt_scores
    assert scores.request_id == "good"
    check(list(scores.tokens), prompt, table, 2)


def test_memory_is_bounded_by_slices_and_slices_change_nothing(monkeypatch: Any) -> None:
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(4))
    token_ids = torch.arange(40) % 50
    whole = score_rows(logits, token_ids, 5)
    sizes: list[int] = []
    original = torch.log_softmax

    def watching(rows: Any, dim: int) -> Any:
        sizes.append(rows.numel())
        return original(rows, dim=dim)

    monkeypatch.setitem(drawing._SLICE_ELEMENTS, "cpu", 150)
    monkeypatch.setattr(torch, "log_softmax", watching)
    sliced = score_rows(logits, token_ids, 5)
    assert max(sizes) <= 150
    assert sum(sizes) == logits.numel()
    for one, other in zip(whole.tensors, sliced.tensors, strict=True):
        assert torch.equal(one, other)


def test_equal_tokens_share_a_rank_and_impossible_ones_are_not_listed() -> None:
    logits = torch.full((2, 6), -math.inf)
    logits[:, :4] = torch.tensor([1.0, 3.0, 1.0, 0.0])
    scores = score_rows(logits, torch.tensor([2, 1]), 6)
    assert scores.ranks.tolist() == [2, 1]
    sampling = SamplingParams(num_prompt_logprobs=6)
    listed = prompt_scores(
        [ScoreSpan("a", 1, 2)],
        [tensor.numpy() for tensor in scores.tensors],
        {"a": Request("a", (0, 2, 1), 1, 0.0, sampling)},
    )[0][0]
    for token in listed.tokens:
        assert len(token.top_logprobs) == 4
        assert sum(math.exp(item.logprob) for item in token.top_logprobs) == pytest.approx(1.0)
