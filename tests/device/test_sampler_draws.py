"""Draws: random numbers without state, the right frequencies, independence of batch-mates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from engine.device import drawing
from engine.device.sampler import Sampler
from engine.device.uniforms import _mix, key_of_request, key_of_seed, uniforms
from engine.request import Request, SamplingParams

pytestmark = pytest.mark.device

VOCAB_SIZE = 3000
# A test statistic that is this unlikely under the hypothesis would be a defect; all seeds are
# fixed, so a test that passes once always passes.
SIGNIFICANCE = 1e-4


def make(name: str, num_output: int = 0, **sampling: Any) -> Request:
    request = Request(name, (5, 6), 10_000, 0.0, SamplingParams(**{"temperature": 1.0, **sampling}))
    request.output_token_ids.extend([3] * num_output)
    return request


def draw(logits: torch.Tensor, requests: Sequence[Request], sampler: Sampler | None = None) -> Any:
    """Return the token of each request from the same row of logits."""
    rows = logits.expand(len(requests), -1).clone()
    tokens = (sampler or Sampler(seed=0)).sample(rows, requests)
    assert all(token.failure is None for token in tokens)
    return [token.token_id for token in tokens]


def grid(seeds: Sequence[int], num_indices: int) -> Any:
    """Return uniforms of shape (seeds, indices)."""
    keys = np.array([key_of_seed(seed) for seed in seeds], dtype=np.uint64)
    index = np.arange(num_indices, dtype=np.uint64)
    flat = uniforms(np.repeat(keys, num_indices), np.tile(index, len(seeds)))
    return flat.reshape(len(seeds), num_indices)


def test_the_generator_is_splitmix64() -> None:
    # The published first outputs for the start 1234567.
    start, gamma = np.uint64(1234567), np.uint64(0x9E3779B97F4A7C15)
    states = start + np.arange(1, 4, dtype=np.uint64) * gamma
    assert _mix(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    values = uniforms(np.full(3, start), np.arange(3, dtype=np.uint64))
    assert values.tolist() == [(int(x) >> 11) / 2**53 for x in _mix(states)]


def test_uniforms_are_uniform_along_seeds_and_along_indices() -> None:
    values = grid(range(-200, 200), 400)
    assert 0 <= values.min() <= values.max() < 1
    assert stats.kstest(values.ravel(), "uniform").pvalue > SIGNIFICANCE
    for line in (values[0], values[:, 0], values[:, -1], values.diagonal()):
        assert stats.kstest(line, "uniform").pvalue > SIGNIFICANCE


def test_neighbouring_seeds_and_indices_are_not_correlated() -> None:
    values = grid(range(400), 400)
    pairs = [
        (values[:-1], values[1:]),
        (values[:, :-1], values[:, 1:]),
        (values[:-1, :-1], values[1:, 1:]),
        (values[:-1, 1:], values[1:, :-1]),
    ]
    for left, right in pairs:
        # Twenty by twenty cells: more than a linear dependence would show.
        counts = np.histogram2d(left.ravel(), right.ravel(), bins=20, range=[[0, 1]] * 2)[0]
        assert stats.chisquare(counts.ravel()).pvalue > SIGNIFICANCE


def test_every_integer_is_a_seed_of_its_own() -> None:
    seeds = [0, 1, -1, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, -(2**64), 2**64 + 1, 2**100]
    assert len({key_of_seed(seed) for seed in seeds}) == len(seeds)
    logits = torch.zeros(1, VOCAB_SIZE)
    tokens = draw(logits, [make(f"r{seed}", seed=seed) for seed in seeds])
    assert len(set(tokens)) >= len(seeds) - 1


def test_without_a_seed_the_id_and_the_engines_seed_decide() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    names = [f"r{i}" for i in range(8)]
    first = draw(logits, [make(name) for name in names], Sampler(seed=1))
    assert draw(logits, [make(name) for name in reversed(names)], Sampler(seed=1)) == first[::-1]
    assert draw(logits, [make(name) for name in names], Sampler(seed=2)) != first
    assert len(set(first)) > 5
    assert key_of_request(1, "2") != key_of_seed(12)
    # Two engines that were given no seed do not repeat each other.
    assert draw(logits, [make(name) for name in names], Sampler()) != draw(
        logits, [make(name) for name in names], Sampler()
    )


def test_a_draw_depends_on_the_index_not_on_what_ran_before() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    sampler = Sampler(seed=0)
    request = make("a", seed=4)
    series = []
    for _ in range(6):
        # A step that is repeated, as after a neighbour's failure, draws the same again.
        (token,) = draw(logits, [request], sampler)
        assert draw(logits, [request], sampler) == [token]
        series.append(token)
        request.output_token_ids.append(3)
    assert len(set(series)) > 4
    sampler.forget("a")
    assert draw(logits, [request], sampler) != series[-1:]
    fresh = [make("a", num_output=index, seed=4) for index in range(6)]
    assert [draw(logits, [r], sampler)[0] for r in fresh] == series
    assert draw(logits, [make("a", seed=5)], sampler) != series[:1]


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 9, "top_p": 0.7, "temperature": 1.7},
    {"top_p": 0.9, "min_p": 0.02, "temperature": 0.6},
    {"top_k": 12, "top_p": 0.95, "min_p": 0.04},
]


def probabilities(logits: Any, params: SamplingParams) -> Any:
    """The distribution after temperature and filters, written down naively."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-weights, kind="stable")
    kept = order[: params.top_k] if params.top_k else order
    mass, total, nucleus = 0.0, weights[kept].sum(), []
    for token in kept:
        if mass >= params.top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    best = weights[order[0]]
    final = [token for token in nucleus if weights[token] >= params.min_p * best]
    result = np.zeros_like(weights)
    result[final] = weights[final] / weights[final].sum()
    return result


