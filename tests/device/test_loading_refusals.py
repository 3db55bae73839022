"""What cannot be served exactly is refused at load with the reason, mostly before any weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.device.attention.base import UnsupportedByBackendError
from engine.device.attention.choice import choose_backend
from engine.device.model import ModelLoadError, load_model
from engine.device.servable import longest_context
from tests.device.families import generate

pytestmark = pytest.mark.device

_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("t5", {}, "t5: encoder-decoder models"),
        ("bart", {}, "bart: encoder-decoder models"),
        ("whisper", {}, "whisper: encoder-decoder models"),
        ("mamba", {}, "mamba: state-space, recurrent and hybrid models"),
        ("mamba2", {}, "mamba2: state-space"),
        ("rwkv", {}, "rwkv: state-space"),
        ("jamba", {}, "jamba: state-space"),
        ("recurrent_gemma", {}, "recurrent_gemma: state-space"),
        ("qwen3_next", {}, "qwen3_next: state-space"),
        ("falcon_h1", {}, "falcon_h1: state-space"),
        ("minimax", {}, "minimax: layers of type linear_attention"),
        ("llama4_text", {}, "llama4_text: layers of type chunked_attention"),
        ("bloom", {}, "bloom: BloomForCausalLM does not support transformers' attention"),
        ("mpt", {}, "mpt: MptForCausalLM does not support transformers' attention"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional attention"),
        ("qwen2_vl", {}, "qwen2_vl: a multimodal model whose text part"),
        (
            "llama",
            {"max_position_embeddings": 0},
            "llama: the configuration's longest context (max_position_embeddings) is 0:",
        ),
        (
            "llama",
            {"max_position_embeddings": 1},
            "llama: the configuration's longest context (max_position_embeddings) is 1:",
        ),
        (
            "gpt2",
            {"n_positions": -5},
            "gpt2: the configuration's longest context (max_position_embeddings) is -5:",
        ),
        ("vit", {}, "vit: a model that transformers does not run as a causal language model"),
    ],
)
def test_by_configuration_alone(
    tmp_path: Path, model_type: str, settings: dict[str, Any], reason: str
) -> None:
    # No weights are written: the refusal must not need them.
    AutoConfig.for_model(model_type, **settings).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(tmp_path), "auto", "cpu")
    assert str(caught.value).startswith(reason) or reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        (
            "gpt_oss",
            {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
            "GptOssAttention attends with s_aux",
        ),
        ("bert", {}, "attends in both directions"),
        # Its attention is not told of the window, which only the mask knows.
        (
            "moshi",
            {"sliding_window": 11, "ffn_dim": 48, "head_dim": 8},
            "bounds what layer 0 sees in its mask alone",
        ),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    ],
)
def test_by_what_the_layers_ask_for(
    tmp_path: Path, model_type: str, settings: dict[str, Any], reason: str
) -> None:
    config = AutoConfig.for_model(model_type, **{**_TINY, **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=reason):
        load_model(str(tmp_path), "auto", "cpu")


def test_a_model_that_attends_elsewhere(llama_copy: Path, monkeypatch: Any) -> None:
    from engine.device import model as module

    # An architecture whose layers never reach the interface must not be served silently wrong.
    monkeypatch.setattr(module._Probe, "attend", lambda self, q, k, v, call: q[:, :, : v.shape[2]])
    with pytest.raises(ModelLoadError, match="0 of 2 layers"):
        load_model(str(llama_copy), "auto", "cpu")


@pytest.mark.parametrize(
    ("name", "backend", "reason"),
    [
        ("gemma2", "flash_attn", "CUDA"),
        ("deepseek_v3", "torch_varlen", "CUDA"),
    ],
)
def test_a_backend_that_was_asked_for_and_cannot(
    tiny_family: Callable[[str], Any], name: str, backend: str, reason: str
) -> None:
    served = tiny_family(name).served
    with pytest.raises(UnsupportedByBackendError, match=reason):
        choose_backend(backend, None, torch.bfloat16, torch.device("cpu"), served.layers)


def _rope(kind: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        factors = [1.0 + 0.5 * i for i in range(4)]
        rope |= {"short_factor": factors, "long_factor": [4 * f for f in factors]}
        rope |= {"original_max_position_embeddings": 64}
    return rope


@pytest.mark.parametrize(("kind", "longest"), [("dynamic", 256), ("longrope", 64)])
def test_scaling_that_depends_on_the_batch_is_served_where_it_does_not(
    tmp_path: Path, make_engine: Any, make_request: Any, make_prompt: Any, kind: str, longest: int
) -> None:
    torch.manual_seed(3)
    config = AutoConfig.for_model("llama", **_TINY, rope_parameters=_rope(kind), eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config).to(torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.35)
        model.lm_head.weight.mul_(20.0)
    model.save_pretrained(tmp_path)
    assert longest_context(model.config) == longest
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    served = load_model(str(tmp_path), "float64", "cpu")
    assert served.max_position_embeddings == longest
    # The longest request ends where the frequencies would change for everyone in its batch.
    lengths = (longest - 8, 20, 5)
    requests = [make_request(str(n), make_prompt(n, n), 8) for n in lengths]
    make_engine(served, 16).run(requests, gap_steps=1)
    for request in requests:
        expected = generate(reference, list(request.prompt_token_ids), 8)
        assert expected.num_ties == 0
        assert request.output_token_ids == expected.tokens


def test_the_text_part_of_a_multimodal_checkpoint_is_served(
    tmp_path: Path, make_engine: Any, make_request: Any, make_prompt: Any
) -> None:
    torch.manual_seed(5)
    text = {**_TINY, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 11}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "eos_token_id": None}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.35)
    model.save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    served = load_model(str(tmp_path), "float64", "cpu")
    assert [layer.sliding_window for layer in served.layers] == [11, None]
    requests = [make_request(str(n), make_prompt(n, n), 8) for n in (40, 13)]
    make_engine(served, 7).run(requests, gap_steps=1)
    for request in requests:
        expected = generate(reference, list(request.prompt_token_ids), 8)
        assert expected.num_ties == 0
        assert request.output_token_ids == expected.tokens
