"""Drawing tokens: temperature, top-k, top-p and min-p, then the inverse of what they leave.

Owns filters and the inversion. A row's token depends on its own logits, parameters and uniform
alone: rows with and without filters never share a path, and every sum over the vocabulary is one
whose order does not depend on the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from engine.device.transfer import IntArray, to_device, to_host
from engine.device.uniforms import FloatArray
from engine.request import SamplingParams

# The filters look at this many of the most likely tokens, then at `_WIDER` times as many, before
# they sort the whole vocabulary: ten times the price from one to the next.
HEAD = 1024
_WIDER = 16
# Rows are computed in float64, this many logits at a time: on a CPU as much as its caches hold (and
# as the C library hands out again without asking the kernel for fresh pages), on a card what keeps
# it busy.
_SLICE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
# A maximum over blocks, then over one block, runs on vectors where an argmax runs on numbers.
_MAX_BLOCK, _MIN_BLOCK = 512, 64

_ROW, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _UNIFORM = range(6)


def row_slices(num_rows: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    """Cut rows into slices of bounded memory."""
    step = max(1, _SLICE_ELEMENTS.get(device.type, 1 << 20) // vocab_size)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def best_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and values of each row's maximum, (n,) each; NaN is the largest of all."""
    num_rows, vocab_size = logits.shape
    block = math.gcd(vocab_size, _MAX_BLOCK)
    if logits.device.type == "cuda" or block < _MIN_BLOCK or not logits.is_contiguous():
        token_ids = logits.argmax(dim=-1)
        return token_ids, logits.gather(-1, token_ids[:, None]).squeeze(-1)
    # Sizes in full: a step without a sampled row has no logits to infer one from.
    blocks = logits.view(num_rows, vocab_size // block, block)
    best = blocks.amax(dim=-1).argmax(dim=-1)
    members = blocks[torch.arange(num_rows), best]
    place = members.argmax(dim=-1)
    return best * block + place, members.gather(-1, place[:, None]).squeeze(-1)


@dataclass(frozen=True, slots=True)
class Draws:
    """What was drawn, on the device: token `token_ids[i]` for row `rows[i]`.

    `is_cut[i]` says that the filters reach further than was sorted: the draw is void until
    `DrawBatch.again` repeats it.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    is_cut: torch.Tensor


class DrawBatch:
    """The rows of one step that draw, with their parameters; one copy to the device.

    `rows`, `params` and `uniforms` have the same length n.
    """

    def __init__(
        self,
        rows: Sequence[int],
        params: Sequence[SamplingParams],
        uniforms: FloatArray,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        table = np.array(
            [
                (row, p.temperature, p.top_k or vocab_size, p.top_p, p.min_p, 0.0)
                for row, p in zip(rows, params, strict=True)
            ],
            dtype=np.float64,
        )
        table[:, _UNIFORM] = uniforms
        top_k = table[:, _TOP_K] = np.minimum(table[:, _TOP_K], vocab_size)
        # Without a limit: sums that round to 1 before the last token must not cut it off.
        table[table[:, _TOP_P] >= 1, _TOP_P] = np.inf
        has_no_k = top_k == vocab_size
        is_plain = has_no_k & np.isinf(table[:, _TOP_P]) & (table[:, _MIN_P] <= 0)
        # Rows of equal width share a path, rows without filters (width 0) have one of their own.
        widths = np.array([min(w, vocab_size) for w in (HEAD, _WIDER * HEAD, vocab_size)])
        width = widths[np.searchsorted(widths, np.where(has_no_k, 1, top_k))]
        width[is_plain] = 0
        order = np.argsort(width, kind="stable")
        self._table = table[order]
        self._width: IntArray = width[order]
        self.rows: IntArray = self._table[:, _ROW].astype(np.int64)

    def draw(self, logits: torch.Tensor) -> Draws:
        """Draw for all rows of `logits` (num_rows, vocab_size); waits for nothing."""
        table = to_device(self._table, self._device)
        drawn = []
        widths, starts = np.unique(self._width, return_index=True)
        for width, part in zip(
            widths.tolist(), table.tensor_split(starts[1:].tolist()), strict=True
        ):
            drawn.append(_draw(logits, part, width))
        return Draws(
            rows=table[:, _ROW].long(),
            token_ids=torch.cat([ids for ids, _ in drawn]),
            is_cut=torch.cat([cut for _, cut in drawn]),
        )

    def again(self, logits: torch.Tensor, is_cut: IntArray) -> IntArray:
        """Return on the host what the cut draws (their indices) give when more is sorted.

        Waits once or twice: such rows are rare.
        """
        token_ids = np.empty(len(is_cut), dtype=np.int64)
        left = np.arange(len(is_cut))
        for width in (min(_WIDER * HEAD, self._vocab_size), self._vocab_size):
            if not len(left):
                break
            table = to_device(self._table[is_cut[left]], self._device)
            ids, cut = to_host(_draw(logits, table, width), self._device)
            token_ids[left] = ids
            left = left[cut]
        return token_ids


def _draw(
    logits: torch.Tensor, table: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw for the rows of `table`; filters look at `width` tokens, 0 = there are none."""
    vocab_size = logits.shape[-1]
    token_ids = torch.empty(len(table), dtype=torch.int64, device=logits.device)
    is_cut = torch.zeros(len(table), dtype=torch.bool, device=logits.device)
    for part in row_slices(len(table), vocab_size, logits.device):
        params = table[part, :, None]
        row = logits.index_select(0, table[part, _ROW].long()).double()
        # Relative to the peak, a tiny temperature cannot overflow.
        row -= row.amax(dim=-1, keepdim=True)
        probs = torch.softmax(row.div_(params[:, _TEMPERATURE]), dim=-1)
        uniform = params[:, _UNIFORM]
        if width == 0:
            token_ids[part] = _invert(probs.cumsum(dim=-1), uniform).squeeze(-1)
            continue
        values, order = torch.topk(probs, width, dim=-1)
        cumulative = values.cumsum(dim=-1)
        keep = _kept(values, cumulative, params, vocab_size)
        last = keep.sum(dim=-1, keepdim=True) - 1
        choice = _invert(cumulative, uniform, last)
        token_ids[part] = order.gather(-1, choice).squeeze(-1)
        if width < vocab_size:
            is_cut[part] = keep[:, -1] & (params[:, _TOP_K, 0] > width)
    return token_ids, is_cut


def _kept(
    values: torch.Tensor, cumulative: torch.Tensor, params: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Return which of the sorted tokens stay, a beginning of each row.

    top-k first; top-p over what top-k leaves, renormalised; min-p relative to the likeliest. That
    is the order of transformers' processors.
    """
    width = values.shape[-1]
    top_k = params[:, _TOP_K]
    last_of_k = top_k.clamp(max=width).long() - 1
    mass = torch.where(top_k < vocab_size, cumulative.gather(-1, last_of_k), 1.0)
    before = functional.pad(cumulative[:, :-1], (1, 0))
    keep = (
        (torch.arange(width, device=values.device) < top_k)
        & (before < params[:, _TOP_P] * mass)
        & (values >= params[:, _MIN_P] * values[:, :1])
    )
    keep[:, 0] = True
    return keep


def _invert(
    cumulative: torch.Tensor, uniform: torch.Tensor, last: torch.Tensor | None = None
) -> torch.Tensor:
    """Return (n, 1): the first index whose cumulative weight exceeds `uniform` of that at `last`.

    `last` None means the last column.
    """
    if last is None:
        last = torch.full_like(uniform, cumulative.shape[-1] - 1, dtype=torch.int64)
    total = cumulative.gather(-1, last)
    # A uniform is at most 1 - 2⁻⁵³, so the product stays below the total: the token that is found
    # has a weight. Rows that are not finite find nothing.
    index = torch.searchsorted(cumulative, uniform * total, right=True)
    return torch.minimum(index, last)
