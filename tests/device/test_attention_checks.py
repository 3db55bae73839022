"""Every backend passes the conformance suite, and the suite sees every way to break it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.device.attention.base import AttentionBackend, UnsupportedByBackendError
from engine.device.attention.checks import (
    CASES,
    AttentionCase,
    ConformanceError,
    check_case,
    dense_attention,
    make_batch,
    prove,
    run_cases,
)
from engine.device.attention.reference import ReferenceAttention
from engine.device.kv_cache import LayerGeometry
from tests.device.attention_doubles import FlashAttentionOnCpu, TorchVarlenOnCpu

pytestmark = pytest.mark.device

CPU = torch.device("cpu")
BACKENDS: dict[str, Callable[[], Any]] = {
    "reference": ReferenceAttention,
    "flash_attn": FlashAttentionOnCpu,
    "torch_varlen": lambda: TorchVarlenOnCpu(is_paged=True),
    "torch_varlen, gathered": lambda: TorchVarlenOnCpu(is_paged=False),
}
# What a backend refuses, by case; everything else must be computed.
HALF_WIDTHS = {"values narrower than keys", "odd width"}
SOFTCAPS = {"soft-capped", "soft-capped window"}
REFUSED: dict[str, set[str]] = {
    "reference": set(),
    "flash_attn": HALF_WIDTHS,
    "torch_varlen": HALF_WIDTHS | SOFTCAPS,
    "torch_varlen, gathered": HALF_WIDTHS | SOFTCAPS,
}


@pytest.mark.parametrize("block_size", [4, 256])
@pytest.mark.parametrize("name", BACKENDS)
def test_conformance(name: str, block_size: int) -> None:
    outcomes = list(run_cases(BACKENDS[name](), CPU, torch.float64, block_size))
    assert [outcome.case for outcome in outcomes] == [case.name for case in CASES]
    assert [outcome for outcome in outcomes if outcome.failure] == []
    assert {outcome.case for outcome in outcomes if outcome.refusal} == REFUSED[name]
    assert all(outcome.error is not None for outcome in outcomes if not outcome.refusal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference_conforms_in_every_dtype(dtype: torch.dtype) -> None:
    outcomes = list(run_cases(ReferenceAttention(), CPU, dtype, 16))
    assert [outcome for outcome in outcomes if outcome.error is None] == []


class Broken(ReferenceAttention):
    """A reference that breaks one promise."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change

    def attend(self, query: Any, cache: Any, inputs: Any, call: Any) -> torch.Tensor:
        output: torch.Tensor = self.change((query, cache, inputs, call))
        return output


def rerun(**changes: Any) -> Callable[[Any], Any]:
    def attend(batch: Any) -> torch.Tensor:
        query, cache, inputs, call = batch
        call = replace(call, **changes.get("call", {}))
        inputs = replace(inputs, scratch={}, **changes.get("inputs", lambda _: {})(inputs))
        return ReferenceAttention().attend(query, cache, inputs, call)

    return attend


MIXED = next(case for case in CASES if case.name == "mixed")


@pytest.mark.parametrize(
    ("change", "case"),
    [
        (rerun(call={"scale": 0.2}), MIXED),
        (rerun(call={"sliding_window": 600}), MIXED),
        (rerun(call={"sliding_window": 12}), replace(MIXED, sliding_window=11)),
        (rerun(call={"softcap": None}), replace(MIXED, softcap=2.0)),
        (rerun(inputs=lambda i: {"context_lengths": i.context_lengths - 1}), MIXED),
        (rerun(inputs=lambda i: {"host_block_table": i.host_block_table[::-1]}), MIXED),
        (lambda batch: rerun()(batch).float(), MIXED),
        (lambda batch: rerun()(batch)[:-1], MIXED),
        (lambda batch: rerun()(batch).roll(1, dims=1), MIXED),
        # What a kernel does that multiplies a masked probability of zero with what was never
        # written.
        (lambda batch: rerun()(batch) + 0.0 * batch[1].values[0].sum(), MIXED),
    ],
    ids=[
        "scale",
        "a window that is none",
        "a window one too wide",
        "no soft-cap",
        "a key too few",
        "another's blocks",
        "dtype",
        "shape",
        "heads",
        "leak",
    ],
)
def test_the_suite_sees_a_broken_promise(change: Callable[[Any], Any], case: Any) -> None:
    with pytest.raises(ConformanceError):
        check_case(Broken(change), case, CPU, torch.float64, 16)


def test_whatever_a_backend_raises_becomes_an_outcome() -> None:
    def crash(batch: Any) -> Any:
        raise RuntimeError("no kernel\nimage")

    outcomes = list(run_cases(Broken(crash), CPU, torch.float64, 16))
    assert {outcome.failure for outcome in outcomes} == {"RuntimeError: no kernel image"}


def test_the_yardstick_equals_torch() -> None:
    # An independent opinion on one request without windows and caps.
    case = AttentionCase("alone", ((9, 30),), num_heads=4, num_kv_heads=4)
    batch = make_batch(case, CPU, torch.float64, 16)
    slots = batch.inputs.host_block_table[0].repeat(16) * 16 + list(range(16)) * 4
    keys = batch.cache.keys[0].flatten(0, 1)[slots[:39]]
    values = batch.cache.values[0].flatten(0, 1)[slots[:39]]
    expected = torch.nn.functional.scaled_dot_product_attention(
        batch.query.transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=torch.ones(9, 39, dtype=torch.bool).tril(30),
        scale=batch.call.scale,
    ).transpose(0, 1)
    torch.testing.assert_close(dense_attention(batch), expected)


LAYER = LayerGeometry(num_kv_heads=2, key_dim=16, value_dim=16, num_heads=4)


@pytest.mark.parametrize("layer", [LAYER, replace(LAYER, sliding_window=4096)])
def test_a_working_backend_is_proved(layer: LayerGeometry) -> None:
    prove(TorchVarlenOnCpu(is_paged=True), CPU, torch.float64, 4, (layer,) * 3)


def test_a_backend_that_does_not_run_is_refused_with_its_reason() -> None:
    def crash(batch: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    with pytest.raises(UnsupportedByBackendError, match=r"no kernel image.*--attention-backend"):
        prove(Broken(crash), CPU, torch.float64, 16, (LAYER,))


def test_a_window_is_proved_by_crossing_it() -> None:
    # A kernel that ignores windows computes batches shorter than the window all the same.
    backend: AttentionBackend = Broken(rerun(call={"sliding_window": None}))
    prove(backend, CPU, torch.float64, 16, (LAYER,))
    with pytest.raises(UnsupportedByBackendError, match="error"):
        prove(backend, CPU, torch.float64, 16, (replace(LAYER, sliding_window=4096),))
