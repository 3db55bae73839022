"""A transformers model with our attention plugged in, or a clear refusal.

Owns the forward call and the probe, which finds what no configuration tells: that every layer
attends through us, and what it asks for. The model code is transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from engine.device.attention.base import (
    ATTENTION_NAME,
    AttentionCall,
    StepContext,
    UnsupportedByBackendError,
)
from engine.device.checkpoint import find_checkpoint, load_config, one_line
from engine.device.kv_cache import LayerGeometry
from engine.device.linear import use_few_row_linear
from engine.device.packed import use_packed_linear
from engine.device.servable import ModelLoadError as ModelLoadError  # where callers look for it
from engine.device.servable import check_config, longest_context
from engine.device.weights import load_weights


@dataclass(slots=True)
class _Probe:
    """Records what each layer's attention asks for; without a cache a token sees only itself."""

    layers: dict[int, LayerGeometry] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)
    num_calls: int = 0
    vocab_size: int = 0

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        self.num_calls += 1
        self.dtypes.add(key.dtype)
        self.layers[call.layer_idx] = LayerGeometry(
            num_kv_heads=key.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            sliding_window=call.sliding_window,
            num_heads=query.shape[1],
            softcap=call.softcap,
        )
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


class DecoderModel:
    """A decoder-only language model whose attention goes through a `StepContext`."""

    def __init__(self, model: Any, name: str) -> None:
        check_config(model.config)
        model.set_attn_implementation(ATTENTION_NAME)
        if next(model.parameters()).dtype is torch.float64:
            # The grouped product that experts use by default knows no float64.
            model.set_experts_implementation("eager")
        # Where a second copy of the weights cannot be had, operands in the other order do half.
        _ = use_packed_linear(model) or use_few_row_linear(model)
        self._model = model.eval()
        self.name = name
        self.device: torch.device = next(model.parameters()).device
        self.max_position_embeddings = longest_context(model.config)
        probe = self._probe()
        self.layers = tuple(probe.layers[index] for index in sorted(probe.layers))
        # That of the keys: weights may be stored as anything (quantised blocks, float32 routers).
        self.dtype = probe.dtypes.pop()
        self.eos_token_ids = _eos_token_ids(model, name)
        # That of the logits: a quantised head is stored in some other shape.
        self.vocab_size = probe.vocab_size

    @property
    def module(self) -> torch.nn.Module:
        """The transformers model itself, for whoever weighs or watches it; not to be changed."""
        module: torch.nn.Module = self._model
        return module

    @torch.inference_mode()
    def logits(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        rows: torch.Tensor,
        context: StepContext,
    ) -> torch.Tensor:
        """Run one packed forward and return logits (len(rows), vocab_size) for the rows asked for.

        `input_ids` and `position_ids` have shape (1, T); `rows` index the packed tokens.
        """
        output = self._model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=rows,
            paceline_step=context,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _probe(self) -> _Probe:
        """Run two tokens to see each layer's cache shape, and that attention is where we think."""
        probe = _Probe()
        kind = type(self._model).__name__
        ids = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        positions = torch.arange(2, device=self.device)[None]
        try:
            logits = self.logits(ids, positions, positions[0, 1:], probe)
        except UnsupportedByBackendError as error:
            raise ModelLoadError(f"{self.name}: {error}; it cannot be served exactly") from error
        except Exception as error:
            # Whatever an architecture trips over (a context it does not pass on, a size).
            raise ModelLoadError(
                f"{self.name}: {kind} does not run with a step's context ({one_line(error)});"
                " this architecture cannot be served"
            ) from error
        if logits.shape[0] != 1:
            raise ModelLoadError(
                f"{self.name}: {kind} computes logits of every token; it cannot be served"
            )
        expected = int(self._model.config.get_text_config().num_hidden_layers)
        if expected < 1:
            raise ModelLoadError(f"{self.name}: {kind} has {expected} layers")
        if probe.num_calls != expected or sorted(probe.layers) != list(range(expected)):
            raise ModelLoadError(
                f"{self.name}: {type(self._model).__name__} routed {probe.num_calls} of {expected}"
                " layers through the attention interface; it cannot be served exactly"
            )
        if unseen := _windows_unseen(self._model.config.get_text_config(), probe.layers):
            raise ModelLoadError(
                f"{self.name}: {kind} bounds what layer {unseen[0]} sees in its mask alone, which"
                " is not built here; it cannot be served exactly"
            )
        probe.vocab_size = logits.shape[1]
        if len(probe.dtypes) > 1:
            raise ModelLoadError(f"{self.name}: {kind} mixes dtypes in its keys; cannot be served")
        return probe


def _windows_unseen(text: Any, layers: Mapping[int, LayerGeometry]) -> list[int]:
    """Return the layers whose sliding window the configuration tells, but attention was not."""
    if getattr(text, "sliding_window", None) is None or not getattr(
        text, "use_sliding_window", True
    ):
        return []
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * len(layers)
    return [
        index
        for index, layer in layers.items()
        if kinds[index] == "sliding_attention" and layer.sliding_window is None
    ]


def load_model(source: str, dtype: str, device: str) -> DecoderModel:
    """Load `source` (a directory, a GGUF file or a hub id); ModelLoadError on refusal.

    `dtype` is a torch dtype's name, or `auto` for the checkpoint's own.
    """
    checkpoint = find_checkpoint(source)
    config = load_config(checkpoint)
    check_config(config)
    return DecoderModel(load_weights(checkpoint, config, dtype, device), source)


def _eos_token_ids(model: Any, name: str) -> tuple[int, ...]:
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    if any(type(token_id) is not int for token_id in ids):
        raise ModelLoadError(f"{name}: eos_token_id is {eos!r}: expected a token id or several")
    return ids
