"""What the sampler keeps of a request: counted once, never another's, gone when forgotten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.device.penalties import TokenHistory
from engine.device.sampler import Sampler
from engine.request import Request, SamplingParams

pytestmark = pytest.mark.device

VOCAB_SIZE = 200
MIXED: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.9, "temperature": 0.7, "seed": 3},
    {"frequency_penalty": 0.6, "temperature": 1.2, "seed": -3, "top_p": 0.9},
    {"logit_bias": ((5, 4.0), (9, -100.0))},
    {"min_tokens": 4, "stop_token_ids": (5, 17)},
    {"temperature": 1.0, "seed": 2**64 - 1, "top_k": 20, "num_logprobs": 4},
    {"temperature": 1.0, "num_logprobs": 2, "repetition_penalty": 0.8, "min_p": 0.02},
]


def make(index: int, name: str | None = None, **changes: Any) -> Request:
    prompt = tuple(range(index + 1, index + 6))
    sampling = SamplingParams(**{**MIXED[index], **changes})
    return Request(name or f"r{index}", prompt, 50, 0.0, sampling)


def row_for(request: Request) -> torch.Tensor:
    """A row that depends on the request and on its output, as a model's would."""
    last = request.output_token_ids[-1] if request.output_token_ids else 0
    seed = 1000 * int(request.request_id[1:]) + 7 * last + request.num_output_tokens
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def run(sampler: Sampler, requests: list[Request], order: Any = None) -> list[Any]:
    """One step; its tokens are committed and returned in the order of `requests`."""
    places = list(range(len(requests))) if order is None else list(order)
    batch = [requests[place] for place in places]
    tokens = sampler.sample(torch.stack([row_for(request) for request in batch]), batch)
    for token, request in zip(tokens, batch, strict=True):
        assert token.request_id == request.request_id
        request.output_token_ids.append(token.token_id)
    by_place = dict(zip(places, tokens, strict=True))
    return [by_place[place] for place in range(len(requests))]


def solo(index: int, num_steps: int) -> list[Any]:
    sampler, request = Sampler(seed=0), make(index)
    return [run(sampler, [request])[0] for _ in range(num_steps)]


def test_batches_of_every_size_and_order_equal_solo_runs() -> None:
    num_steps = 12
    alone = [solo(index, num_steps) for index in range(len(MIXED))]
    assert len({token.token_id for series in alone for token in series}) > 20
    generator = np.random.default_rng(0)
    for size in range(1, len(MIXED) + 1):
        sampler = Sampler(seed=0)
        members = sorted(generator.permutation(len(MIXED))[:size].tolist())
        requests = [make(index) for index in members]
        for step in range(num_steps):
            tokens = run(sampler, requests, generator.permutation(size))
            assert tokens == [alone[index][step] for index in members]


def test_a_member_may_pause_and_a_step_may_be_repeated() -> None:
    alone = [solo(index, 10) for index in range(len(MIXED))]
    sampler = Sampler(seed=0)
    requests = [make(index) for index in range(len(MIXED))]
    generator = np.random.default_rng(1)
    while min(request.num_output_tokens for request in requests) < 10:
        batch = [r for r in requests if r.num_output_tokens < 10 and generator.random() < 0.6]
        if not batch:
            continue
        rows = torch.stack([row_for(request) for request in batch])
        first = sampler.sample(rows.clone(), batch)
        if generator.random() < 0.5:
            # The loop runs parts of a failed step again.
            half = len(batch) // 2
            again = sampler.sample(rows[:half].clone(), batch[:half])
            again += sampler.sample(rows[half:].clone(), batch[half:])
            assert again == first
        for token, request in zip(first, batch, strict=True):
            index = requests.index(request)
            assert token == alone[index][request.num_output_tokens]
            request.output_token_ids.append(token.token_id)


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_an_id_that_returns_inherits_nothing(is_forgotten: bool) -> None:
    for old in range(len(MIXED)):
        sampler = Sampler(seed=0)
        before = make(old, "r0")
        for _ in range(5):
            run(sampler, [before])
        if is_forgotten:
            sampler.forget("r0")
        for new in range(len(MIXED)):
            fresh, expected = make(new, "r0"), make(new, "r0")
            reference = Sampler(seed=0)
            for _ in range(5):
                assert run(sampler, [fresh]) == run(reference, [expected])


def test_forgetting_leaves_nothing_behind() -> None:
    sampler = Sampler(seed=0)
    requests = [make(index) for index in range(len(MIXED))]
    run(sampler, requests)
    for request in requests:
        sampler.forget(request.request_id)
        sampler.forget("never seen")
    assert not sampler._cache


