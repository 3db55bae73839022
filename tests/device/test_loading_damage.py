"""A checkpoint that is not whole is refused with what is wrong with it, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.device.model import ModelLoadError, load_model

pytestmark = pytest.mark.device


def refusal(folder: Path | str) -> str:
    """Return why the folder is refused."""
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(folder), "auto", "cpu")
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    return text.replace(f"{folder}: ", "")


def edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the checkpoint, or drop those that are None."""
    weights = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in (weights | changes).items() if tensor is not None}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def shard(path: Path) -> list[Path]:
    """Split the checkpoint into two shards with an index; return their files."""
    weights = load_file(path / "model.safetensors")
    names = sorted(weights)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    files = [path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for file, half in zip(files, halves, strict=True):
        save_file({name: weights[name] for name in half}, file, metadata={"format": "pt"})
    where = {n: f.name for f, half in zip(files, halves, strict=True) for n in half}
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "model.safetensors").unlink()
    return files


def test_an_empty_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "no config.json in this directory"


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    assert "expected a directory with config.json and safetensors, or a .gguf" in refusal(file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{not json", "config.json is not JSON (Expecting property name"),
        ("", "config.json is not JSON"),
        ("[1, 2]", "config.json must hold an object, not a list"),
        ('"llama"', "config.json must hold an object, not a str"),
        ("{}", "model_type None is unknown"),
        ('{"model_type": "never_heard_of"}', "model_type 'never_heard_of' is unknown"),
        ('{"model_type": ["llama"]}', "model_type ['llama'] is unknown"),
        ('{"model_type": "llama", "hidden_size": "many"}', "hidden_size"),
        ("[" * 100_000, "config.json is not JSON (maximum recursion depth"),
    ],
)
def test_a_broken_configuration(llama_copy: Path, text: str, reason: str) -> None:
    (llama_copy / "config.json").write_text(text)
    found = refusal(llama_copy)
    assert found.startswith("cannot read the model's configuration")
    assert reason in found


def test_a_configuration_in_another_encoding(llama_copy: Path) -> None:
    (llama_copy / "config.json").write_bytes(b"\xff\xfe{}")
    assert "config.json is not JSON" in refusal(llama_copy)


@pytest.mark.parametrize("keep", [0, 7, 100, 3000, -1])
def test_truncated_weights(llama_copy: Path, keep: int) -> None:
    weights = llama_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    reason = refusal(llama_copy)
    assert "cannot load the weights: model.safetensors is truncated" in reason
    assert f"{weights.stat().st_size:,} bytes" in reason


def test_more_bytes_than_the_header_speaks_of(llama_copy: Path) -> None:
    weights = llama_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"x")
    assert "model.safetensors is damaged" in refusal(llama_copy)


@pytest.mark.parametrize("position", [0, 5, 7, 8, 40, 100])
def test_a_flipped_byte_in_the_header(llama_copy: Path, position: int) -> None:
    weights = llama_copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[position] ^= 0xFF
    weights.write_bytes(bytes(data))
    assert "cannot load the weights" in refusal(llama_copy)


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": []}}',
        "[" * 100_000,
    ],
)
def test_a_header_of_other_things(llama_copy: Path, header: str) -> None:
    data = header.encode()
    (llama_copy / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    assert "model.safetensors is damaged: its header makes no sense" in refusal(llama_copy)


def test_no_weights(llama_copy: Path) -> None:
    (llama_copy / "model.safetensors").unlink()
    assert "cannot load the weights: no model.safetensors" in refusal(llama_copy)
    (llama_copy / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin is a pickle" in refusal(llama_copy)


def test_shards_load_when_they_are_all_there(llama_copy: Path) -> None:
    expected = load_model(str(llama_copy), "auto", "cpu")
    shard(llama_copy)
    served = load_model(str(llama_copy), "auto", "cpu")
    for name, tensor in expected._model.state_dict().items():
        torch.testing.assert_close(served._model.state_dict()[name], tensor)


def test_a_missing_shard(llama_copy: Path) -> None:
    files = shard(llama_copy)
    files[1].unlink()
    assert f"1 of 2 shards are missing ({files[1].name} first)" in refusal(llama_copy)


def test_a_truncated_shard(llama_copy: Path) -> None:
    files = shard(llama_copy)
    files[1].write_bytes(files[1].read_bytes()[:-8])
    assert f"{files[1].name} is truncated" in refusal(llama_copy)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"weight_map": 3}', "{}", '{"weight_map": {"a": 5}}', "[" * 100_000]
)
def test_a_damaged_index(llama_copy: Path, text: str) -> None:
    shard(llama_copy)
    (llama_copy / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json is damaged" in refusal(llama_copy)


def test_weights_of_another_shape(llama_copy: Path) -> None:
    edit(llama_copy, intermediate_size=24)
    reason = refusal(llama_copy)
    assert "model.layers.0.mlp.down_proj.weight is of shape (16, 16)" in reason
    assert "the configuration wants (16, 24) (and 5 more)" in reason


@pytest.mark.parametrize("eos", ['"x"', "[1, null]", "2.5", "true"])
def test_an_end_of_text_that_is_no_token(llama_copy: Path, eos: str) -> None:
    (llama_copy / "generation_config.json").write_text(f'{{"eos_token_id": {eos}}}')
    assert refusal(llama_copy).startswith("eos_token_id is ")


def test_no_layers(llama_copy: Path) -> None:
    edit(llama_copy, num_hidden_layers=0)
    assert refusal(llama_copy).endswith("LlamaForCausalLM has 0 layers")


def test_missing_weights_are_not_drawn_at_random(llama_copy: Path) -> None:
    rewrite(llama_copy, **{"model.layers.1.self_attn.q_proj.weight": None})
    assert refusal(llama_copy).endswith("model.layers.1.self_attn.q_proj.weight is missing")


def test_a_head_that_is_the_embedding_is_not_missing(llama_copy: Path) -> None:
    rewrite(llama_copy, **{"lm_head.weight": None})
    assert refusal(llama_copy).endswith("lm_head.weight is missing")
    edit(llama_copy, tie_word_embeddings=True)
    model = load_model(str(llama_copy), "auto", "cpu")._model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_fewer_layers_in_the_checkpoint_than_configured(llama_copy: Path) -> None:
    edit(llama_copy, num_hidden_layers=3)
    assert "model.layers.2.input_layernorm.weight is missing (and 8 more)" in refusal(llama_copy)


@pytest.mark.parametrize("known", [True, False])
def test_code_from_a_checkpoint_is_never_run(
    llama_copy: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a server asked its operator"))
    (llama_copy / "modeling_own.py").write_text("raise SystemExit('ran')\n")
    own = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    edit(llama_copy, auto_map=own, model_type="llama" if known else "own")
    if known:
        # What transformers has code for needs none of the checkpoint's.
        assert load_model(str(llama_copy), "auto", "cpu").vocab_size == 40
    else:
        assert "brings Python code of its own (auto_map)" in refusal(llama_copy)
