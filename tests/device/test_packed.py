"""`PackedLinear` is `Linear`; where it cannot be had, the model is served all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from engine.device import packed
from engine.device.packed import PackedLinear, use_packed_linear

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not packed.is_available(), reason="this build of torch has no oneDNN"),
]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7, 8, 17, 256, 257, 600])
def test_it_computes_what_linear_computes(num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(num_rows)
    plain = nn.Linear(24, 40, bias=has_bias)
    model = nn.Sequential(plain)
    rows = torch.randn(num_rows, 24)
    expected = functional.linear(rows, plain.weight, plain.bias)
    assert use_packed_linear(model) == 1
    assert type(model[0]) is PackedLinear
    with torch.inference_mode():
        torch.testing.assert_close(model(rows), expected)
        torch.testing.assert_close(model(rows[None]), expected[None])
        # A slice of a wider tensor, as fused projections hand it on.
        wide = torch.randn(num_rows, 2, 24)
        expected = functional.linear(wide[:, 1], plain.weight, plain.bias)
        torch.testing.assert_close(model(wide[:, 1]), expected)


@pytest.mark.parametrize(("num_rows", "num_computed"), [(1, 4), (2, 4), (3, 4), (4, 4), (5, 5)])
def test_few_rows_are_computed_as_four(
    num_rows: int, num_computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(8, 6)
    use_packed_linear(nn.Sequential(layer))
    product, seen = PackedLinear._product, []

    def watched(self: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows)
        return product(self, rows)

    monkeypatch.setattr(PackedLinear, "_product", watched)
    with torch.inference_mode():
        assert layer(torch.ones(num_rows, 8)).shape == (num_rows, 6)
    assert [rows.shape[0] for rows in seen] == [num_computed]
    assert not seen[0][num_rows:].any()


def test_a_weight_that_is_shared_stays_what_it_is() -> None:
    embedding = nn.Embedding(30, 8)
    head = nn.Linear(8, 30, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleList([embedding, head])
    before = embedding.weight.detach().clone()
    assert use_packed_linear(model) == 1
    assert head.weight is embedding.weight
    assert torch.equal(embedding.weight, before)
    assert set(model.state_dict()) == {"0.weight", "1.weight"}
    rows = torch.randn(3, 8)
    with torch.inference_mode():
        torch.testing.assert_close(head(rows), rows @ before.t())


def test_other_layers_and_other_dtypes_are_left_alone() -> None:
    class Quantised(nn.Linear):
        """Stands for a subclass with a product of its own."""

    model = nn.Sequential(Quantised(4, 4), nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4))
    assert use_packed_linear(model) == 1
    assert [type(layer) for layer in model] == [Quantised, nn.Linear, PackedLinear]


def test_nothing_is_packed_without_memory_or_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(64, 64)
    model, num_bytes = nn.Sequential(layer), layer.weight.nbytes
    monkeypatch.setattr(packed, "host_available_bytes", lambda: 4 * num_bytes - 1)
    assert use_packed_linear(model) == 0
    monkeypatch.setattr(packed, "host_available_bytes", lambda: 4 * num_bytes)
    monkeypatch.setattr(packed, "is_available", lambda: False)
    assert use_packed_linear(model) == 0
    assert type(model[0]) is nn.Linear
    monkeypatch.undo()
    assert use_packed_linear(model) == 1
