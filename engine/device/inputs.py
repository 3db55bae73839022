"""`StepInputs`: a plan as flat tensors, built once per step and shared by every layer.

Owns the arithmetic from requests to ids, positions, slots and block tables (NumPy on the host, one
copy per integer type to the device). Must not know a model or a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.device.context import ContextStore, RequestContext
from engine.device.transfer import AnyArray, IntArray, StepBuffer
from engine.request import Request
from engine.step import StepPlan


class ScoreSpan(NamedTuple):
    """Consecutive prompt tokens to score: `num_tokens` of them, the first at position `start`."""

    request_id: str
    start: int
    num_tokens: int


@dataclass(slots=True)
class StepInputs:
    """One packed batch of B requests and T tokens.

    `input_ids`, `position_ids` have shape (1, T), `slot_mapping` (T,), `cu_seqlens_q/k` (B+1,)
    int32, `block_table` (B, max_blocks) int32, `sample_rows` the packed rows whose next token is
    wanted and `sample_ids` their requests. `logit_rows` are the rows whose logits are wanted at
    all: `sample_rows`, then those that score the tokens `score_token_ids` of the prompts in
    `score_spans`. `query_lengths`, `context_lengths` (shape (B,)) and `host_block_table` are
    the host's copies. `scratch` holds what a backend derives once per
    step (masks, gather indices).
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
    logit_rows: torch.Tensor
    score_token_ids: torch.Tensor
    score_spans: tuple[ScoreSpan, ...]
    query_lengths: IntArray
    context_lengths: IntArray
    host_block_table: IntArray
    scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.input_ids.shape[1])


class InputBuilder:
    """Builds the inputs of one step after the other from what is cached per request.

    The cost of a step is its tokens, its requests and their new blocks, plus one copy of the
    batch's block tables; nothing is rebuilt because a context is long. ValueError on a token id
    outside `vocab_size`: a device would end everybody's context over it.
    """

    def __init__(
        self, block_size: int, device: torch.device, vocab_size: int | None = None
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._vocab_size = vocab_size
        self._store = ContextStore()
        self._long = StepBuffer(torch.int64, device)
        self._short = StepBuffer(torch.int32, device)

    def forget(self, request_id: str) -> None:
        """Drop what is cached of a request; unknown ids are ignored."""
        self._store.forget(request_id)

    def build(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepInputs:
        """Flatten `plan` in its order; every request's block table must cover its work."""
        work = plan.work
        batch = [requests[item.request_id] for item in work]
        contexts = [self._store.update(request) for request in batch]
        counts = np.array([(i.num_tokens, i.num_computed_tokens) for i in work], dtype=np.int64)
        query_lengths, starts = counts[:, 0], counts[:, 1]
        context_lengths = starts + query_lengths
        cu_q, cu_k = _offsets(query_lengths), _offsets(context_lengths)
        num_tokens = int(cu_q[-1])
        table = self._store.block_tables(contexts)
        for item, context in zip(work, contexts, strict=True):
            # A hole would be read as block 0, which is somebody's.
            if context.num_blocks * self._block_size < item.num_context_tokens:
                raise ValueError(
                    f"{item.request_id}: {context.num_blocks} blocks cannot hold {item}"
                )

        ids = np.empty(num_tokens, dtype=np.int64)
        for context, first, last, start, stop in zip(
            contexts,
            cu_q.tolist(),
            cu_q[1:].tolist(),
            starts.tolist(),
            context_lengths.tolist(),
            strict=False,
        ):
            ids[first:last] = context.token_ids[start:stop]
        self._check_ids(ids, work_ids=[item.request_id for item in work], cu_q=cu_q)
        owner = np.repeat(np.arange(len(work)), query_lengths)
        positions = np.arange(num_tokens) + (starts - cu_q[:-1])[owner]
        block, offset = np.divmod(positions, self._block_size)
        slots = table[owner, block] * self._block_size + offset

        known = np.array([context.num_known_tokens for context in contexts], dtype=np.int64)
        is_sampled = context_lengths == known
        sample_rows = cu_q[1:][is_sampled] - 1
        score_rows, score_ids, spans = _scores(batch, contexts, starts, context_lengths, cu_q)

        ids_, positions_, slots_, rows_, score_ids_ = self._long.send(
            (ids, positions, slots, np.concatenate((sample_rows, score_rows)), score_ids)
        )
        cu_q_, cu_k_, table_ = self._short.send((cu_q, cu_k, table))
        return StepInputs(
            request_ids=tuple(item.request_id for item in work),
            input_ids=ids_[None],
            position_ids=positions_[None],
            slot_mapping=slots_,
            cu_seqlens_q=cu_q_,
            cu_seqlens_k=cu_k_,
            max_seqlen_q=int(query_lengths.max()),
            max_seqlen_k=int(context_lengths.max()),
            block_table=table_,
            sample_rows=rows_[: len(sample_rows)],
            sample_ids=tuple(work[row].request_id for row in np.flatnonzero(is_sampled)),
            logit_rows=rows_,
            score_token_ids=score_ids_,
            score_spans=spans,
            query_lengths=query_lengths,
            context_lengths=context_lengths,
            host_block_table=table,
        )

    def _check_ids(self, ids: IntArray, work_ids: list[str], cu_q: IntArray) -> None:
        limit = self._vocab_size
        if limit is None or (ids.min() >= 0 and ids.max() < limit):
            return
        row = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
        owner = work_ids[int(np.searchsorted(cu_q, row, side="right")) - 1]
        raise ValueError(f"{owner}: token id {ids[row]} is outside the model's {limit} tokens")


def build_inputs(
    plan: StepPlan, requests: Mapping[str, Request], block_size: int, device: torch.device
) -> StepInputs:
    """Flatten one plan with nothing cached before or after; see `InputBuilder.build`."""
    return InputBuilder(block_size, device).build(plan, requests)


def _offsets(lengths: IntArray) -> IntArray:
    """Return (n+1,) running sums that start with 0."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _scores(
    batch: list[Request],
    contexts: list[RequestContext],
    starts: IntArray,
    context_lengths: IntArray,
    cu_q: IntArray,
) -> tuple[IntArray, IntArray, tuple[ScoreSpan, ...]]:
    """Return packed rows, the prompt tokens that they score, and which tokens these are.

    The row of position p scores the token at p+1. Scores of the tokens at 1..num_scored_tokens were
    delivered, so rows below that position have nothing to add after a preemption.
    """
    rows: list[AnyArray] = []
    ids: list[AnyArray] = []
    spans: list[ScoreSpan] = []
    for index, request in enumerate(batch):
        if request.sampling.num_prompt_logprobs is None:
            continue
        start = int(starts[index])
        first = max(start, request.num_scored_tokens)
        stop = min(int(context_lengths[index]), request.num_prompt_tokens - 1)
        if first < stop:
            rows.append(np.arange(first, stop) + (int(cu_q[index]) - start))
            ids.append(contexts[index].token_ids[first + 1 : stop + 1])
            spans.append(ScoreSpan(request.request_id, first + 1, stop - first))
    empty = np.empty(0, dtype=np.int64)
    return np.concatenate((empty, *rows)), np.concatenate((empty, *ids)), tuple(spans)
