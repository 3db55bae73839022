"""The model families that we promise to serve exactly: one row each, as tiny random models.

A row owns a configuration small enough for a laptop that still exercises what is peculiar to the
family, and the changes that must show in the tokens: a feature that could be dropped unnoticed
would not be tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 96
LENGTHS = (1, 2, 5, 16, 17, 33, 70)
NUM_NEW = 12
# A margin below this between the two best logits in float64 counts as a tie: the winner is then an
# accident of summation order, not something an engine can be held to.
TIE = 1e-4
# Shorter than the longer prompts of the tests and no multiple of a block: both edges are crossed.
WINDOW = 11

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Family:
    """One architecture in miniature.

    `settings` go on top of the common ones. Each of `ablations` is a change of the configuration
    that must change what the reference generates with the same weights. `head_scale` widens the
    margins between logits, `seed` draws weights that do not say the same few tokens; `first_layer`
    is what the probe must find there, and `windows` in all layers.
    """

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    ablations: tuple[Mapping[str, Any], ...] = ()
    head_scale: float = 20.0
    seed: int = 7
    first_layer: Mapping[str, Any] = field(default_factory=dict)
    windows: tuple[int | None, ...] = (None, None, None)


def _rope(partial: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": partial}


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "llama",
        {"rope_parameters": _LLAMA3_ROPE},
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},),
        first_layer={"num_heads": 4, "num_kv_heads": 2, "key_dim": 8},
    ),
    "mistral": Family(
        "mistral",
        {"sliding_window": WINDOW},
        ({"sliding_window": None}, {"sliding_window": WINDOW + 1}),
        windows=(WINDOW,) * 3,
    ),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", {"head_dim": 12}, first_layer={"key_dim": 12}),
    "gemma2": Family(
        "gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "layer_types": _LOCAL_GLOBAL,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 8.0,
        },
        ({"attn_logit_softcapping": None}, {"layer_types": ["full_attention"] * 3}),
        # The final cap flattens what is far above it: the head must not saturate it.
        head_scale=1.0,
        first_layer={"softcap": 2.0},
        windows=(WINDOW, None, WINDOW),
    ),
    "gemma3": Family(
        "gemma3_text",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        ({"layer_types": ["full_attention"] * 3}, {"query_pre_attn_scalar": 32}),
        windows=(WINDOW, WINDOW, None),
    ),
    "phi3": Family(
        "phi3",
        {
            "rope_parameters": _rope(0.5),
            "sliding_window": 29,
        },
        ({"rope_parameters": _rope(1.0)}, {"sliding_window": None}),
        windows=(29,) * 3,
    ),
    "gpt2": Family(
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        ({"scale_attn_by_inverse_layer_idx": False},),
        seed=8,
    ),
    "gpt_neox": Family(
        "gpt_neox",
        {"rope_parameters": _rope(0.5)},
        ({"rope_parameters": _rope(1.0)}, {"use_parallel_residual": False}),
    ),
    "mixtral": Family(
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        ({"num_experts_per_tok": 1},),
    ),
    "qwen3_moe": Family(
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 12,
        },
        ({"num_experts_per_tok": 2}, {"norm_topk_prob": False}),
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "rope_parameters": _YARN_ROPE,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 12,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
        },
        ({"rope_interleave": False}, {"topk_group": 4}, {"num_experts_per_tok": 1}),
        first_layer={"num_heads": 4, "num_kv_heads": 4, "key_dim": 12, "value_dim": 6},
    ),
    # The last layers read keys and values of earlier ones: each keeps its own copy of them.
    "gemma3n": Family(
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 4,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "final_logit_softcapping": 8.0,
        },
        ({"sliding_window": WINDOW + 1},),
        head_scale=1.0,
        windows=(WINDOW, None) * 2,
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 4,
        },
        ({"sliding_window": WINDOW + 1},),
        first_layer={"key_dim": 8},
        windows=(WINDOW, None) * 2,
    ),
}

# What tests of schedules, sampling and swapping run on: plain, with biases, with windows.
CORE_FAMILIES = ("gemma3", "llama", "qwen2")


def build(name: str) -> Any:
    """Return the family's transformers model in float64 with every parameter drawn at random."""
    family = FAMILIES[name]
    config = AutoConfig.for_model(family.model_type, **{**_COMMON, **family.settings})
    torch.manual_seed(family.seed)
    model = AutoModelForCausalLM.from_config(config).to(torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases start at zero and norms at one: left so, nobody would notice them missing.
            centre = parameter.mean().round() if parameter.dim() == 1 else 0.0
            parameter.normal_(0.0, 0.35).add_(centre)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.35)
        model.get_output_embeddings().weight.mul_(family.head_scale)
    return model.eval()


def load_reference(folder: Path, **changes: Any) -> Any:
    """Return the model as transformers runs it in float64, with changes to its configuration."""
    config = AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.float64,
        attn_implementation="eager",
        # The grouped product of the other implementations knows no float64.
        experts_implementation="eager",
    ).eval()


@dataclass(frozen=True)
class Continuation:
    """What transformers says after a prompt: tokens, the logits that they were chosen from (new
    tokens, vocabulary), and how many of the choices were ties.
    """

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor
    num_ties: int


def generate(reference: Any, prompt: list[int], num_new: int = NUM_NEW) -> Continuation:
    """Return transformers' greedy continuation."""
    output = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(output.logits)
    best = logits.topk(2, dim=-1).values
    num_ties = int((best[:, 0] - best[:, 1] < TIE).sum())
    return Continuation(prompt, output.sequences[0, len(prompt) :].tolist(), logits, num_ties)
