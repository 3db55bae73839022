"""Loading: what cannot be served is refused with the reason, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.device import loading, weights
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
        (
            {"max_model_len": 100, "kv_cache_memory_bytes": 4096},
            "--max-model-len 100: the KV pool holds 32 tokens in 2 blocks; raise"
            " --kv-cache-memory-bytes to at least 14336 or lower --max-model-len",
        ),
        (
            {"kv_cache_memory_bytes": 4096},
            "--kv-cache-memory-bytes 4096: the KV pool holds 32 tokens in 2 blocks, and the model's"
            " context is 128; raise --kv-cache-memory-bytes to at least 16384, or bound the context"
            " with --max-model-len 32",
        ),
        (
            {"kv_cache_memory_bytes": 64},
            "--kv-cache-memory-bytes 64: a block of 16 tokens takes 2048 bytes",
        ),
        ({"kv_cache_memory_bytes": 1 << 60}, "--kv-cache-memory-bytes 1152921504606846976: "),
        ({"host_kv_bytes": 1 << 60}, "--swap-space 1.07374e+09: "),
        ({"dtype": "float8"}, "--dtype float8: expected auto, float32, bfloat16, float16 or"),
        ({"dtype": "int32"}, "--dtype int32"),
        ({"device": "tpu"}, "--device tpu"),
        ({"device": "cpu:"}, "--device cpu:: expected auto, cpu or cuda[:N]"),
        ({"device": "cuda:x"}, "--device cuda:x: expected auto, cpu or cuda[:N]"),
        ({"attention_backend": "flash_attn"}, "CUDA device"),
        ({"attention_backend": "torch_varlen"}, "CUDA device"),
        ({"attention_backend": "magic"}, "--attention-backend magic"),
    ],
)
def test_wrong_options_name_the_flag(folder: Path, options: dict[str, Any], names: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_engine(str(folder), DeviceOptions(**{"device": "cpu", **options}), quiet)
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_card_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ModelLoadError, match="--device cuda:7: the last CUDA device here is cuda:1"
    ):
        load_engine(str(folder), DeviceOptions(device="cuda:7"), quiet)


def test_the_bytes_that_a_refusal_asks_for_are_enough(folder: Path) -> None:
    for kv_bytes, max_model_len in ((14336, 100), (16384, None), (4096, 32)):
        options = DeviceOptions(
            device="cpu", kv_cache_memory_bytes=kv_bytes, max_model_len=max_model_len
        )
        assert load_engine(str(folder), options, quiet).max_model_len == (max_model_len or 128)


def test_a_default_pool_shrinks_with_the_memory_and_the_context_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "available_bytes", lambda device: 20_000)
    engine = load_engine(str(folder), DeviceOptions(device="cpu"), quiet)
    # Half of what is there: four blocks of 2048 bytes, and a quarter of the rest for the host's.
    assert (engine.num_blocks, engine.max_model_len) == (4, 64)
    assert engine.num_host_blocks == 1


def test_no_room_for_a_single_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available_bytes", lambda device: 3000)
    with pytest.raises(ModelLoadError) as caught:
        load_engine(str(folder), DeviceOptions(device="cpu"), quiet)
    assert "2.93 KiB are available on cpu, and the KV pool would take 1.46 KiB" in str(caught.value)


def test_no_room_for_the_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "available_bytes", lambda device: 10_000)
    with pytest.raises(ModelLoadError) as caught:
        load_engine(str(folder), DeviceOptions(device="cpu"), quiet)
    # 4,432 parameters, as the checkpoint has them and as half of that.
    assert "the weights take 17.3 KiB as stored, and 9.77 KiB are available" in str(caught.value)
    assert load_model(str(folder), "bfloat16", "cpu").dtype is torch.bfloat16


def test_out_of_memory_on_the_way_to_the_device(folder: Path, monkeypatch: Any) -> None:
    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr("transformers.PreTrainedModel.to", fail)
    with pytest.raises(ModelLoadError, match="out of memory while loading the weights on cpu"):
        load_engine(str(folder), DeviceOptions(device="cpu"), quiet)


def test_out_of_memory_for_the_pool(folder: Path, monkeypatch: Any) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(loading, "TorchRunner", fail)
    with pytest.raises(ModelLoadError) as caught:
        load_engine(str(folder), DeviceOptions(device="cpu"), quiet)
    text = str(caught.value)
    assert text.startswith("cannot allocate 1 GiB for the KV pool and 512 MiB of host memory")
    assert "lower --kv-cache-memory-bytes" in text


@pytest.mark.parametrize(("host_kv_bytes", "num_host_blocks"), [(0, 4), (3 * 2048 + 5, 3), (1, 0)])
def test_host_memory_for_preempted_requests(
    folder: Path, host_kv_bytes: int, num_host_blocks: int
) -> None:
    options = DeviceOptions(
        device="cpu", kv_cache_memory_bytes=8 * 2048, host_kv_bytes=host_kv_bytes
    )
    engine = load_engine(str(folder), options, quiet)
    assert engine.num_host_blocks == num_host_blocks
    assert engine.runner._cache.num_host_blocks == num_host_blocks


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


BROKEN = "{% for m in messages %}{{ m.content }"


def test_a_chat_template_that_does_not_compile(folder: Path, copy: Path) -> None:
    with pytest.raises(ModelLoadError, match="the given chat template does not compile: line 1"):
        load_engine(str(folder), DeviceOptions(device="cpu", chat_template=BROKEN), quiet)
    (copy / "chat_template.jinja").write_text(BROKEN)
    with pytest.raises(ModelLoadError, match="the model's own chat template does not compile"):
        load_engine(str(copy), DeviceOptions(device="cpu"), quiet)
    # Another one in its place is all that it takes.
    options = DeviceOptions(device="cpu", chat_template="{{ messages[0].content }}")
    assert load_engine(str(copy), options, quiet).tokenizer.has_chat_template


def test_templates_may_use_what_transformers_knows(folder: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    tokenizer = load_tokenizer(str(folder), 40, template)
    messages = [{"role": "user", "content": "w1"}, {"role": "user", "content": "w2"}]
    assert tokenizer.apply_chat_template(messages) == [5]


def test_a_tokenizer_with_code_of_its_own(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a server asked its operator"))
    (copy / "tokenization_own.py").write_text("raise SystemExit('ran')\n")
    file = copy / "tokenizer_config.json"
    changes = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="no usable tokenizer"):
        load_engine(str(copy), DeviceOptions(device="cpu"), quiet)
