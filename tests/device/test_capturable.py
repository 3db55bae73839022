"""A recorded forward asks the device nothing: no value may come back to the host while it runs,
and nothing may be sent. Seen on the CPU by the operations that would do it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.device.attention.base import PagedStepContext
from engine.device.attention.torch_varlen import TorchVarlenAttention
from engine.device.graphs import DecodeGraphs, GraphLimits
from engine.device.kv_cache import PagedKvCache
from engine.device.model import DecoderModel
from engine.device.random_models import TINY_FAMILIES, make_tiny
from tests.device.attention_doubles import VarlenDouble

pytestmark = pytest.mark.device

CPU = torch.device("cpu")
# `item()` and truth, data-dependent shapes, and tensors made from Python values.
FORBIDDEN = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "lift_fresh", "equal"}


class NoQuestions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on every operation that cannot be captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in FORBIDDEN, f"{name} in a recorded forward"
        assert not name.startswith(("unique", "_unique")), f"{name} in a recorded forward"
        return func(*args, **(kwargs or {}))


def no_questions() -> Any:
    return NoQuestions()  # type: ignore[no-untyped-call]


class SilentKernel(VarlenDouble):
    """The kernel as a capture sees it: it is launched, nobody looks at numbers."""

    def __call__(self, *args: Any, **keywords: Any) -> torch.Tensor:
        query: torch.Tensor = self.__signature__.bind(*args, **keywords).arguments["query"]
        return query * 0.5


def test_the_guard_sees_a_question() -> None:
    with no_questions(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        bool(torch.ones(1) > 0)
    with no_questions(), pytest.raises(AssertionError, match="lift_fresh"):
        torch.tensor([1, 2])


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_forward_of_decodes_can_be_recorded(family: str) -> None:
    model = DecoderModel(make_tiny(family, torch.float32, CPU), family)
    # Soft-capping layers go to a backend that is not at issue here.
    cache = PagedKvCache(model.layers, 3, 256, model.dtype, CPU)
    backend = TorchVarlenAttention(SilentKernel(), is_paged=True)
    num_recorded = 0

    def forward(inputs: Any) -> torch.Tensor:
        context = PagedStepContext(inputs, cache, backend)
        return model.logits(inputs.input_ids, inputs.position_ids, inputs.sample_rows, context)

    def record(run: Any) -> Any:
        nonlocal num_recorded
        with no_questions():
            run()
        num_recorded += 1
        return run

    graphs = DecodeGraphs(forward, GraphLimits(4, 512, 256, 2), CPU, record)
    if any(layer.softcap is not None for layer in model.layers):
        assert "cannot soft-cap" in (graphs.capture() or "")
        return
    assert graphs.capture() is None
    assert num_recorded == 3
