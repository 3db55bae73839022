"""`StepInputs`: a plan as flat tensors, built once per step and shared by every layer.

Owns the arithmetic from requests to ids, positions, slots and block tables (NumPy on the host, one
copy each to the device). Must not know a model or a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.request import Request
from engine.step import StepPlan

IntArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """One packed batch of B requests and T tokens.

    `input_ids`, `position_ids` have shape (1, T), `slot_mapping` (T,), `cu_seqlens_q/k` (B+1,)
    int32, `block_table` (B, max_blocks) int32, `sample_rows` the packed rows whose next token is
    wanted and `sample_ids` their requests. `query_lengths` and `context_lengths` are the host's
    copies, shape (B,). `scratch` holds what a backend derives once per step (masks, gather
    indices).
    """

    request_ids: tuple[str, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: torch.Tensor
    sample_rows: torch.Tensor
    sample_ids: tuple[str, ...]
    query_lengths: IntArray
    context_lengths: IntArray
    host_block_table: IntArray
    scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.input_ids.shape[1])


def build_inputs(
    plan: StepPlan, requests: Mapping[str, Request], block_size: int, device: torch.device
) -> StepInputs:
    """Flatten `plan` in its order; every request's block table must cover its work."""
    work = plan.work
    query_lengths = np.array([item.num_tokens for item in work], dtype=np.int64)
    starts = np.array([item.num_computed_tokens for item in work], dtype=np.int64)
    context_lengths = starts + query_lengths
    cu_q = np.concatenate(([0], np.cumsum(query_lengths)))
    cu_k = np.concatenate(([0], np.cumsum(context_lengths)))
    num_tokens = int(cu_q[-1])

    batch = [requests[item.request_id] for item in work]
    table = np.zeros((len(work), max(len(request.block_table) for request in batch)), np.int64)
    ids = np.empty(num_tokens, dtype=np.int64)
    for row, (item, request) in enumerate(zip(work, batch, strict=True)):
        table[row, : len(request.block_table)] = request.block_table
        ids[cu_q[row] : cu_q[row + 1]] = request.known_token_ids(
            item.num_computed_tokens, item.num_context_tokens
        )
    owner = np.repeat(np.arange(len(work)), query_lengths)
    positions = np.arange(num_tokens) - np.repeat(cu_q[:-1], query_lengths) + starts[owner]
    slots = table[owner, positions // block_size] * block_size + positions % block_size

    is_sampled = np.array(
        [
            context == request.num_known_tokens
            for context, request in zip(context_lengths, batch, strict=True)
        ]
    )
    sample_rows = cu_q[1:][is_sampled] - 1

    def on_device(array: npt.NDArray[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype)

    return StepInputs(
        request_ids=tuple(item.request_id for item in work),
        input_ids=on_device(ids)[None],
        position_ids=on_device(positions)[None],
        slot_mapping=on_device(slots),
        cu_seqlens_q=on_device(cu_q, torch.int32),
        cu_seqlens_k=on_device(cu_k, torch.int32),
        max_seqlen_q=int(query_lengths.max()),
        max_seqlen_k=int(context_lengths.max()),
        block_table=on_device(table, torch.int32),
        sample_rows=on_device(sample_rows),
        sample_ids=tuple(
            item.request_id for item, wanted in zip(work, is_sampled, strict=True) if wanted
        ),
        query_lengths=query_lengths,
        context_lengths=context_lengths,
        host_block_table=table,
    )
