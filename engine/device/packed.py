"""`PackedLinear`: the product of a `Linear` by oneDNN on a weight that was reordered once, at load.

Owns when that is possible. Must not change a weight or a result beyond rounding.

A plain float32 `Linear` on a CPU goes to the BLAS library, which reorders the weight anew in every
call and, on processors that it was not tuned for, leaves half of their vector width unused. oneDNN
picks its kernel by what the processor can do and keeps the weight in the order that the kernel
reads: measured from one row to 512, it is faster for every number of rows (docs/log.md). The price
is a second copy of each weight. Fewer than four rows are filled up with zeros: that is faster, and
a decode step then takes no longer for one stream than for four.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from engine.device.linear import is_plain_float32
from engine.device.memory import host_available_bytes

# The kernel works through several rows at once; one or two take longer than four (docs/log.md).
_LEAST_ROWS = 4
# The copies may take this share of what memory is left; the KV pool and the steps want the rest.
_MOST_MEMORY = 0.25


def is_available() -> bool:
    """Whether this build of torch has oneDNN's product with a reordered weight."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch
        return False
    namespace = torch.ops.mkldnn
    return all(hasattr(namespace, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))


class PackedLinear(nn.Linear):
    """A `Linear` whose product reads a reordered copy of the weight.

    The weight itself stays: embeddings share it, and others may look at it. It must not change.
    """

    _packed: torch.Tensor

    def pack(self) -> None:
        """Reorder the weight; once, before the first product."""
        weight = self.weight.detach()
        # Not a buffer: nothing that moves or saves the module knows its layout.
        object.__setattr__(self, "_packed", torch.ops.mkldnn._reorder_linear_weight(weight, None))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """Return `input @ weight.T + bias`; shape (…, in_features) -> (…, out_features)."""
        if input.numel() == 0:
            return functional.linear(input, self.weight, self.bias)
        num_rows = input.numel() // input.shape[-1]
        if num_rows >= _LEAST_ROWS:
            return self._product(input)
        rows = input.new_zeros(_LEAST_ROWS, input.shape[-1])
        rows[:num_rows] = input.reshape(num_rows, -1)
        return self._product(rows)[:num_rows].reshape(*input.shape[:-1], -1)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return output


def use_packed_linear(model: nn.Module) -> int:
    """Make every plain float32 `Linear` on the CPU a `PackedLinear`; return how many.

    The modules keep their parameters and their place: only the class changes. 0 where oneDNN is
    missing, or too little memory is left for a second copy of the weights.
    """
    layers = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and is_plain_float32(module.weight)
    ]
    num_bytes = sum(layer.weight.nbytes for layer in layers)
    if not layers or not is_available() or num_bytes > _MOST_MEMORY * host_available_bytes():
        return 0
    for layer in layers:
        layer.__class__ = PackedLinear
        assert isinstance(layer, PackedLinear)  # noqa: S101 - just made so
        layer.pack()
    return len(layers)
