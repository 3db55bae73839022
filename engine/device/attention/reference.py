"""The `reference` backend: torch only, any device, exact; also the yardstick for the others.

Owns the split of a packed batch into few dense groups. All decodes of similar context share one
call; a long chunk is a call of its own; nothing loops over single requests in each layer, and no
mask spans the packed batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from engine.device.attention.base import AttentionCall
from engine.device.inputs import IntArray, StepInputs
from engine.device.kv_cache import PagedKvCache

# A group may spend this factor of the work that its members need on padding, plus a constant below
# which one more call costs more than the padding does (scores: query rows times keys).
_MAX_PADDING = 1.25
_FREE_PADDING_SCORES = 4096


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests that attend in one call, padded to common lengths.

    `rows` (B, q) are packed query rows (padding repeats row 0 of the request), `slots` (B, k) cache
    slots of the keys, `mask` (B, 1, q, k) is True where a query may look, `packed` (n,) and
    `padded` (n,) pair packed rows with positions in the flattened (B·q) output.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    packed: torch.Tensor
    padded: torch.Tensor


class ReferenceAttention:
    """Gathers pages into dense keys and values, then torch's scaled-dot-product attention."""

    name = "reference"

    def check(self, block_size: int, cache_dtype: torch.dtype, device: torch.device) -> None:
        """Every block size, dtype and device works."""

    def attend(
        self, query: torch.Tensor, cache: PagedKvCache, inputs: StepInputs, call: AttentionCall
    ) -> torch.Tensor:
        """Return (num_tokens, num_heads, value_dim)."""
        keys = cache.keys[call.layer_idx].flatten(0, 1)
        values = cache.values[call.layer_idx].flatten(0, 1)
        output = query.new_empty((query.shape[0], query.shape[1], values.shape[-1]))
        for group in _groups_of(inputs, cache.block_size, call.sliding_window, query.device):
            attended = _attend_group(
                query[group.rows], keys[group.slots], values[group.slots], group.mask, call
            )
            output[group.packed] = attended.flatten(0, 1)[group.padded]
        return output


def _attend_group(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """Attend (B, q, heads, dim) over (B, k, kv_heads, dim); returns (B, q, heads, value_dim)."""
    batch, num_queries, num_heads, _ = query.shape
    num_kv_heads = keys.shape[2]
    group_size = num_heads // num_kv_heads
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    # Query heads that share a key head become more query rows of it: keys are read once, not
    # `group_size` times, and nothing is repeated in memory.
    folded = query.reshape(batch, num_queries, num_kv_heads, group_size, query.shape[-1])
    folded = folded.permute(0, 2, 3, 1, 4).flatten(2, 3)
    folded_mask = mask if num_queries == 1 else mask.repeat(1, 1, group_size, 1)
    if call.softcap is None:
        attended = functional.scaled_dot_product_attention(
            folded, keys, values, attn_mask=folded_mask, scale=call.scale
        )
    else:
        scores = (folded @ keys.transpose(-1, -2)) * call.scale
        scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = scores.masked_fill(~folded_mask, float("-inf"))
        attended = torch.softmax(scores, dim=-1) @ values
    attended = attended.reshape(batch, num_kv_heads, group_size, num_queries, values.shape[-1])
    attended = attended.permute(0, 3, 1, 2, 4)
    return attended.reshape(batch, num_queries, num_heads, values.shape[-1])


def _groups_of(
    inputs: StepInputs, block_size: int, window: int | None, device: torch.device
) -> list[_Group]:
    """Return the step's groups for one window, built at the first layer that asks."""
    key = ("reference", window)
    groups: list[_Group] | None = inputs.scratch.get(key)
    if groups is None:
        first_keys = _first_keys(inputs, window)
        groups = [
            _build_group(inputs, members, first_keys, block_size, window, device)
            for members in _partition(inputs.query_lengths, inputs.context_lengths - first_keys)
        ]
        inputs.scratch[key] = groups
    return groups


def _first_keys(inputs: StepInputs, window: int | None) -> IntArray:
    """Return the first position that any query of each request may see, shape (B,)."""
    if window is None:
        return np.zeros_like(inputs.context_lengths)
    first_keys: IntArray = np.maximum(0, inputs.context_lengths - inputs.query_lengths - window + 1)
    return first_keys


def _partition(query_lengths: IntArray, key_lengths: IntArray) -> list[IntArray]:
    """Split requests into groups whose padding stays bounded; similar shapes end up together."""
    order = np.lexsort((key_lengths, query_lengths))
    groups: list[list[int]] = []
    needed = max_q = max_k = 0
    for index in order:
        q, k = int(query_lengths[index]), int(key_lengths[index])
        if groups:
            new_q, new_k = max(max_q, q), max(max_k, k)
            padded = (len(groups[-1]) + 1) * new_q * new_k
            if padded <= _MAX_PADDING * (needed + q * k) + _FREE_PADDING_SCORES:
                groups[-1].append(int(index))
                needed, max_q, max_k = needed + q * k, new_q, new_k
                continue
        groups.append([int(index)])
        needed, max_q, max_k = q * k, q, k
    return [np.array(group, dtype=np.int64) for group in groups]


def _build_group(
    inputs: StepInputs,
    members: IntArray,
    first_keys: IntArray,
    block_size: int,
    window: int | None,
    device: torch.device,
) -> _Group:
    q_len, context = inputs.query_lengths[members], inputs.context_lengths[members]
    k_first = first_keys[members]
    k_len = context - k_first
    first_rows = (np.cumsum(inputs.query_lengths) - inputs.query_lengths)[members]

    q_index = np.arange(int(q_len.max()))[None, :]
    is_query = q_index < q_len[:, None]
    rows = first_rows[:, None] + np.where(is_query, q_index, 0)
    q_position = (context - q_len)[:, None] + np.where(is_query, q_index, 0)

    k_index = np.arange(int(k_len.max()))[None, :]
    k_position = k_first[:, None] + np.where(k_index < k_len[:, None], k_index, 0)
    slots = (
        inputs.host_block_table[members[:, None], k_position // block_size] * block_size
        + k_position % block_size
    )

    distance = q_position[:, :, None] - k_position[:, None, :]
    is_visible = (distance >= 0) & (k_index < k_len[:, None])[:, None, :]
    if window is not None:
        is_visible &= distance < window
    width = q_index.shape[1]
    padded = (np.arange(len(members))[:, None] * width + q_index)[is_query]

    def on_device(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return _Group(
        rows=on_device(rows),
        slots=on_device(slots),
        mask=on_device(is_visible)[:, None],
        packed=on_device(rows[is_query]),
        padded=on_device(padded),
    )
