"""The sampler against a row-by-row one in float64, over parameters and outputs made at random."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from engine.device import drawing
from engine.device.sampler import Sampler
from engine.device.uniforms import key_of_seed, uniforms
from engine.request import Request, SamplingParams
from engine.step import SampledToken

pytestmark = pytest.mark.device

VOCAB_SIZE = 24
# Closer than this to the edge of its share, a draw is decided by rounding.
EDGE = 1e-9


@dataclass(frozen=True)
class Naive:
    """What one row must give: the token, unless rounding decides, and its log-probabilities."""

    token_id: int
    is_edge: bool
    logprobs: Any


def sample_naively(row: Any, request: Request) -> Naive:
    """Sample one row, one token at a time, with Python's own arithmetic."""
    params, output = request.sampling, request.output_token_ids
    raw = [float(value) for value in row]
    logits = list(raw)
    for token in range(len(logits)):
        if params.repetition_penalty != 1 and token in {*request.prompt_token_ids, *output}:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        if token in output:
            logits[token] -= params.presence_penalty
        logits[token] -= params.frequency_penalty * output.count(token)
        logits[token] += dict(params.logit_bias).get(token, 0.0)
        if len(output) < params.min_tokens and token in params.stop_token_ids:
            logits[token] = -math.inf
    total = math.log(math.fsum(math.exp(value - max(raw)) for value in raw)) + max(raw)
    logprobs = [value - total for value in raw]
    best = max(range(len(logits)), key=lambda token: logits[token])
    if params.is_greedy:
        second = max(value for token, value in enumerate(logits) if token != best)
        return Naive(best, logits[best] - second < EDGE, logprobs)

    weights = [math.exp((value - logits[best]) / params.temperature) for value in logits]
    ranked = sorted(range(len(logits)), key=lambda token: -weights[token])
    is_filtered = 0 < params.top_k < len(row) or params.top_p < 1 or params.min_p > 0
    is_edge = False
    if is_filtered:
        ranked = ranked[: params.top_k or len(ranked)]
        mass = math.fsum(weights[token] for token in ranked)
        nucleus: list[int] = []
        before = 0.0
        for token in ranked:
            is_edge |= abs(before - params.top_p * mass) < EDGE
            if before >= params.top_p * mass and nucleus:
                break
            nucleus.append(token)
            before += weights[token]
        is_edge |= any(abs(weights[token] - params.min_p) < EDGE for token in nucleus[1:])
        ranked = [token for token in nucleus if weights[token] >= params.min_p]
    else:
        # Without filters the shares stand in the vocabulary's order.
        ranked.sort()
    key = key_of_seed(params.seed or 0)
    uniform = uniforms(np.array([key], np.uint64), np.array([len(output)], np.uint64))[0]
    target = uniform * math.fsum(weights[token] for token in ranked)
    reached = 0.0
    for token in ranked:
        reached += weights[token]
        is_edge |= abs(reached - target) < EDGE
        if reached > target:
            return Naive(token, is_edge, logprobs)
    return Naive(ranked[-1], True, logprobs)


tokens = st.integers(0, VOCAB_SIZE - 1)


def one_of(*values: float) -> st.SearchStrategy[float]:
    return st.sampled_from(values)


def some(**options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """All of these options, or none of them half of the time."""
    return st.one_of(st.just({}), st.fixed_dictionaries(options))


BASE = st.fixed_dictionaries(
    {
        "temperature": one_of(0.0, 0.3, 1.0, 2.5),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "num_logprobs": st.sampled_from([None, 0, 1, 5, 20]),
    }
)
FILTERS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries({}, optional={"top_p": one_of(0.05, 0.5, 0.93)}),
    st.fixed_dictionaries({}, optional={"top_k": st.sampled_from([1, 3, 9, 23, 24, 500])}),
    st.fixed_dictionaries({}, optional={"min_p": one_of(0.01, 0.3, 1.0)}),
    st.fixed_dictionaries(
        {"top_p": one_of(0.5, 0.93), "top_k": st.integers(2, 30), "min_p": one_of(0.01, 0.1)}
    ),
)
PENALTIES = some(
    repetition_penalty=one_of(1.0, 0.7, 1.3, 2.0),
    presence_penalty=one_of(0.0, -1.5, 0.4, 2.0),
    frequency_penalty=one_of(0.0, -0.5, 0.2, 1.1),
)
BIAS = some(
    logit_bias=st.dictionaries(tokens, one_of(-100.0, -2.0, 1.5, 3.0), min_size=1, max_size=4).map(
        lambda bias: tuple(bias.items())
    )
)
STOPS = some(
    stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE + 3), max_size=4).map(tuple),
    min_tokens=st.integers(1, 6),
)
params = st.tuples(BASE, FILTERS, PENALTIES, BIAS, STOPS).map(
    lambda parts: SamplingParams(**{name: v for part in parts for name, v in part.items()})
)
outputs = st.lists(tokens, max_size=9)
prompts = st.lists(tokens, min_size=1, max_size=6).map(tuple)


def check(token: SampledToken, expected: Naive, request: Request) -> bool:
    """Compare one row; returns whether it could be compared."""
    assert token.failure is None
    if expected.is_edge:
        return False
    assert token.token_id == expected.token_id
    count = request.sampling.num_logprobs
    if count is None:
        assert token.logprob is None
        assert token.top_logprobs == ()
        return True
    assert token.logprob == pytest.approx(expected.logprobs[token.token_id], abs=1e-9)
    best = sorted(expected.logprobs, reverse=True)[:count]
    assert [item.logprob for item in token.top_logprobs] == pytest.approx(best, abs=1e-9)
    for item in token.top_logprobs:
        assert expected.logprobs[item.token_id] == pytest.approx(item.logprob, abs=1e-9)
    return True


@given(
    batch=st.lists(st.tuples(params, prompts, outputs), min_size=1, max_size=6),
    head=st.sampled_from([2, 5, 1024]),
    seed=st.integers(0, 2**32 - 1),
    num_steps=st.integers(1, 3),
)
@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
def compare(
    counts: list[int],
    batch: Sequence[tuple[SamplingParams, tuple[int, ...], list[int]]],
    head: int,
    seed: int,
    num_steps: int,
) -> None:
    """Run one batch; `counts` collects rows compared and rows seen."""
    sampler = Sampler(seed=0)
    requests = [
        Request(f"r{index}", prompt, 99, 0.0, sampling, output_token_ids=list(output))
        for index, (sampling, prompt, output) in enumerate(batch)
    ]
    generator = torch.Generator().manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "HEAD", head)
        patch.setattr(drawing, "_WIDER", 2)
        for _ in range(num_steps):
            logits = torch.randn(len(batch), VOCAB_SIZE, generator=generator, dtype=torch.float64)
            logits *= 2
            rows = logits.numpy().copy()
            sampled = sampler.sample(logits, requests)
            assert [token.request_id for token in sampled] == [r.request_id for r in requests]
            for token, row, request in zip(sampled, rows, requests, strict=True):
                counts[0] += check(token, sample_naively(row, request), request)
                counts[1] += 1
                # The next step counts on: histories are extended, never made anew.
                request.output_token_ids.append(token.token_id)


def test_every_batch_equals_the_rows_one_by_one() -> None:
    counts = [0, 0]
    compare(counts)
    # Rows that rounding decides are not compared: there must be few.
    assert counts[0] > 1000
    assert counts[0] > 0.9 * counts[1]
