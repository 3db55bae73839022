"""Loading: what cannot be served is refused with the reason, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.device.loading import DeviceOptions, load_engine
from engine.device.model import ModelLoadError, load_model
from engine.device.tokenizer import HubTokenizer, load_tokenizer

pytestmark = pytest.mark.device


def quiet(done: int, total: int, description: str) -> None:
    """Progress that nobody watches."""


@pytest.fixture
def folder(llama_folder: Path) -> Path:
    return llama_folder


@pytest.fixture
def copy(llama_copy: Path) -> Path:
    return llama_copy


def test_a_local_directory_loads_with_sensible_choices(folder: Path) -> None:
    engine = load_engine(str(folder), DeviceOptions(device="cpu"), quiet)
    assert (engine.dtype, engine.attention_backend, engine.block_size) == (
        "float32",
        "reference",
        16,
    )
    assert (engine.vocab_size, engine.eos_token_ids) == (40, (2,))
    assert engine.max_model_len == 128
    # Two layers of one head of width eight, keys and values, four bytes each; 1 GiB of it.
    assert engine.num_blocks == (1 << 30) // (2 * (8 + 8) * 4 * 16)
    assert engine.tokenizer.encode("w1 w2", add_special_tokens=False) == [5, 6]


def test_the_pool_bounds_the_context(folder: Path) -> None:
    options = DeviceOptions(
        device="cpu", kv_cache_memory_bytes=128 * 48, block_size=8, max_model_len=48
    )
    engine = load_engine(str(folder), options, quiet)
    assert (engine.max_model_len, engine.num_blocks) == (48, 6)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"max_model_len": 129}, "--max-model-len 129: the model's own limit is 128"),
        ({"max_model_len": 100, "kv_cache_memory_bytes": 4096}, "the KV pool holds 32 tokens"),
        ({"kv_cache_memory_bytes": 64}, "--kv-cache-memory-bytes 64"),
        ({"dtype": "float8"}, "--dtype float8"),
        ({"dtype": "int32"}, "--dtype int32"),
        ({"device": "tpu"}, "--device tpu"),
        ({"attention_backend": "flash_attn"}, "flash-attn package"),
    ],
)
def test_wrong_options_name_the_flag(folder: Path, options: dict[str, Any], names: str) -> None:
    if torch.cuda.is_available() and "attention_backend" in options:
        pytest.skip("this machine may have flash-attn")
    with pytest.raises(ModelLoadError, match=names):
        load_engine(str(folder), DeviceOptions(**{"device": "cpu", **options}), quiet)


def test_missing_tokenizer(copy: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    with pytest.raises(ModelLoadError, match="no usable tokenizer"):
        load_engine(str(copy), DeviceOptions(device="cpu"), quiet)


def test_a_tokenizer_wider_than_the_head(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="34 tokens, the model's head only 20"):
        load_tokenizer(str(folder), 20)


def test_a_model_that_attends_elsewhere_is_refused(copy: Path, monkeypatch: Any) -> None:
    from engine.device import model as module

    # An architecture whose layers never reach the interface must not be served silently wrong.
    monkeypatch.setattr(module._Probe, "attend", lambda self, q, k, v, call: q[:, :, : v.shape[2]])
    with pytest.raises(ModelLoadError, match="0 of 2 layers"):
        load_model(str(copy), "auto", "cpu")


@pytest.fixture
def tokenizer(folder: Path) -> HubTokenizer:
    return load_tokenizer(str(folder), 40)


def test_chat_without_a_template_says_what_to_do(tokenizer: HubTokenizer) -> None:
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="--chat-template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "w1"}])


def test_chat_renders_the_given_template(folder: Path) -> None:
    template = "{% for m in messages %}{{ m.content }} {% endfor %}w9"
    tokenizer = load_tokenizer(str(folder), 40, template)
    messages = [{"role": "user", "content": "w1"}, {"role": "user", "content": "w2"}]
    assert tokenizer.apply_chat_template(messages) == [5, 6, 13]
    with pytest.raises(ValueError, match="refused the messages: no system"):
        tokenizer.apply_chat_template(messages, chat_template="{{ raise_exception('no system') }}")


def test_special_tokens_are_skipped_on_request(tokenizer: HubTokenizer) -> None:
    assert tokenizer.decode([5, 2, 6]) == "w1 w2"
    assert "</s>" in tokenizer.decode([5, 2, 6], skip_special_tokens=False)
