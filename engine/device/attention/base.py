"""The seam of attention: what a backend is given, and the function that transformers calls.

Owns the registration under one name of transformers' attention interface. Its models then call
`paged_attention` in every layer with the step's context as a keyword; a name without a mask
function makes transformers build no mask at all, so nothing of size O(T²) exists over the packed
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from engine.device.inputs import StepInputs
from engine.device.kv_cache import LayerGeometry, PagedKvCache

ATTENTION_NAME = "paceline_paged"

# Keywords that change nothing for a causal decoder at inference: positions are in the cache's
# slots and in the rotated queries, dropout is off, the rest asks for outputs nobody reads.
_HARMLESS_KEYWORDS = frozenset(
    {
        "dropout",
        "position_ids",
        "cache_position",
        "position_embeddings",
        "is_causal",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "layer_idx",
        "cache",
        "past_key_values",
    }
)


class UnsupportedByBackendError(ValueError):
    """The chosen backend cannot serve this model or setting; the message says what to change."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What differs from layer to layer.

    `scale` multiplies the scores; `sliding_window` W lets a token see itself and the W-1 before it;
    `softcap` c replaces scores s by c·tanh(s/c).
    """

    layer_idx: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None


class AttentionBackend(Protocol):
    """Causal attention of a packed batch over the paged cache.

    Slots that no token of the batch may see are never read in a way that matters: they may hold
    anything, NaN included. `engine.device.attention.checks` is the conformance suite.
    """

    @property
    def name(self) -> str:
        """The name in settings and telemetry."""
        ...

    @property
    def default_block_size(self) -> int:
        """Tokens per block where nobody asked for a size."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether `attend` reads lengths, slots and tables from device memory alone, so that a CUDA
        graph of one padded decode step serves every other one.
        """
        ...

    def check(
        self,
        block_size: int,
        cache_dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[LayerGeometry] = (),
    ) -> None:
        """Raise UnsupportedByBackendError, naming the flag to change, if it cannot run."""
        ...

    def attend(
        self, query: torch.Tensor, cache: PagedKvCache, inputs: StepInputs, call: AttentionCall
    ) -> torch.Tensor:
        """Return (num_tokens, num_heads, value_dim) for `query` (num_tokens, num_heads, key_dim).

        The step's keys and values already stand in the cache.
        """
        ...


class StepContext(Protocol):
    """What the model's layers find under the keyword `paceline_step`."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Take packed (num_tokens, heads, dim) tensors and return the attention output."""
        ...


@dataclass(frozen=True, slots=True)
class PagedStepContext:
    """The ordinary context: write this step's keys and values, then attend over the pages."""

    inputs: StepInputs
    cache: PagedKvCache
    backend: AttentionBackend

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Write, then attend."""
        self.cache.write(call.layer_idx, key, value, self.inputs.slot_mapping)
        return self.backend.attend(query, self.cache, self.inputs, call)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paceline_step: StepContext,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' models ask for it: heads first, shape (1, heads, num_tokens, dim).

    UnsupportedByBackendError on a keyword that we do not implement (attention sinks, a position
    bias): dropping it would serve the model wrong. Seen at load, when the model is probed.
    """
    unknown = [k for k, v in others.items() if v is not None and k not in _HARMLESS_KEYWORDS]
    if unknown or attention_mask is not None:
        names = ", ".join(sorted(unknown)) or "attention_mask"
        raise UnsupportedByBackendError(f"{type(module).__name__} attends with {names}")
    if getattr(module, "sinks", None) is not None:
        raise UnsupportedByBackendError(f"{type(module).__name__} has attention sinks")
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedByBackendError(f"{type(module).__name__} attends in both directions")
    call = AttentionCall(
        layer_idx=int(module.layer_idx),  # type: ignore[arg-type]  # every attention module has it
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    output = paceline_step.attend(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), call
    )
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
