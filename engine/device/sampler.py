"""Sampling: from one row of logits per request to one token each, in one vectorised pass.

Owns what is cached per request (its key, its history) and the order of the work: change the logits,
take the best or draw, score. A token depends on the request's row, parameters, output and seed
alone, never on its batch-mates or on what was executed before.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.device.drawing import DrawBatch, Draws, best_tokens
from engine.device.penalties import LogitChanges, apply_changes
from engine.device.scores import RowScores, likeliest, score_rows
from engine.device.transfer import AnyArray, to_device, to_host
from engine.device.uniforms import key_of_request, key_of_seed, uniforms
from engine.request import Request
from engine.step import SampledToken

NOT_FINITE = "the model's logits are not finite"


class _Cached:
    """What is kept of one request; valid for that very request object."""

    __slots__ = ("changes", "key", "request")

    def __init__(self, request: Request, vocab_size: int, engine_seed: int) -> None:
        seed = request.sampling.seed
        self.request = request
        self.key = (
            key_of_request(engine_seed, request.request_id) if seed is None else key_of_seed(seed)
        )
        self.changes = LogitChanges(request, vocab_size)


@dataclass(slots=True)
class PendingTokens:
    """A batch that was sampled on the device and whose results are not on the host yet.

    `tensors` are what must be fetched, `Sampler.finish` makes tokens of them. `scored` are the rows
    that want log-probabilities, `raw` their unchanged logits.
    """

    requests: Sequence[Request]
    logits: torch.Tensor
    choice: torch.Tensor
    batch: DrawBatch | None
    draws: Draws | None
    scored: list[int]
    raw: torch.Tensor | None
    scores: RowScores | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Results on the device: choices, cut draws where any, scores where any."""
        draws = () if self.draws is None else (self.draws.is_cut,)
        scores = () if self.scores is None else self.scores.tensors
        return [self.choice, *draws, *scores]


class Sampler:
    """Samples for many requests at once.

    `seed` decides the draws of requests without a seed of their own; None takes one at random.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = secrets.randbits(64) if seed is None else seed
        self._cache: dict[str, _Cached] = {}

    def forget(self, request_id: str) -> None:
        """Drop what is cached of a request; unknown ids are ignored."""
        self._cache.pop(request_id, None)

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """Return one token per row of `logits` (num_requests, vocab_size); the logits may be
        changed.

        A row that holds NaN or +inf, or nothing but -inf, yields a `failure` and harms no other
        row.
        """
        pending = self.start(logits, requests)
        return self.finish(pending, to_host(pending.tensors, logits.device))

    def start(self, logits: torch.Tensor, requests: Sequence[Request]) -> PendingTokens:
        """Do all the work of `sample` on the device, without waiting for it."""
        vocab_size, device = logits.shape[-1], logits.device
        cached = [self._cached(request, vocab_size) for request in requests]
        scored = [r for r, c in enumerate(requests) if c.sampling.num_logprobs is not None]
        changed = [row for row, entry in enumerate(cached) if entry.changes.is_needed]
        raw = None
        if scored:
            is_all = len(scored) == len(requests) and not changed
            raw = logits if is_all else logits[to_device(np.array(scored), device)]
        if changed:
            # Half precision would round a penalty away next to a large logit.
            logits = logits.float() if logits.element_size() < 4 else logits.contiguous()
            apply_changes(
                logits,
                changed,
                [requests[row] for row in changed],
                [cached[row].changes for row in changed],
            )
        # NaN and +inf win every maximum, so one number per row tells whether the row is sound.
        token_ids, peaks = best_tokens(logits)
        drawing = [row for row, request in enumerate(requests) if not request.sampling.is_greedy]
        batch, draws = None, None
        if drawing:
            keys = np.array([cached[row].key for row in drawing], dtype=np.uint64)
            indices = np.array([requests[r].num_output_tokens for r in drawing], dtype=np.uint64)
            params = [requests[row].sampling for row in drawing]
            batch = DrawBatch(drawing, params, uniforms(keys, indices), vocab_size, device)
            draws = batch.draw(logits)
            token_ids.index_copy_(0, draws.rows, draws.token_ids)
        scores = None
        if raw is not None:
            chosen = (
                token_ids
                if len(scored) == len(requests)
                else (token_ids[to_device(np.array(scored), device)])
            )
            scores = score_rows(
                raw, chosen, max(requests[r].sampling.num_logprobs or 0 for r in scored)
            )
        return PendingTokens(
            requests=requests,
            logits=logits,
            choice=torch.where(torch.isfinite(peaks), token_ids, -1),
            batch=batch,
            draws=draws,
            scored=scored,
            raw=raw,
            scores=scores,
        )

    def finish(self, pending: PendingTokens, arrays: Sequence[AnyArray]) -> list[SampledToken]:
        """Make tokens of what was fetched (the arrays of `pending.tensors`, in their order)."""
        chosen = arrays[0].tolist()
        scores = list(arrays[1:])
        if pending.batch is not None:
            is_cut = np.flatnonzero(scores.pop(0))
            if len(is_cut):
                _draw_again(pending, pending.batch, is_cut, chosen, scores)
        place = {row: index for index, row in enumerate(pending.scored)}
        return [
            _token(request, chosen[row], scores, place.get(row))
            for row, request in enumerate(pending.requests)
        ]

    def _cached(self, request: Request, vocab_size: int) -> _Cached:
        entry = self._cache.get(request.request_id)
        if entry is None or entry.request is not request:
            entry = _Cached(request, vocab_size, self._seed)
            self._cache[request.request_id] = entry
        return entry


def _draw_again(
    pending: PendingTokens,
    batch: DrawBatch,
    is_cut: AnyArray,
    chosen: list[int],
    scores: list[AnyArray],
) -> None:
    """Repeat the draws whose filters reached beyond the head, and their scores, in place."""
    token_ids = batch.again(pending.logits, is_cut)
    rows = batch.rows[is_cut].tolist()
    for row, token_id in zip(rows, token_ids.tolist(), strict=True):
        if chosen[row] >= 0:
            chosen[row] = token_id
    place = {row: index for index, row in enumerate(pending.scored)}
    again = [(mine, place[row]) for mine, row in enumerate(rows) if row in place]
    if again and pending.raw is not None:
        mine, theirs = np.array(again, dtype=np.int64).T
        device = pending.raw.device
        raw = pending.raw[to_device(theirs, device)]
        scored = score_rows(raw, to_device(token_ids[mine], device), 0)
        scores[0] = scores[0].copy()
        scores[0][theirs] = to_host([scored.logprobs], device)[0]


def _token(
    request: Request, token_id: int, scores: Sequence[AnyArray], index: int | None
) -> SampledToken:
    """Make one token; `index` is its row among the scored ones, None where it is not."""
    if token_id < 0:
        return SampledToken(request.request_id, 0, failure=NOT_FINITE)
    if index is None:
        return SampledToken(request.request_id, token_id)
    logprobs, _, peaks, top_logprobs, top_ids = scores
    if not math.isfinite(peaks[index]):
        # A poisoned logit may hide behind a mask, but not from the distribution.
        return SampledToken(request.request_id, 0, failure=NOT_FINITE)
    return SampledToken(
        request.request_id,
        token_id,
        logprob=float(logprobs[index]),
        top_logprobs=likeliest(
            top_ids[index], top_logprobs[index], request.sampling.num_logprobs or 0
        ),
    )
