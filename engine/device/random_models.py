"""Models with random weights: tiny ones of several families, and one of a 7B shape.

Owns configurations and how their weights are drawn, for checks and measurements that download
nothing. Must not be used to serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.device.model import DecoderModel

TINY_VOCAB_SIZE = 256
_TINY: dict[str, Any] = {
    "vocab_size": TINY_VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # A width that half-precision kernels take.
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Shorter than the longer prompts and no multiple of a block.
_WINDOW = 37
_LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]

TINY_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": _WINDOW},
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "sliding_window": _WINDOW,
        "layer_types": _LOCAL_GLOBAL,
    },
    "gemma2": {
        "query_pre_attn_scalar": 16,
        "sliding_window": _WINDOW,
        "layer_types": _LOCAL_GLOBAL,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": None,
    },
}
"""Model type and settings on top of the common ones: grouped heads, biases, windows, soft-caps."""


@dataclass(frozen=True, slots=True)
class Qwen2Shape:
    """The sizes of a Qwen2 model; the defaults are those of the 7B one."""

    num_layers: int = 28
    hidden_size: int = 3584
    num_heads: int = 28
    num_kv_heads: int = 4
    intermediate_size: int = 18944
    vocab_size: int = 152064
    max_position_embeddings: int = 32768


TINY_SHAPE = Qwen2Shape(
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=128,
    vocab_size=512,
    max_position_embeddings=2048,
)


def make_tiny(model_type: str, dtype: torch.dtype, device: torch.device, seed: int = 7) -> Any:
    """Return a tiny transformers model of the family with eager attention.

    The weights are drawn in float64 on the CPU: the same in every dtype, on every device. They are
    wide, so that greedy choices are rarely close.
    """
    config = AutoConfig.for_model(model_type, **{**_TINY, **TINY_FAMILIES[model_type]})
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    with torch.no_grad():
        for parameter in model.parameters():
            centre = parameter.mean().round() if parameter.dim() == 1 else 0.0
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(centre + 0.2 * noise)
        model.get_output_embeddings().weight.mul_(10.0)
    return model.to(device=device, dtype=dtype).eval()


def make_qwen2(shape: Qwen2Shape, dtype: torch.dtype, device: torch.device) -> DecoderModel:
    """Return a model of that shape with random weights made where they will stay.

    torch.OutOfMemoryError if the device cannot hold it.
    """
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return DecoderModel(model.to(device), f"random qwen2 ({shape.num_layers} layers)")
