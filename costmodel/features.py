"""`StepFeatures`: the small fixed vector that every learner sees, taken from a step's work.

Basis (control.md section 2): prefill tokens, decode requests, Σ decode context, Σ chunk·past, Σ
chunk²; and what prompts cost beside their tokens: how many chunks, and how many of their positions
go through the model's head. Never a total together with its parts.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.step import StepWork, WorkKind

FloatArray = npt.NDArray[np.float64]

FEATURE_NAMES = (
    "num_prefill_tokens",
    "num_decode_requests",
    "decode_context_tokens",
    "chunk_past_tokens",
    "chunk_squared_tokens",
    "num_chunks",
    "num_prompt_logits",
)
NUM_FEATURES = len(FEATURE_NAMES)


class Regime(enum.StrEnum):
    """Which kinds of work a step holds; margins and coverage are kept per regime."""

    DECODE_ONLY = "decode_only"
    MIXED = "mixed"
    PREFILL_ONLY = "prefill_only"


class StepFeatures(NamedTuple):
    """Work of one step, unscaled.

    `decode_context_tokens` is Σ over decodes of the KV length read (new token included);
    `chunk_past_tokens` is Σ over chunks of chunk·past; `chunk_squared_tokens` is Σ chunk².
    `num_chunks` counts prompts that share the prefill tokens (0 with prefill tokens means one);
    `num_prompt_logits` counts prompt positions whose logits are computed: the last one of each
    prompt that ends in this step, and those that are scored.
    """

    num_prefill_tokens: float = 0.0
    num_decode_requests: float = 0.0
    decode_context_tokens: float = 0.0
    chunk_past_tokens: float = 0.0
    chunk_squared_tokens: float = 0.0
    num_chunks: float = 0.0
    num_prompt_logits: float = 0.0

    @classmethod
    def of(cls, work: Iterable[StepWork], num_prompt_logits: int = 0) -> StepFeatures:
        """Sum the features of a step's work; the work does not tell which prompts end in it."""
        prefill = decodes = context = past = squared = chunks = 0
        decode = WorkKind.DECODE
        for _, kind, num_tokens, num_computed in work:
            if kind is decode:
                decodes += 1
                context += num_computed + num_tokens
            else:
                prefill += num_tokens
                past += num_tokens * num_computed
                squared += num_tokens * num_tokens
                chunks += 1
        return cls(
            float(prefill),
            float(decodes),
            float(context),
            float(past),
            float(squared),
            float(chunks),
            float(num_prompt_logits),
        )

    @property
    def regime(self) -> Regime:
        """The regime by presence of each kind of work; an empty step counts as decode-only."""
        return regime_of(self.num_prefill_tokens, self.num_decode_requests)

    def to_array(self) -> FloatArray:
        """Return the vector as float64 of shape (NUM_FEATURES,)."""
        return np.array(self, dtype=np.float64)


def regime_of(num_prefill_tokens: float, num_decode_requests: float) -> Regime:
    """Return the regime of a step with that much prefill and decode work."""
    if num_prefill_tokens <= 0:
        return Regime.DECODE_ONLY
    return Regime.MIXED if num_decode_requests > 0 else Regime.PREFILL_ONLY
