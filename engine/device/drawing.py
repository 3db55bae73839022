"""Drawing tokens: temperature, top-k, top-p and min-p, then the inverse of what they leave.

Owns filters and the inversion. A row's token depends on its own logits, parameters and uniform
alone: rows with and without filters never share a path, and every sum over the vocabulary is one
whose order does not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from engine.device.transfer import IntArray, to_device
from engine.device.uniforms import FloatArray
from engine.request import SamplingParams

# The filters look at this many of the most likely tokens before they sort the whole vocabulary.
HEAD = 1024
# Rows are computed in float64, this many logits at a time.
_SLICE_ELEMENTS = 1 << 23

_ROW, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _UNIFORM = range(6)


def row_slices(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Cut rows into slices of bounded memory."""
    step = max(1, _SLICE_ELEMENTS // vocab_size)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


@dataclass(frozen=True, slots=True)
class Draws:
    """What was drawn, on the device: token `token_ids[i]` for row `rows[i]`.

    `is_cut[i]` says that the filters reach beyond `HEAD` tokens: the draw is void, and `again`
    repeats it over the whole vocabulary.
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
        table[:, _TOP_K] = np.minimum(table[:, _TOP_K], vocab_size)
        # Without a limit: sums that round to 1 before the last token must not cut it off.
        table[table[:, _TOP_P] >= 1, _TOP_P] = np.inf
        is_plain = (
            (table[:, _TOP_K] == vocab_size) & np.isinf(table[:, _TOP_P]) & (table[:, _MIN_P] <= 0)
        )
        is_wide = ~is_plain & (table[:, _TOP_K] < vocab_size) & (table[:, _TOP_K] > HEAD)
        kind = np.where(is_plain, 0, np.where(is_wide, 2, 1))
        order = np.argsort(kind, kind="stable")
        self._table = table[order]
        # Number of rows without filters, with filters that a head may satisfy, and with others.
        self._counts = np.bincount(kind, minlength=3).tolist()
        self.rows: IntArray = self._table[:, _ROW].astype(np.int64)

    def draw(self, logits: torch.Tensor) -> Draws:
        """Draw for all rows of `logits` (num_rows, vocab_size); waits for nothing."""
        num_plain, num_head, num_wide = self._counts
        table = to_device(self._table, self._device)
        drawn = [
            _draw(logits, table[:num_plain], 0),
            _draw(logits, table[num_plain : num_plain + num_head], min(HEAD, self._vocab_size)),
            _draw(logits, table[len(table) - num_wide :], self._vocab_size),
        ]
        return Draws(
            rows=table[:, _ROW].long(),
            token_ids=torch.cat([ids for ids, _ in drawn]),
            is_cut=torch.cat([cut for _, cut in drawn]),
        )

    def again(self, logits: torch.Tensor, is_cut: IntArray) -> torch.Tensor:
        """Draw once more over the whole vocabulary, for the rows whose draw was cut."""
        table = to_device(self._table[is_cut], self._device)
        return _draw(logits, table, self._vocab_size)[0]


def _draw(
    logits: torch.Tensor, table: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw for the rows of `table`; filters look at `width` tokens, 0 = there are none."""
    vocab_size = logits.shape[-1]
    token_ids = torch.empty(len(table), dtype=torch.int64, device=logits.device)
    is_cut = torch.zeros(len(table), dtype=torch.bool, device=logits.device)
    for part in row_slices(len(table), vocab_size):
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
    # Rounded up to the total, a uniform just below 1 would fall on a token of probability 0.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform * total, below)
    index = torch.searchsorted(cumulative, target, right=True)
    # Rows that are not finite find nothing.
    return torch.minimum(index, last)
