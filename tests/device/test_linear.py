"""`FewRowLinear` is `Linear`, whatever the number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from engine.device.linear import MAX_ROWS, FewRowLinear, padded_rows, use_few_row_linear

pytestmark = pytest.mark.device


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 255, 256, 257])
def test_it_computes_what_linear_computes(num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(num_rows)
    plain = nn.Linear(24, 40, bias=has_bias)
    model = nn.Sequential(plain)
    rows = torch.randn(num_rows, 24)
    expected = functional.linear(rows, plain.weight, plain.bias)
    assert use_few_row_linear(model) == 1
    assert type(model[0]) is FewRowLinear
    torch.testing.assert_close(model(rows), expected)
    torch.testing.assert_close(model(rows[None]), expected[None])


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(1, 2), (2, 2), (3, 4), (7, 8), (8, 8), (9, 16), (17, 24), (256, 256)],
)
def test_rows_are_padded_to_whole_tiles(num_rows: int, expected: int) -> None:
    assert padded_rows(num_rows) == expected


def test_operands_are_swapped_only_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    original = torch.mm

    def counting(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(right.shape))
        return original(left, right)

    monkeypatch.setattr(torch, "mm", counting)
    layer = nn.Sequential(nn.Linear(4, 6))
    use_few_row_linear(layer)
    layer(torch.randn(5, 4))
    layer(torch.randn(MAX_ROWS + 1, 4))
    assert calls == [(4, 6)]


def test_other_layers_and_other_dtypes_are_left_alone() -> None:
    class Quantised(nn.Linear):
        """Stands for a subclass with a product of its own."""

    model = nn.Sequential(Quantised(4, 4), nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4))
    assert use_few_row_linear(model) == 1
    assert [type(layer) for layer in model] == [Quantised, nn.Linear, FewRowLinear]
