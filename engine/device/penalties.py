"""What changes logits before a token is chosen: penalties, bias, and stops that must wait.

Owns the counts of the tokens that each request has seen, kept up as its output grows, and one
scatter per kind of change for the whole batch. Must not choose a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.device.transfer import AnyArray, IntArray, to_device
from engine.request import Request

FloatArray = npt.NDArray[np.float64]


class TokenHistory:
    """The distinct tokens of one request and how often each stands in its output.

    Counts what came since the last call only. A request whose output is not the one that was
    counted (shorter, or ending otherwise) is counted anew, so nothing done twice counts twice.
    """

    def __init__(self, request: Request, vocab_size: int) -> None:
        self._request = request
        is_prompt_seen = request.sampling.repetition_penalty != 1.0
        prompt = request.prompt_token_ids if is_prompt_seen else ()
        ids = np.unique(np.asarray(prompt, dtype=np.int64))
        self._prompt_ids: IntArray = ids[(ids >= 0) & (ids < vocab_size)]
        self._ids: IntArray
        self._counts: FloatArray
        self._slots: dict[int, int]
        self._num_counted: int
        self._last: int
        self._count_anew()

    def update(self) -> tuple[IntArray, FloatArray]:
        """Return distinct ids and their counts in the output, both (n,).

        Prompt tokens are among them, with count 0, where a repetition penalty asks for them. The
        arrays are views: use them before the next call.
        """
        output = self._request.output_token_ids
        counted = self._num_counted
        if len(output) < counted or (counted and output[counted - 1] != self._last):
            self._count_anew()
        for token_id in output[self._num_counted :]:
            slot = self._slots.get(token_id)
            if slot is None:
                slot = self._slots[token_id] = len(self._slots)
                if slot == len(self._ids):
                    self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                    self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
                self._ids[slot] = token_id
            self._counts[slot] += 1
        self._num_counted = len(output)
        self._last = output[-1] if output else -1
        return self._ids[: len(self._slots)], self._counts[: len(self._slots)]

    def _count_anew(self) -> None:
        num_prompt = len(self._prompt_ids)
        self._ids = np.empty(2 * num_prompt + 16, dtype=np.int64)
        self._ids[:num_prompt] = self._prompt_ids
        self._counts = np.zeros(len(self._ids), dtype=np.float64)
        self._slots = dict(zip(self._prompt_ids.tolist(), range(num_prompt), strict=True))
        self._num_counted = 0
        self._last = -1


class LogitChanges:
    """What one request's parameters do to its logits; `is_needed` is False where nothing."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = request.sampling
        self._request = request
        has_penalty = params.repetition_penalty != 1.0 or (
            params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.history = TokenHistory(request, vocab_size) if has_penalty else None
        # Ids outside the head would end a CUDA context; a dictionary keeps each id once.
        bias = {i: value for i, value in params.logit_bias if 0 <= i < vocab_size}
        self.bias_ids = np.array(list(bias), dtype=np.int64)
        self.bias = np.array(list(bias.values()), dtype=np.float64)
        stops = sorted({i for i in params.stop_token_ids if 0 <= i < vocab_size})
        # Where every token is a stop there is nothing else to say: none ends anything until then.
        is_masked = params.min_tokens > 0 and len(stops) < vocab_size
        self._stop_ids = np.array(stops if is_masked else (), dtype=np.int64)
        self._no_ids = np.empty(0, dtype=np.int64)

    @property
    def masked_ids(self) -> IntArray:
        """Stop tokens that `min_tokens` still forbids."""
        is_early = self._request.num_output_tokens < self._request.sampling.min_tokens
        return self._stop_ids if is_early else self._no_ids

    @property
    def is_needed(self) -> bool:
        """Whether any logit changes."""
        return self.history is not None or bool(len(self.bias_ids)) or bool(len(self.masked_ids))


def apply_changes(
    logits: torch.Tensor,
    rows: Sequence[int],
    requests: Sequence[Request],
    changes: Sequence[LogitChanges],
) -> None:
    """Change `logits` (num_rows, vocab_size), contiguous, in place: row `rows[i]` by `changes[i]`.

    A repetition penalty divides positive and multiplies negative logits of tokens in prompt or
    output (CTRL, Keskar et al. 2019); presence and frequency penalties are subtracted over the
    output alone, as in OpenAI's API; then bias is added; at last stops are forbidden.
    """
    flat = logits.view(-1)
    starts = np.array(rows, dtype=np.int64) * logits.shape[-1]
    _apply_penalties(flat, starts, requests, changes)
    index, lengths = _gather(starts, [change.bias_ids for change in changes])
    if lengths.any():
        bias = to_device(np.concatenate([change.bias for change in changes]), flat.device)
        place = to_device(index, flat.device)
        flat[place] = (flat[place].double() + bias).to(flat.dtype)
    index, lengths = _gather(starts, [change.masked_ids for change in changes])
    if lengths.any():
        flat.index_fill_(0, to_device(index, flat.device), float("-inf"))


def _apply_penalties(
    flat: torch.Tensor,
    starts: IntArray,
    requests: Sequence[Request],
    changes: Sequence[LogitChanges],
) -> None:
    # (repetition, presence, frequency) of each request that has any, with what it has seen.
    params: list[tuple[float, float, float]] = []
    seen: list[IntArray] = []
    counts: list[FloatArray] = []
    places: list[int] = []
    for start, request, change in zip(starts.tolist(), requests, changes, strict=True):
        if change.history is not None:
            sampling = request.sampling
            params.append(
                (
                    sampling.repetition_penalty,
                    sampling.presence_penalty,
                    sampling.frequency_penalty,
                )
            )
            ids, count = change.history.update()
            seen.append(ids)
            counts.append(count)
            places.append(start)
    if not seen:
        return
    index, lengths = _gather(np.array(places, dtype=np.int64), seen)
    if not len(index):
        return
    count = np.concatenate(counts)
    repetition, presence, frequency = np.repeat(np.array(params), lengths, axis=0).T
    minus = presence * (count > 0) + frequency * count
    factor, minus_ = to_device(np.stack((repetition, minus)), flat.device)
    place = to_device(index, flat.device)
    before = flat[place].double()
    value = torch.where(before > 0, before / factor, before * factor) - minus_
    # However strong a penalty, a sound logit must not come to look like a broken model's.
    most = torch.finfo(flat.dtype).max
    value = torch.where(torch.isfinite(before), value.clamp(-most, most), value)
    flat[place] = value.to(flat.dtype)


def _gather(starts: IntArray, ids: Sequence[AnyArray]) -> tuple[IntArray, IntArray]:
    """Return flat positions of all `ids`, each request's from its row's start, and their counts."""
    lengths = np.array([len(part) for part in ids], dtype=np.int64)
    return np.concatenate(ids) + np.repeat(starts, lengths), lengths
