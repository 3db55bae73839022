"""`paceline serve` on what cannot be served: one line of error and exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from controller.cli.main import app
from controller.config import Settings

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"PACELINE_{name.upper()}", raising=False)
    monkeypatch.chdir(tmp_path)


def _config(**changes: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return damage


def _write(name: str, text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text)

    return damage


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def _narrow_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:20].clone(memory_format=torch.contiguous_format)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _config(vocab_size=20)(folder)


def _drop_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def _nothing(folder: Path) -> None:
    """The model is sound; the flags are not."""


@pytest.mark.parametrize(
    ("damage", "flags", "names"),
    [
        (_write("config.json", "{oops"), [], "config.json is not JSON"),
        (_write("config.json", "[]"), [], "config.json must hold an object, not a list"),
        (_config(model_type="mamba"), [], "mamba: state-space"),
        (_config(num_hidden_layers=4), [], "model.layers.2.input_layernorm.weight is missing"),
        (_truncate, [], "model.safetensors is truncated: 5,000 bytes"),
        (_narrow_head, [], "the tokenizer knows 34 tokens, the model's head only 20"),
        (_drop_tokenizer, [], "no usable tokenizer"),
        (_write("chat_template.jinja", "{% if %}"), [], "chat template does not compile: line 1"),
        (_nothing, ["--max-model-len", "200"], "--max-model-len 200: the model's own limit is 128"),
        (_nothing, ["--kv-cache-memory-bytes", "4096"], "holds 32 tokens in 2 blocks"),
        (_nothing, ["--kv-cache-memory-bytes", "1000"], "a block of 16 tokens takes 2048 bytes"),
        (_nothing, ["--dtype", "float8"], "dtype"),
        (_nothing, ["--attention-backend", "torch_varlen"], "torch_varlen"),
    ],
)
def test_one_line_and_exit_code_2(
    llama_copy: Path, damage: Callable[[Path], None], flags: list[str], names: str
) -> None:
    damage(llama_copy)
    words = ["serve", str(llama_copy), "--port", "0", "--device", "cpu", "--no-warmup", *flags]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("paceline: error: ")]
    assert names in line
    assert "Traceback" not in result.output + result.stderr
    # Nothing of transformers' own reports beside it.
    assert "LOAD REPORT" not in result.output + result.stderr
