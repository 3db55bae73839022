"""`FewRowLinear`: the same product with the operands in the other order, for few rows on a CPU.

Owns when that is faster. Must not change a weight or a result beyond rounding.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

# For few rows x, `W @ x.T` streams W once along its rows, while `x @ W.T` packs W anew for them:
# 1.4 to 3 times faster in float32 with few rows, no faster beyond this many (docs/log.md).
MAX_ROWS = 256
# The kernel's tiles are eight columns wide; an odd remainder costs more than columns of zeros do.
_TILE = 8


def padded_rows(num_rows: int) -> int:
    """Return the number of rows to compute: even up to a tile, then whole tiles.

    A single row becomes two as well: the matrix-vector kernel is slower than the two-column one.
    """
    step = 2 if num_rows <= _TILE else _TILE
    return -(-num_rows // step) * step


class FewRowLinear(nn.Linear):
    """A `Linear` that computes (W xᵀ)ᵀ for up to `MAX_ROWS` rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """Return `input @ weight.T + bias`; shape (…, in_features) -> (…, out_features)."""
        rows = input.reshape(-1, input.shape[-1])
        num_rows = rows.shape[0]
        if not 0 < num_rows <= MAX_ROWS:
            return functional.linear(input, self.weight, self.bias)
        padding = padded_rows(num_rows) - num_rows
        if padding:
            rows = functional.pad(rows, (0, 0, 0, padding))
        output = torch.mm(self.weight, rows.t()).t()[:num_rows]
        if self.bias is not None:
            output = output + self.bias
        return output.reshape(*input.shape[:-1], -1)


def use_few_row_linear(model: nn.Module) -> int:
    """Make every plain float32 `Linear` on the CPU a `FewRowLinear`; return how many.

    The modules keep their parameters and their place: only the class changes. Left alone is what
    has a product of its own: subclasses, and plain modules whose weight is quantised (a tensor
    subclass, or anything but a float32 matrix).
    """
    changed = 0
    for module in model.modules():
        if type(module) is nn.Linear and is_plain_float32(module.weight):
            module.__class__ = FewRowLinear
            changed += 1
    return changed


def is_plain_float32(weight: torch.Tensor) -> bool:
    """Whether a weight is what it looks like: quantised tensors may claim to be float32."""
    is_plain = type(weight) is nn.Parameter and type(weight.data) is torch.Tensor
    return is_plain and weight.device.type == "cpu" and weight.dtype == torch.float32
