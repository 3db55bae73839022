"""Sampling: filters, penalties, log-probabilities, and independence of batch-mates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.device.drawing import best_tokens
from engine.device.sampler import NOT_FINITE, Sampler
from engine.request import Request, SamplingParams

pytestmark = pytest.mark.device

VOCAB_SIZE = 3000


def make(name: str = "a", output: tuple[int, ...] = (), **sampling: Any) -> Request:
    request = Request(name, (5, 6), 10, 0.0, SamplingParams(**sampling))
    request.output_token_ids.extend(output)
    return request


def flat_with(peaks: dict[int, float], rows: int = 1) -> torch.Tensor:
    logits = torch.zeros(rows, VOCAB_SIZE)
    for token_id, value in peaks.items():
        logits[:, token_id] = value
    return logits


def draws(logits: torch.Tensor, count: int = 300, **sampling: Any) -> set[int]:
    """Return what `count` seeds draw."""
    requests = [
        make(f"s{seed}", **{"temperature": 1.0, "seed": seed, **sampling}) for seed in range(count)
    ]
    return {t.token_id for t in Sampler().sample(logits.repeat(count, 1), requests)}


def test_greedy_takes_the_best() -> None:
    (token,) = Sampler().sample(flat_with({17: 3.0, 4: 2.0}), [make()])
    assert (token.token_id, token.logprob, token.failure) == (17, None, None)


@pytest.mark.parametrize("vocab_size", [1, 7, 63, 64, 192, 1024, 512 * 6, 96 * 7])
@pytest.mark.parametrize("is_strided", [False, True])
def test_the_best_is_found_by_blocks_as_by_one(vocab_size: int, is_strided: bool) -> None:
    torch.manual_seed(vocab_size)
    # Few different values: many ties, of which the first counts.
    logits = torch.randint(0, 12, (40, vocab_size)).float()
    logits[3, vocab_size // 2] = math.nan
    logits[5, vocab_size // 3] = math.inf
    logits[7] = -math.inf
    if is_strided:
        logits = logits.t().contiguous().t()
    token_ids, peaks = best_tokens(logits)
    assert torch.equal(token_ids, logits.argmax(dim=-1))
    assert torch.equal(peaks.nan_to_num(99), logits.amax(dim=-1).nan_to_num(99))


def test_top_k_keeps_exactly_k() -> None:
    peaks = {3: 5.0, 4: 4.9, 5: 4.8, 6: 4.7}
    assert draws(flat_with(peaks), top_k=2) == {3, 4}


def test_top_p_keeps_the_smallest_nucleus() -> None:
    logits = torch.full((1, VOCAB_SIZE), -math.inf)
    logits[0, :4] = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert draws(logits, top_p=0.79) == {0, 1}
    assert draws(logits, top_p=0.5) == {0}


def test_a_nucleus_wider_than_the_sorted_head_is_not_cut() -> None:
    # Almost uniform: 90 % of the mass needs 2,700 of 3,000 tokens, more than the first 1,024.
    found = draws(flat_with({0: 0.1}), count=3000, top_p=0.9)
    assert len(found) > 1200


def test_min_p_is_relative_to_the_best() -> None:
    logits = torch.full((1, VOCAB_SIZE), -math.inf)
    logits[0, :3] = torch.log(torch.tensor([0.6, 0.34, 0.06]))
    assert draws(logits, min_p=0.2) == {0, 1}


def test_penalties_and_bias_change_only_their_own_row() -> None:
    logits = flat_with({5: 2.0, 9: 1.5, 7: 1.4}, rows=5)
    requests = [
        make("plain"),
        make("repetition", repetition_penalty=2.0),
        make("presence", output=(9, 5, 5), presence_penalty=0.8),
        make("frequency", output=(5, 5, 9), frequency_penalty=0.4),
        make("bias", logit_bias=((7, 1.0), (5, -1.0))),
    ]
    chosen = [token.token_id for token in Sampler().sample(logits, requests)]
    # 5 stands in the prompt (2.0 / 2); twice in the outputs (2.0 - 0.8 = 1.2 against 9's 0.7 and
    # 7's untouched 1.4; 2.0 - 2·0.4 = 1.2 against 9's 1.1 and 7's 1.4); and is biased down.
    assert chosen == [5, 9, 7, 7, 7]


def test_a_negative_logit_is_multiplied_by_the_repetition_penalty() -> None:
    logits = torch.full((1, VOCAB_SIZE), -9.0)
    logits[0, 5], logits[0, 8] = -1.0, -1.5
    (token,) = Sampler().sample(logits, [make(repetition_penalty=2.0)])
    assert token.token_id == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_penalty_makes_a_sound_model_look_broken(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.zeros(2, 8, dtype=dtype)
    logits[0, 3], logits[1, 3] = 9.0, math.nan
    tokens = Sampler(seed=0).sample(
        logits,
        [
            make(name, (3,), temperature=temperature, repetition_penalty=1e-320, num_logprobs=0)
            for name in "ab"
        ],
    )
    assert (tokens[0].token_id, tokens[0].failure) == (3, None)
    assert tokens[1].failure == NOT_FINITE


def test_no_stop_token_before_min_tokens() -> None:
    sampling: dict[str, Any] = {"stop_token_ids": (17, VOCAB_SIZE + 5), "min_tokens": 1}
    logits = flat_with({17: 3.0, 4: 2.0}, rows=2)
    chosen = Sampler().sample(logits, [make("a", **sampling), make("b", output=(1,), **sampling)])
    assert [token.token_id for token in chosen] == [4, 17]


def test_where_every_token_is_a_stop_something_is_said_all_the_same() -> None:
    stops = tuple(range(VOCAB_SIZE))
    (token,) = Sampler().sample(flat_with({17: 3.0}), [make(stop_token_ids=stops, min_tokens=5)])
    assert (token.token_id, token.failure) == (17, None)


def test_logprobs_are_the_models_own_before_penalties() -> None:
    logits = torch.randn(3, VOCAB_SIZE)
    expected = torch.log_softmax(logits.double(), dim=-1)
    requests = [
        make("none"),
        make("chosen", num_logprobs=0),
        make("top", num_logprobs=3, logit_bias=((40, 100.0),)),
    ]
    plain, chosen, top = Sampler().sample(logits.clone(), requests)
    assert plain.logprob is None
    assert chosen.logprob == pytest.approx(float(expected[1].max()))
    assert chosen.top_logprobs == ()
    assert top.token_id == 40
    assert top.logprob == pytest.approx(float(expected[2, 40]))
    values, ids = expected[2].topk(3)
    assert [item.token_id for item in top.top_logprobs] == ids.tolist()
    assert [item.logprob for item in top.top_logprobs] == pytest.approx(values.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("poison", "tokens"),
    [(math.nan, slice(100, 101)), (math.inf, slice(100, 101)), (-math.inf, slice(None))],
)
def test_a_poisoned_row_fails_alone(poison: float, tokens: slice, temperature: float) -> None:
    logits = flat_with({17: 30.0}, rows=3)
    logits[1, tokens] = poison
    requests = [make(name, temperature=temperature, num_logprobs=1) for name in "abc"]
    sampled = Sampler(seed=0).sample(logits, requests)
    assert [token.failure for token in sampled] == [None, NOT_FINITE, None]
    assert (sampled[0].token_id, sampled[2].token_id) == (17, 17)


def test_nothing_to_sample() -> None:
    assert Sampler().sample(torch.zeros(0, VOCAB_SIZE), []) == []
