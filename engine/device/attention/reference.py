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
# Bytes of keys and values of one call: gathered pages should still be in the processor's cache when
# they are multiplied. Two pieces share a call all the same: one would leave a core without work.
MAX_GATHERED_BYTES = 1 << 22
_MIN_MEMBERS = 2
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
    the flattened (B·q) output. `is_whole` says that both pairings are the identity over all packed
    rows: one group, no padding, in order.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    q_positions: torch.Tensor
    k_positions: torch.Tensor
    packed: torch.Tensor
    padded: torch.Tensor
    is_whole: bool

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

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

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
        keys, values = cache.keys[call.layer_idx], cache.values[call.layer_idx]
        groups = _groups_of(inputs, cache, call, query.device)
        output = query.new_empty((query.shape[0], query.shape[1], values.shape[-1]))
        for group in groups:
            attended = _attend_group(
                query[:, None] if group.is_whole else query[group.rows],
                self._gather("keys", keys, group.slots),
                self._gather("values", values, group.slots),
                group.mask(call.sliding_window),
                call,
            ).flatten(0, 1)
            if group.is_whole:
                return attended
            output[group.packed] = attended[group.padded]
        return output

    def _gather(self, name: str, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return the cache's rows at `slots` (B, k) as (B, k, kv_heads, dim).

        On a CPU into a buffer that every layer uses again: fresh memory of that size is handed out
        page by page, which costs more than the copy.
        """
        rows = pages.view(-1, pages.shape[2] * pages.shape[3])
        index = slots.flatten()
        if pages.device.type != "cpu":
            gathered = rows.index_select(0, index)
        else:
            size = index.numel() * rows.shape[1]
            buffer = self._buffers.get(name)
            if buffer is None or buffer.numel() < size or buffer.dtype != rows.dtype:
                buffer = self._buffers[name] = rows.new_empty(size)
            gathered = buffer[:size].view(index.numel(), rows.shape[1])
            torch.index_select(rows, 0, index, out=gathered)
        return gathered.view(*slots.shape, *pages.shape[2:])


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
    inputs: StepInputs, cache: PagedKvCache, call: AttentionCall, device: torch.device
) -> list[_Group]:
    """Return the step's groups for one window and width, built at the first layer that asks."""
    keys, values = cache.keys[call.layer_idx], cache.values[call.layer_idx]
    num_bytes = (keys[0, 0].numel() + values[0, 0].numel()) * keys.element_size()
    most_keys = MAX_GATHERED_BYTES // num_bytes
    key = ("reference", call.sliding_window, most_keys)
    groups: list[_Group] | None = inputs.scratch.get(key)
    if groups is None:
        tiles = _tiles_of(inputs, call.sliding_window)
        groups = [
            _build_group(inputs, tiles, members, cache.block_size, device)
            for members in _partition(tiles.num_queries, tiles.num_keys, most_keys)
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


def _partition(query_lengths: IntArray, key_lengths: IntArray, most_keys: int) -> list[IntArray]:
    """Split pieces into groups whose padding stays bounded; similar shapes end up together.

    A group of more than two pieces gathers at most `most_keys` keys.
    """
    order = np.lexsort((key_lengths, query_lengths))
    groups: list[list[int]] = []
    needed = max_q = max_k = 0
    for index in order:
        q, k = int(query_lengths[index]), int(key_lengths[index])
        if groups:
            new_q, new_k = max(max_q, q), max(max_k, k)
            num_members = len(groups[-1]) + 1
            padded = num_members * new_q * new_k
            allowed = _MAX_PADDING * (needed + q * k) + _FREE_PADDING_SCORES
            is_cached = num_members <= _MIN_MEMBERS or num_members * new_k <= most_keys
            if is_cached and padded <= min(allowed, MAX_GROUP_SCORES):
                groups[-1].append(int(index))
                needed, max_q, max_k = needed + q * k, new_q, new_k
                continue
        groups.append([int(index)])
        needed, max_q, max_k = q * k, q, k
    # In packed order again, so that a batch of decodes alone needs no sorting back.
    return [np.array(sorted(group), dtype=np.int64) for group in groups]


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
        is_whole=q_index.shape[1] == 1 and np.array_equal(rows[:, 0], np.arange(inputs.num_tokens)),
    )
