"""GGUF files: weights and tokenizer out of one file, named or alone in its directory."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.device.loading import DeviceOptions, load_engine
from engine.device.model import ModelLoadError, load_model
from tests.device.families import generate

gguf = pytest.importorskip("gguf", reason="the gguf package writes the test's file")
pytestmark = pytest.mark.device

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
WORDS = ["w", "Ġ", *"0123456789", *(f"w{i}" for i in range(10))]
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def quiet(done: int, total: int, description: str) -> None:
    """Progress that nobody watches."""


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the weights under llama.cpp's names, rotary halves interleaved as it has them."""
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        path = name.removesuffix(".weight")
        for projection, num_heads in heads.items():
            if path.endswith(projection):
                split = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, -1)
                array = split.swapaxes(1, 2).reshape(array.shape)
        if path in _NAMES:
            yield f"{_NAMES[path]}.weight", np.ascontiguousarray(array)
        else:
            _, _, layer, rest = path.split(".", 3)
            yield f"blk.{layer}.{_NAMES[rest]}.weight", np.ascontiguousarray(array)


def write_gguf(model: Any, file: Path, *, is_quantised: bool = False) -> None:
    """Write a Llama as llama.cpp's converter does, with a byte-level tokenizer of 40 tokens."""
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = [*SPECIAL, *WORDS]
    tokens += [f"<u{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges([f"w {i}" for i in range(10)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, array in _tensors(model):
        if is_quantised and array.ndim == 2 and array.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def reference(llama_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(llama_folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def gguf_file(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(reference, file)
    return file


@pytest.mark.parametrize("is_named", [True, False])
def test_the_file_or_its_directory(
    gguf_file: Path, reference: Any, make_engine: Any, make_request: Any, is_named: bool
) -> None:
    source = str(gguf_file if is_named else gguf_file.parent)
    engine = load_engine(source, DeviceOptions(device="cpu"), quiet)
    assert (engine.dtype, engine.vocab_size, engine.max_model_len) == ("float32", 40, 128)
    assert engine.eos_token_ids == (2,)
    prompt = [5, 17, 9, 30, 8, 21, 33]
    expected = generate(reference, prompt, 8)
    request = make_request("r", prompt, 8)
    make_engine(engine.runner._model, 3).run([request])
    assert request.output_token_ids == expected.tokens


def test_the_tokenizer_comes_out_of_the_file(gguf_file: Path) -> None:
    tokenizer = load_engine(str(gguf_file), DeviceOptions(device="cpu"), quiet).tokenizer
    tokens = [*SPECIAL, *WORDS]
    assert tokenizer.encode("w1", add_special_tokens=False) in ([tokens.index("w1")], [4, 7])
    assert tokenizer.decode(tokenizer.encode("w1w2", add_special_tokens=False)) == "w1w2"
    # Reading adds a token that the head has no row for; text must never become it.
    assert max(tokenizer.encode("<|endoftext|>", add_special_tokens=False), default=0) < 40
    assert tokenizer.has_chat_template


def test_quantised_blocks_become_numbers(reference: Any, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    config = LlamaConfig(**{**reference.config.to_dict(), **shape, "head_dim": 8})
    model = LlamaForCausalLM(config).eval()
    write_gguf(model, tmp_path / "q8.gguf", is_quantised=True)
    served = load_model(str(tmp_path / "q8.gguf"), "auto", "cpu")
    weights, expected = served._model.state_dict(), model.state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(weights[name], expected[name])
    torch.testing.assert_close(weights[name], expected[name], rtol=0.02, atol=5e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_dtype_can_be_chosen(gguf_file: Path, dtype: str) -> None:
    engine = load_engine(str(gguf_file), DeviceOptions(device="cpu", dtype=dtype), quiet)
    assert engine.dtype == dtype


def test_several_files_are_named(gguf_file: Path, tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        shutil.copy(gguf_file, tmp_path / name)
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(tmp_path), "auto", "cpu")
    assert "several GGUF files (a.gguf, b.gguf)" in str(caught.value)
    assert str(tmp_path / "a.gguf") in str(caught.value)


def test_safetensors_come_first(gguf_file: Path, llama_copy: Path) -> None:
    shutil.copy(gguf_file, llama_copy / "x.gguf")
    (llama_copy / "x.gguf").write_bytes(b"not read")
    assert load_model(str(llama_copy), "auto", "cpu").vocab_size == 40


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.gguf", b"PK\x03\x04", "x.gguf is not a GGUF file"),
        ("x.gguf", b"", "x.gguf is not a GGUF file"),
        ("x.gguf", b"GGUF\x03\x00\x00", "cannot read the model's configuration"),
        ("x-00001-of-00002.gguf", b"GGUF", "one part of a split GGUF"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=reason):
        load_model(str(tmp_path / name), "auto", "cpu")


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_truncated_file(gguf_file: Path, tmp_path: Path, share: float) -> None:
    data = gguf_file.read_bytes()
    (tmp_path / "x.gguf").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(tmp_path / "x.gguf"), "auto", "cpu")
    assert "\n" not in str(caught.value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        load_model(str(tmp_path / "x.gguf"), "auto", "cpu")


@pytest.mark.parametrize("missing", [("gguf",), ("accelerate",), ("gguf", "accelerate")])
def test_what_to_install(gguf_file: Path, monkeypatch: Any, missing: tuple[str, ...]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name in missing else find(name, *a)
    )
    with pytest.raises(ModelLoadError, match=f"pip install {' '.join(missing)}"):
        load_model(str(gguf_file), "auto", "cpu")
