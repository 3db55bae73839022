"""A transformers model with our attention plugged in, or a clear refusal.

Owns loading, the check that the architecture can be served exactly, and the forward call. The model
code is transformers' own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from engine.device.attention.base import (
    ATTENTION_NAME,
    AttentionCall,
    StepContext,
    UnsupportedByBackendError,
)
from engine.device.kv_cache import LayerGeometry
from engine.device.linear import use_few_row_linear

_SERVABLE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class ModelLoadError(ValueError):
    """The model cannot be served; the message names what is wrong and what to do."""


@dataclass(slots=True)
class _Probe:
    """Records what each layer's attention asks for; without a cache a token sees only itself."""

    layers: dict[int, LayerGeometry] = field(default_factory=dict)
    num_calls: int = 0

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        self.num_calls += 1
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
        _check_servable(model.config, type(model))
        model.set_attn_implementation(ATTENTION_NAME)
        if next(model.parameters()).dtype is torch.float64:
            # The grouped product that experts use by default knows no float64.
            model.set_experts_implementation("eager")
        use_few_row_linear(model)
        self._model = model.eval()
        self.name = name
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        text_config = model.config.get_text_config()
        self.max_position_embeddings: int = int(text_config.max_position_embeddings)
        self.layers = self._probe_layers()
        self.eos_token_ids = _eos_token_ids(model)
        head = model.get_output_embeddings()
        self.vocab_size: int = (
            int(head.weight.shape[0]) if head is not None else text_config.vocab_size
        )

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

    def _probe_layers(self) -> tuple[LayerGeometry, ...]:
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
                f"{self.name}: {kind} does not run with a step's context ({_line(error)});"
                " this architecture cannot be served"
            ) from error
        if logits.shape[0] != 1:
            raise ModelLoadError(
                f"{self.name}: {kind} computes logits of every token; it cannot be served"
            )
        expected = int(self._model.config.get_text_config().num_hidden_layers)
        if probe.num_calls != expected or sorted(probe.layers) != list(range(expected)):
            raise ModelLoadError(
                f"{self.name}: {type(self._model).__name__} routed {probe.num_calls} of {expected}"
                " layers through the attention interface; it cannot be served exactly"
            )
        return tuple(probe.layers[index] for index in range(expected))


def load_model(source: str, dtype: str, device: str) -> DecoderModel:
    """Load `source` (a local directory or a hub id) in safetensors; ModelLoadError on refusal.

    `dtype` is a torch dtype's name, or `auto` for the checkpoint's own.
    """
    path = Path(source)
    if path.exists() and not path.is_dir():
        raise ModelLoadError(f"{source}: expected a directory with config.json and safetensors")
    if not path.exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        # Not a hub id either: no point in asking a hub for minutes.
        raise ModelLoadError(f"{source}: no such directory")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelLoadError(f"{source}: no config.json in this directory")
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ModelLoadError(
            f"{source}: cannot read the model's configuration: {_line(error)}"
        ) from error
    _check_servable(config, None)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype="auto" if dtype == "auto" else _dtype_of(dtype),
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
        ).to(device)
    except Exception as error:
        # Whatever a checkpoint can be wrong in (truncated, missing shards, other shapes): one line.
        raise ModelLoadError(f"{source}: cannot load the weights: {_line(error)}") from error
    return DecoderModel(model, source)


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelLoadError(
            f"--dtype {name}: expected auto, float32, bfloat16, float16 or float64"
        )
    return dtype


def _check_servable(config: Any, model_class: type | None) -> None:
    """Refuse what cannot be served exactly, with the reason."""
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{kind}: encoder-decoder models cannot be served")
    text = config.get_text_config()
    if getattr(text, "use_bidirectional_attention", False):
        raise ModelLoadError(f"{kind}: bidirectional attention cannot be served")
    odd = set(getattr(text, "layer_types", None) or ()) - _SERVABLE_LAYER_TYPES
    if odd:
        raise ModelLoadError(f"{kind}: layers of type {', '.join(sorted(odd))} cannot be served")
    if getattr(text, "max_position_embeddings", None) is None:
        raise ModelLoadError(f"{kind}: no max_position_embeddings in the configuration")
    rope = getattr(text, "rope_parameters", None) or {}
    flat = [rope] if "rope_type" in rope else [v for v in rope.values() if isinstance(v, dict)]
    for parameters in flat:
        # These rescale with the longest position of a batch, so a neighbour would change a result.
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            raise ModelLoadError(
                f"{kind}: rotary scaling {parameters['rope_type']!r} depends on the batch and"
                " cannot be served exactly"
            )
    if model_class is not None and not getattr(model_class, "_supports_attention_backend", False):
        raise ModelLoadError(
            f"{kind}: {model_class.__name__} does not support transformers' attention interface"
        )


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:300] if text else type(error).__name__