def test_a_history_counts_each_token_once() -> None:
    request = Request("a", (3, 3, 8, VOCAB_SIZE + 9), 99, 0.0, SamplingParams(repetition_penalty=2))
    history = TokenHistory(request, VOCAB_SIZE)

    def counted() -> dict[int, int]:
        ids, counts = history.update()
        assert len(set(ids.tolist())) == len(ids)
        return dict(zip(ids.tolist(), counts.tolist(), strict=True))

    assert counted() == {3: 0, 8: 0}
    # Far more than fits the first arrays.
    request.output_token_ids += [8, 5, 5, *range(20, 120)]
    expected = {3: 0, 8: 1, 5: 2, **dict.fromkeys(range(20, 120), 1)}
    assert counted() == expected
    assert counted() == expected
    request.output_token_ids.append(5)
    assert counted() == {**expected, 5: 3}
    # An output that was not continued but replaced.
    request.output_token_ids[:] = [8, 8]
    assert counted() == {3: 0, 8: 2}
    request.output_token_ids[:] = [8, 4]
    assert counted() == {3: 0, 8: 1, 4: 1}


def test_a_history_never_counts_the_whole_output_again(monkeypatch: pytest.MonkeyPatch) -> None:
    visited = 0

    class Watched(list[int]):
        def __getitem__(self, item: Any) -> Any:
            nonlocal visited
            found = super().__getitem__(item)
            visited += len(found) if isinstance(item, slice) else 0
            return found

    request = make(1)
    request.output_token_ids = Watched()
    sampler = Sampler(seed=0)
    for _ in range(60):
        run(sampler, [request])
    assert visited == 59
    monkeypatch.setattr(np, "unique", lambda *_: pytest.fail("counted from scratch"))
    run(sampler, [request])


def test_greedy_batches_compute_no_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("softmax", "log_softmax", "topk", "sort", "cumsum"):
        monkeypatch.setattr(torch, name, lambda *_, **__: pytest.fail("not needed for a maximum"))
    sampler = Sampler(seed=0)
    run(sampler, [make(index) for index in (0, 1, 4, 5)])


def test_half_precision_keeps_small_penalties() -> None:
    # In bfloat16 the neighbours of 30 are 29.875 and 30.125: a penalty of 0.05 would be lost.
    logits = torch.zeros(1, VOCAB_SIZE, dtype=torch.bfloat16)
    logits[0, 4] = logits[0, 6] = 30.0
    request = Request("a", (1,), 9, 0.0, SamplingParams(frequency_penalty=0.05))
    request.output_token_ids.append(4)
    (token,) = Sampler().sample(logits, [request])
    assert token.token_id == 6


def test_a_bias_outside_the_vocabulary_is_ignored() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 4] = 1.0
    bias = ((VOCAB_SIZE, 50.0), (-1, 50.0), (VOCAB_SIZE + 70, 50.0))
    (token,) = Sampler().sample(
        logits, [Request("a", (1,), 9, 0.0, SamplingParams(logit_bias=bias))]
    )
    assert token.token_id == 4


@pytest.mark.parametrize("index", range(len(MIXED)))
def test_poison_harms_no_neighbour_whatever_it_asks_for(index: int) -> None:
    expected = [solo(place, 1)[0] for place in range(len(MIXED))]
    requests = [make(place) for place in range(len(MIXED))]
    rows = torch.stack([row_for(request) for request in requests])
    rows[index, 150] = float("nan")
    tokens = Sampler(seed=0).sample(rows, requests)
    assert tokens[index].failure is not None
    assert tokens[:index] + tokens[index + 1 :] == expected[:index] + expected[index + 1 :]


def test_poison_behind_a_mask_is_found_where_it_would_be_told() -> None:
    # The masked token cannot win, but the distribution that is asked for does not exist.
    sampling = {"min_tokens": 3, "stop_token_ids": (150,), "temperature": 1.0}
    requests = [
        Request(name, (1,), 9, 0.0, SamplingParams(**sampling, num_logprobs=count))  # type: ignore[arg-type]
        for name, count in (("a", 1), ("b", None))
    ]
    rows = torch.zeros(2, VOCAB_SIZE)
    rows[:, 150] = float("nan")
    asked, plain = Sampler(seed=0).sample(rows, requests)
    assert asked.failure is not None
    assert plain.failure is None
    assert plain.token_id != 150
