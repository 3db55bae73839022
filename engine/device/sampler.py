"""Sampling: from one row of logits per request to one token each, in one vectorised pass.

Owns penalties, filters, random numbers and log-probabilities. A request's draws depend on its own
seed and on how many tokens it has drawn, never on its batch-mates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.request import Request
from engine.step import SampledToken, TokenLogprob

NOT_FINITE = "the model's logits are not finite"

# Nucleus sampling looks at this many of the most likely tokens before it sorts the whole
# vocabulary.
_NUCLEUS_HEAD = 1024


class Sampler:
    """Samples for many requests at once; keeps one random generator per sampling request."""

    def __init__(self, seed: int | None = None) -> None:
        self._seeds = np.random.SeedSequence(seed)
        self._generators: dict[str, np.random.Generator] = {}

    def forget(self, request_id: str) -> None:
        """Drop the request's generator."""
        self._generators.pop(request_id, None)

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """Return one token per row of `logits` (num_requests, vocab_size); the logits may be
        changed.

        A row that holds NaN or +inf, or nothing but -inf, yields a `failure` and harms no other
        row.
        """
        if not requests:
            return []
        wants_logprobs = [r.sampling.num_logprobs is not None for r in requests]
        raw = logits.clone() if any(wants_logprobs) else logits
        _apply_penalties(logits, requests)
        # NaN and +inf win every maximum, so one number per row tells whether the row is sound.
        peaks, token_ids = logits.max(dim=-1)
        is_sound = torch.isfinite(peaks).tolist()
        drawn = [
            row
            for row, request in enumerate(requests)
            if is_sound[row] and not request.sampling.is_greedy
        ]
        if drawn:
            token_ids[drawn] = self._draw(logits[drawn], [requests[row] for row in drawn])
        chosen = token_ids.tolist()
        logprobs = _logprobs(raw, token_ids, requests) if any(wants_logprobs) else {}
        return [
            _sampled(request, chosen[row], logprobs.get(row))
            if is_sound[row]
            else SampledToken(request.request_id, 0, failure=NOT_FINITE)
            for row, request in enumerate(requests)
        ]

    def _draw(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """Draw from softmax(logits / temperature) after the filters, by inverting the CDF."""
        params = [request.sampling for request in requests]

        def column(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

        scaled = logits.double() / column([p.temperature for p in params])
        uniform = column([self._generator(r).random() for r in requests])
        if all(p.top_k == 0 and p.top_p >= 1 and p.min_p == 0 for p in params):
            return _invert_cdf(torch.softmax(scaled, dim=-1), uniform)
        vocab_size = logits.shape[-1]
        top_k = column([p.top_k or vocab_size for p in params])
        top_p = column([p.top_p for p in params])
        min_p = column([p.min_p for p in params])
        log_total = torch.logsumexp(scaled, dim=-1, keepdim=True)
        width = min(vocab_size, _NUCLEUS_HEAD)
        while True:
            values, order = torch.topk(scaled, width, dim=-1)
            probs = torch.exp(values - log_total)
            cumulative = probs.cumsum(dim=-1)
            rank = torch.arange(width, device=logits.device)
            keep = (rank < top_k) & (cumulative - probs < top_p) & (probs >= min_p * probs[:, :1])
            # The last column is kept only if the filters may reach further than what was sorted.
            if width == vocab_size or not bool(keep[:, -1].any()):
                break
            width = vocab_size
        kept = torch.where(keep, probs, 0.0)
        index = _invert_cdf(kept / kept.sum(dim=-1, keepdim=True), uniform)
        return order.gather(-1, index[:, None]).squeeze(-1)

    def _generator(self, request: Request) -> np.random.Generator:
        generator = self._generators.get(request.request_id)
        if generator is None:
            seed = request.sampling.seed
            source = self._seeds.spawn(1)[0] if seed is None else np.random.SeedSequence(abs(seed))
            generator = np.random.Generator(np.random.PCG64(source))
            self._generators[request.request_id] = generator
        return generator


def _invert_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return per row the first index whose cumulative probability exceeds `uniform` (n, 1)."""
    cdf = probs.cumsum(dim=-1)
    # Rounding may leave the last value below 1; scaling by it keeps the draw inside the support.
    index = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True).squeeze(-1)
    return index.clamp_(max=probs.shape[-1] - 1)


def _apply_penalties(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    """Change `logits` in place: penalties over tokens seen, bias, and no stop before `min_tokens`.

    Repetition penalty divides positive and multiplies negative logits of tokens in prompt or output
    (CTRL, Keskar et al. 2019); presence and frequency penalties subtract over the output only, as
    in OpenAI's API.
    """
    vocab_size = logits.shape[-1]
    for row, request in enumerate(requests):
        params = request.sampling
        line = logits[row]
        if params.repetition_penalty != 1.0:
            seen = _unique(request.known_token_ids(0, request.num_known_tokens), logits.device)[0]
            value = line[seen]
            line[seen] = torch.where(
                value > 0, value / params.repetition_penalty, value * params.repetition_penalty
            )
        if (params.presence_penalty or params.frequency_penalty) and request.output_token_ids:
            seen, counts = _unique(request.output_token_ids, logits.device)
            line[seen] -= params.presence_penalty + params.frequency_penalty * counts.to(line.dtype)
        if params.logit_bias:
            ids, bias = zip(*params.logit_bias, strict=True)
            line[list(ids)] += torch.tensor(bias, dtype=line.dtype, device=line.device)
        if params.stop_token_ids and request.num_output_tokens < params.min_tokens:
            line[[i for i in params.stop_token_ids if i < vocab_size]] = float("-inf")


def _unique(token_ids: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ids, counts = np.unique(np.asarray(token_ids, dtype=np.int64), return_counts=True)
    return torch.from_numpy(ids).to(device), torch.from_numpy(counts).to(device)


_RowLogprobs = tuple[float, npt.NDArray[np.int64], npt.NDArray[np.float64]]


def _logprobs(
    raw: torch.Tensor, token_ids: torch.Tensor, requests: Sequence[Request]
) -> dict[int, _RowLogprobs]:
    """Return (chosen, top ids, top values) under the model's own distribution for rows that ask."""
    rows = [r for r, request in enumerate(requests) if request.sampling.num_logprobs is not None]
    widest = max(requests[row].sampling.num_logprobs or 0 for row in rows)
    table = torch.log_softmax(raw[rows].double(), dim=-1)
    chosen = table.gather(-1, token_ids[rows][:, None]).squeeze(-1).tolist()
    values, ids = torch.topk(table, max(1, min(widest, table.shape[-1])), dim=-1)
    top_ids, top_values = ids.cpu().numpy(), values.cpu().numpy()
    return {row: (chosen[i], top_ids[i], top_values[i]) for i, row in enumerate(rows)}


def _sampled(request: Request, token_id: int, logprobs: _RowLogprobs | None) -> SampledToken:
    if logprobs is None:
        return SampledToken(request.request_id, token_id)
    chosen, ids, values = logprobs
    count = request.sampling.num_logprobs or 0
    top = tuple(
        TokenLogprob(int(i), float(v)) for i, v in zip(ids[:count], values[:count], strict=True)
    )
    return SampledToken(request.request_id, token_id, logprob=chosen, top_logprobs=top)
