"""The `reference` backend: torch only, any device, exact; also the yardstick for the others.

Owns the split of a packed batch into few dense groups. All decodes of similar context share one
call; a long chunk is cut into tiles of query rows; nothing loops over single requests in each
layer, and no mask spans the packed batch or a whole long chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from engine.device.attention.base import AttentionCall
from engine.device.inputs import StepInputs
from engine.device.kv_cache import LayerGeometry, PagedKvCache
from engine.device.transfer import IntArray

# A group may spend this factor of the work that its members need on padding, plus a constant below
# which one more call costs more than the padding does (scores: query rows times keys).
_MAX_PADDING = 1.25
_FREE_PADDING_SCORES = 4096
# A group this large has paid for its call: growing it only costs memory.
MAX_GROUP_SCORES = 1 << 20
# Query rows per tile: bounds the scores and the mask of one call to tile × context, and skips the
# keys after a tile that no query in it may see.
TILE_ROWS = 256


@dataclass(frozen=True, slots=True)
class _Tile:
    """Pieces of requests, at most `TILE_ROWS` queries each; arrays of shape (n,).

    `owner` is the request's row in the batch, `row` the piece's first packed row, `position` its
    first query's position, `num_queries` its length, `first_key` the first position that it sees.
    """

    owner: IntArray
    row: IntArray
    position: IntArray
    num_queries: IntArray
    first_key: IntArray

    @property
    def num_keys(self) -> IntArray:
        """Keys from the first that the piece sees to its own last position."""
        return self.position + self.num_queries - self.first_key


@dataclass(frozen=True, slots=True)
class _Group:
    """Pieces that attend in one call, padded to common lengths.

    `rows` (B, q) are packed query rows (padding repeats the piece's first), `slots` (B, k) cache
    slots of the keys, `q_positions` (B, q) and `k_positions` (B, k) where they stand (a padded key
    stands beyond every query), `packed` (n,) and `padded` (n,) pair packed rows with positions in
    the flattened (B·q) output.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    q_positions: torch.Tensor
    k_positions: torch.Tensor
    packed: torch.Tensor
    padded: torch.Tensor

    def mask(self, window: int | None) -> torch.Tensor:
        """Return (B, 1, q, k), True where a query may look.

        Made anew in each layer: next to the scores it is cheap, and kept it would be the largest
        thing in memory.
        """
        queries, keys = self.q_positions[:, None, :, None], self.k_positions[:, None, None, :]
        visible = keys <= queries
        return visible if window is None else visible & (keys > queries - window)


class ReferenceAttention:
    """Gathers pages into dense keys and values, then torch's scaled-dot-product attention."""

    name = "reference"
    default_block_size = 16
    # The groups are made on the host, anew for every batch.
    is_capturable = False

    def check(
        self,
        block_size: int,
        cache_dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[LayerGeometry] = (),
    ) -> None:
        """Every block size, dtype, device and layer works."""

    def attend(
        self, query: torch.Tensor, cache: PagedKvCache, inputs: StepInputs, call: AttentionCall
    ) -> torch.Tensor:
        """Return (num_tokens, num_heads, value_dim)."""
        keys = cache.keys[call.layer_idx].flatten(0, 1)
        values = cache.values[call.layer_idx].flatten(0, 1)
        output = query.new_empty((query.shape[0], query.shape[1], values.shape[-1]))
        for group in _groups_of(inputs, cache.block_size, call.sliding_window, query.device):
            mask = group.mask(call.sliding_window)
            attended = _attend_group(
                query[group.rows], keys[group.slots], values[group.slots], mask, call
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
        tiles = _tiles_of(inputs, window)
        groups = [
            _build_group(inputs, tiles, members, block_size, device)
            for members in _partition(tiles.num_queries, tiles.num_keys)
        ]
        inputs.scratch[key] = groups
    return groups


def _tiles_of(inputs: StepInputs, window: int | None) -> _Tile:
    """Cut every request's queries into tiles."""
    lengths = inputs.query_lengths
    num_tiles = -(-lengths // TILE_ROWS)
    owner = np.repeat(np.arange(len(lengths)), num_tiles)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    offset = number * TILE_ROWS
    position = (inputs.context_lengths - lengths)[owner] + offset
    first_key = np.zeros_like(position)
    if window is not None:
        first_key = np.maximum(0, position - window + 1)
    return _Tile(
        owner=owner,
        row=(np.cumsum(lengths) - lengths)[owner] + offset,
        position=position,
        num_queries=np.minimum(TILE_ROWS, lengths[owner] - offset),
        first_key=first_key,
    )


def _partition(query_lengths: IntArray, key_lengths: IntArray) -> list[IntArray]:
    """Split pieces into groups whose padding stays bounded; similar shapes end up together."""
    order = np.lexsort((key_lengths, query_lengths))
    groups: list[list[int]] = []
    needed = max_q = max_k = 0
    for index in order:
        q, k = int(query_lengths[index]), int(key_lengths[index])
        if groups:
            new_q, new_k = max(max_q, q), max(max_k, k)
            padded = (len(groups[-1]) + 1) * new_q * new_k
            allowed = _MAX_PADDING * (needed + q * k) + _FREE_PADDING_SCORES
            if padded <= min(allowed, MAX_GROUP_SCORES):
                groups[-1].append(int(index))
                needed, max_q, max_k = needed + q * k, new_q, new_k
                continue
        groups.append([int(index)])
        needed, max_q, max_k = q * k, q, k
    return [np.array(group, dtype=np.int64) for group in groups]


def _build_group(
    inputs: StepInputs, tiles: _Tile, members: IntArray, block_size: int, device: torch.device
) -> _Group:
    q_len, k_len = tiles.num_queries[members], tiles.num_keys[members]
    q_index = np.arange(int(q_len.max()))[None, :]
    is_query = q_index < q_len[:, None]
    inside = np.where(is_query, q_index, 0)
    rows = tiles.row[members, None] + inside
    q_positions = tiles.position[members, None] + inside

    k_index = np.arange(int(k_len.max()))[None, :]
    is_key = k_index < k_len[:, None]
    k_positions = tiles.first_key[members, None] + np.where(is_key, k_index, 0)
    table = inputs.host_block_table[tiles.owner[members, None], k_positions // block_size]
    slots = table * block_size + k_positions % block_size
    beyond = int(inputs.context_lengths.max())
    padded = (np.arange(len(members))[:, None] * q_index.shape[1] + q_index)[is_query]

    def on_device(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return _Group(
        rows=on_device(rows),
        slots=on_device(slots),
        q_positions=on_device(q_positions.astype(np.int32)),
        k_positions=on_device(np.where(is_key, k_positions, beyond).astype(np.int32)),
        packed=on_device(rows[is_query]),
        padded=on_device(padded),
    )
