"""What a step weighs, counted by hand and by brute force; measurements on scripted clocks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from engine.clock import VirtualClock
from engine.device.kv_cache import LayerGeometry
from engine.device.roofline import (
    MachineLimits,
    ModelWeight,
    ParameterGroup,
    StepWeight,
    best_s,
    measure_bandwidth,
    measure_multiply_adds,
    num_keys_read,
    num_scores,
    weigh_model,
    weigh_step,
)
from engine.step import StepWork, WorkKind

pytestmark = pytest.mark.device
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
LAYERS = (LayerGeometry(2, 4, 4, None, 4), LayerGeometry(2, 4, 4, 3, 4))
MATRICES = 2 * (8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 12)
NORMS = 2 * 2 * 8 + 8


class ScriptedClock(VirtualClock):
    """Runs through the given durations: each pair of readings is one of them apart."""

    def __init__(self, durations: list[float]) -> None:
        super().__init__()
        self._steps = itertools.chain.from_iterable((0.0, duration) for duration in durations)

    def now(self) -> float:
        self.advance(next(self._steps))
        return super().now()


def llama(*, is_tied: bool) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=is_tied))


def decode(context: int) -> StepWork:
    return StepWork("r", WorkKind.DECODE, 1, context - 1)


@pytest.mark.parametrize("is_tied", [False, True])
def test_parameters_are_sorted_by_their_use(is_tied: bool) -> None:
    weight = weigh_model(llama(is_tied=is_tied), LAYERS)
    assert weight.matrices == ParameterGroup(MATRICES, 4 * MATRICES)
    assert weight.vectors == ParameterGroup(NORMS, 4 * NORMS)
    # Tied or not, the head is read where logits are wanted, and the embedding is only gathered.
    assert weight.head == ParameterGroup(50 * 8, 4 * 50 * 8)
    assert weight.embedding_row_bytes == 4 * 8
    assert weight.experts == ParameterGroup()


def test_half_precision_takes_half_the_bytes() -> None:
    weight = weigh_model(llama(is_tied=True).to(torch.bfloat16), LAYERS)
    assert weight.matrices == ParameterGroup(MATRICES, 2 * MATRICES)
    assert weight.kv_itemsize == 2


def test_a_step_of_two_decodes_by_hand() -> None:
    weight = weigh_model(llama(is_tied=False), LAYERS)
    step = weigh_step(weight, [decode(10), decode(2)], num_sampled=2)
    # Keys and values: 2 heads × 8 numbers per position; a layer reads all, the other its window of
    # 3, and both write one token of each request.
    positions = (10 + 1) + (3 + 1) + (2 + 1) + (2 + 1)
    rows = 2 * 8
    assert step.num_bytes == 4 * (MATRICES + NORMS + 50 * 8 + rows + 16 * positions)
    scores = 10 + 3 + 2 + 2
    assert step.num_multiply_adds == 2 * MATRICES + 2 * 50 * 8 + 4 * 8 * scores


def test_nothing_sampled_leaves_the_head_alone() -> None:
    weight = weigh_model(llama(is_tied=True), LAYERS)
    chunk = [StepWork("r", WorkKind.PREFILL, 4, 0)]
    without, with_one = (weigh_step(weight, chunk, num_sampled) for num_sampled in (0, 1))
    assert with_one.num_bytes - without.num_bytes == 4 * 50 * 8
    assert with_one.num_multiply_adds - without.num_multiply_adds == 50 * 8


@pytest.mark.parametrize("window", [None, 1, 2, 5, 40])
def test_visible_pairs_and_keys_by_brute_force(window: int | None) -> None:
    layer = LayerGeometry(1, 1, 1, window, 1)
    for past, chunk in itertools.product(range(9), range(1, 9)):
        item = StepWork("r", WorkKind.PREFILL, chunk, past)
        pairs = {
            (query, key)
            for query in range(past, past + chunk)
            for key in range(query + 1)
            if window is None or query - key < window
        }
        assert num_scores(item, layer) == len(pairs)
        assert num_keys_read(item, layer) == len({key for _, key in pairs})


def test_experts_count_as_far_as_tokens_reach_them() -> None:
    model: Any = MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2)
    )
    weight = weigh_model(model, LAYERS)
    num_expert = 2 * 8 * 3 * 8 * 12
    assert weight.experts == ParameterGroup(num_expert, 4 * num_expert)
    assert (weight.num_experts, weight.experts_per_token) == (8, 2)
    one, many = (weigh_step(weight, [decode(1)] * n, 0) for n in (1, 200))
    rest = 4 * (weight.matrices.num_parameters + weight.vectors.num_parameters + 8)
    assert one.num_bytes == rest + num_expert + 4 * 16 * 4
    # A batch reaches every expert, and no expert is read twice.
    kv_and_rows = 200 * 4 * (8 + 16 * 4)
    assert many.num_bytes == pytest.approx(rest - 4 * 8 + 4 * num_expert + kv_and_rows, rel=1e-3)
    per_token = weight.matrices.num_parameters + num_expert // 4 + 4 * 8 * 2
    assert one.num_multiply_adds == per_token
    assert many.num_multiply_adds == 200 * per_token


def test_the_limit_is_the_slower_of_reading_and_multiplying() -> None:
    limits = MachineLimits(bytes_per_s=100.0, multiply_adds_per_s=10.0)
    assert limits.limit_s(StepWeight(200, 10)) == 2.0
    assert limits.limit_s(StepWeight(200, 50)) == 5.0


def test_the_best_run_counts_and_the_first_is_not_timed() -> None:
    calls: list[int] = []
    clock = ScriptedClock([5.0, 2.0, 3.0])
    assert best_s(lambda: calls.append(1), torch.device("cpu"), 3, clock) == 2.0
    assert len(calls) == 4


def test_bandwidth_is_the_buffer_over_its_fastest_read() -> None:
    # Three kinds of reads, seven passes each.
    clock = ScriptedClock([4.0] * 10 + [0.5] + [4.0] * 10)
    speed = measure_bandwidth("cpu", torch.float32, num_bytes=1 << 20, clock=clock)
    assert speed == (1 << 20) / 0.5


def test_the_rate_is_that_of_the_best_product() -> None:
    clock = ScriptedClock([1.0] * 7 + [2.0] * 7)
    rate = measure_multiply_adds("cpu", torch.float32, sizes=(16, 32), clock=clock)
    assert rate == 32**3 / 2.0


def test_a_weight_made_by_hand_needs_no_model() -> None:
    weight = ModelWeight(
        ParameterGroup(100, 200), ParameterGroup(), ParameterGroup(10, 20), 4, LAYERS[:1], 2
    )
    step = weigh_step(weight, [decode(1)], 1)
    assert step == StepWeight(200 + 20 + 4 + 2 * 16 * 2, 100 + 10 + 4 * 8)
