"""Log-probabilities: of sampled tokens, and of prompt tokens with their ranks.

Owns the float64 log-softmax, in slices of rows so that its memory is bounded, and the likeliest
tokens beside a score. Must not see changed logits: scores are of the model's own distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.device.drawing import row_slices
from engine.device.inputs import ScoreSpan
from engine.device.transfer import AnyArray
from engine.request import Request
from engine.step import PromptScores, PromptToken, TokenLogprob

# The likeliest tokens are looked up this many at a time, whoever asks for fewer: which of several
# equal ones come first must not depend on batch-mates.
_LIKELIEST = 20


@dataclass(frozen=True, slots=True)
class RowScores:
    """Scores of n rows, each of one token; tensors on the device, in the order of `tensors`.

    `logprobs` (n,) float64; `ranks` (n,) counts strictly likelier tokens, plus 1; `peaks` (n,) the
    largest log-probability, not finite where the row is not; `top_logprobs` and `top_ids` (n, w),
    likeliest first.
    """

    logprobs: torch.Tensor
    ranks: torch.Tensor
    peaks: torch.Tensor
    top_logprobs: torch.Tensor
    top_ids: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, for one trip to the host."""
        return (self.logprobs, self.ranks, self.peaks, self.top_logprobs, self.top_ids)


def score_rows(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> RowScores:
    """Score `token_ids` (n,) under `logits` (n, vocab_size), with at least `num_top` likeliest."""
    num_rows, vocab_size = logits.shape
    width = min(max(num_top, _LIKELIEST), vocab_size) if num_top else 0

    def column(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)

    scores = RowScores(
        column(torch.float64),
        column(torch.int64),
        column(torch.float64),
        column(torch.float64, width),
        column(torch.int64, width),
    )
    for part in row_slices(num_rows, vocab_size, logits.device):
        table = torch.log_softmax(logits[part].double(), dim=-1)
        own = table.gather(-1, token_ids[part, None])
        scores.logprobs[part] = own.squeeze(-1)
        scores.ranks[part] = (table > own).sum(dim=-1) + 1
        scores.peaks[part] = table.amax(dim=-1)
        if width:
            scores.top_logprobs[part], scores.top_ids[part] = torch.topk(table, width, dim=-1)
    return scores


def likeliest(top_ids: AnyArray, top_logprobs: AnyArray, count: int) -> tuple[TokenLogprob, ...]:
    """Return the first `count` of a row's likeliest tokens, without those that cannot occur."""
    pairs = zip(top_ids[:count].tolist(), top_logprobs[:count].tolist(), strict=True)
    return tuple(TokenLogprob(i, value) for i, value in pairs if value > -math.inf)


def prompt_scores(
    spans: Sequence[ScoreSpan], arrays: Sequence[AnyArray], requests: Mapping[str, Request]
) -> tuple[list[PromptScores], list[str]]:
    """Return the scores of each span, and the ids of requests with a row that is not finite.

    `arrays` are those of `RowScores` on the host, their rows in the order of the spans.
    """
    logprobs, ranks, peaks, top_logprobs, top_ids = arrays
    scores: list[PromptScores] = []
    unsound: list[str] = []
    row = 0
    for request_id, start, num_tokens in spans:
        rows = range(row, row + num_tokens)
        row += num_tokens
        if not all(map(math.isfinite, peaks[rows.start : rows.stop].tolist())):
            unsound.append(request_id)
            continue
        request = requests[request_id]
        count = request.sampling.num_prompt_logprobs or 0
        token_ids = request.prompt_token_ids[start : start + num_tokens]
        tokens = tuple(
            PromptToken(
                token_id=token_id,
                logprob=float(logprobs[index]),
                rank=int(ranks[index]),
                top_logprobs=likeliest(top_ids[index], top_logprobs[index], count),
            )
            for index, token_id in zip(rows, token_ids, strict=True)
        )
        scores.append(PromptScores(request_id, start, tokens))
    return scores, unsound