@pytest.mark.parametrize(("head", "wider"), [(4, 2), (1024, 16)])
@pytest.mark.parametrize("filters", FILTERS)
def test_frequencies_follow_the_distribution(
    filters: dict[str, Any], head: int, wider: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Most of these filters reach beyond a head of 4, some beyond 8.
    monkeypatch.setattr(drawing, "HEAD", head)
    monkeypatch.setattr(drawing, "_WIDER", wider)
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(2)) * 1.5
    count = 4000
    requests = [make(f"r{seed}", seed=seed, **filters) for seed in range(count)]
    tokens = draw(logits, requests)
    expected = probabilities(logits[0].double().numpy(), requests[0].sampling) * count
    found = np.bincount(tokens, minlength=40).astype(float)
    assert not found[expected == 0].any()
    # Chi-square needs a handful of expected draws in every cell: rare tokens share one.
    is_rare = expected < 10
    cells = [(found[~is_rare], expected[~is_rare])]
    if expected[is_rare].sum() >= 10:
        cells.append((found[is_rare].sum(keepdims=True), expected[is_rare].sum(keepdims=True)))
    observed = np.concatenate([cell[0] for cell in cells])
    wanted = np.concatenate([cell[1] for cell in cells])
    wanted *= observed.sum() / wanted.sum()
    assert len(observed) > 2
    assert stats.chisquare(observed, wanted).pvalue > SIGNIFICANCE


@pytest.mark.parametrize(("head", "wider"), [(16, 4), (1024, 16)])
def test_a_row_draws_the_same_alone_and_in_every_batch(
    head: int, wider: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "HEAD", head)
    monkeypatch.setattr(drawing, "_WIDER", wider)
    mixed = [*FILTERS, {"temperature": 0.0}, {"top_k": 2000}, {"temperature": 1e-300}]
    torch.manual_seed(0)
    logits = torch.randn(len(mixed), VOCAB_SIZE)
    alone = []
    for index, filters in enumerate(mixed):
        request = make(f"r{index}", num_output=index, seed=index, **filters)
        alone += draw(logits[index : index + 1], [request])
    generator = np.random.default_rng(1)
    for size in range(1, len(mixed) + 1):
        rows = generator.permutation(len(mixed))[:size]
        # A generous vocabulary per slice and one row per slice must agree as well.
        size_of_slice = int(generator.choice([1, 7000, 1 << 23]))
        monkeypatch.setitem(drawing._SLICE_ELEMENTS, "cpu", size_of_slice)
        requests = [
            make(f"r{index}", num_output=int(index), seed=int(index), **mixed[index])
            for index in rows
        ]
        tokens = Sampler(seed=size).sample(logits[rows.tolist()].clone(), requests)
        assert [token.token_id for token in tokens] == [alone[index] for index in rows]


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1)) * 50
    best = int(logits.argmax())
    requests = [make(f"r{seed}", seed=seed, temperature=1e-310) for seed in range(50)]
    assert set(draw(logits, requests)) == {best}
    count = 3000
    requests = [make(f"r{seed}", seed=seed, temperature=1e9) for seed in range(count)]
    found = np.bincount(draw(logits, requests), minlength=30)
    assert stats.chisquare(found).pvalue > SIGNIFICANCE


def test_a_token_of_probability_zero_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((1, 10), -math.inf)
    logits[0, 3:5] = 0.0
    for value in (0.0, 1 - 2.0**-53):
        monkeypatch.setattr(
            "engine.device.sampler.uniforms", lambda keys, _, v=value: np.full(len(keys), v)
        )
        requests = [make("a"), make("b", top_p=0.9999), make("c", top_k=4), make("d", min_p=0.5)]
        assert set(draw(logits, requests)) == ({3} if value == 0 else {4})
