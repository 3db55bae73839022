"""From settings to a ready device engine: model, tokenizer, KV pool and runner, or one clear line.

Owns the choices that depend on the device: dtype, attention backend, block size, size of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers

from engine.device.attention.base import UnsupportedByBackendError
from engine.device.attention.choice import choose_backend
from engine.device.demo import Progress, prepare_demo
from engine.device.kv_cache import default_kv_bytes, num_blocks_within
from engine.device.model import DecoderModel, ModelLoadError, load_model
from engine.device.runner import TorchRunner
from engine.device.tokenizer import HubTokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What can be chosen; None and `auto` leave the choice to the device."""

    dtype: str = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    chat_template: str | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A runner with all that the loop, the doors and telemetry need to know about it."""

    runner: TorchRunner
    tokenizer: HubTokenizer
    source: str
    device_name: str
    dtype: str
    attention_backend: str
    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_bytes: int


def load_engine(source: str, options: DeviceOptions, progress: Progress) -> LoadedEngine:
    """Load `source` (`demo`, a directory or a hub id); ModelLoadError says what to change."""
    transformers.utils.logging.disable_progress_bar()
    device = _device_of(options.device)
    # A directory of that name is `./demo`: the word alone means the same thing everywhere.
    path = str(prepare_demo(progress)) if source == "demo" else source
    progress(0, 2, "loading the weights")
    model = load_model(path, options.dtype, device)
    progress(1, 2, "loading the tokenizer")
    tokenizer = load_tokenizer(path, model.vocab_size, options.chat_template)
    progress(2, 2, "done")
    try:
        backend, block_size = choose_backend(
            options.attention_backend, options.block_size, model.dtype, model.device, model.layers
        )
    except UnsupportedByBackendError as error:
        raise ModelLoadError(str(error)) from error
    kv_bytes = options.kv_cache_memory_bytes or default_kv_bytes(model.device)
    num_blocks = num_blocks_within(kv_bytes, model.layers, block_size, model.dtype)
    max_model_len = _max_model_len(options.max_model_len, model, num_blocks * block_size, kv_bytes)
    try:
        runner = TorchRunner(model, backend, num_blocks, block_size, options.seed)
    except (RuntimeError, MemoryError) as error:
        raise ModelLoadError(
            f"cannot allocate {kv_bytes / 2**20:,.0f} MiB for the KV pool: lower"
            f" --kv-cache-memory-bytes ({' '.join(str(error).split())[:120]})"
        ) from error
    return LoadedEngine(
        runner=runner,
        tokenizer=tokenizer,
        source=path,
        device_name=_device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        attention_backend=backend.name,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        kv_bytes=kv_bytes,
    )


def _device_of(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ModelLoadError(f"--device {name}: expected auto, cpu or cuda[:N]")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(f"--device {name}: no CUDA device is available; use --device cpu")
    return name


def _max_model_len(asked: int | None, model: DecoderModel, pool_tokens: int, kv_bytes: int) -> int:
    longest = model.max_position_embeddings
    if pool_tokens < 2:
        raise ModelLoadError(
            f"--kv-cache-memory-bytes {kv_bytes}: holds {pool_tokens} tokens; raise it"
        )
    if asked is None:
        return min(longest, pool_tokens)
    if asked > longest:
        raise ModelLoadError(f"--max-model-len {asked}: the model's own limit is {longest}")
    if asked > pool_tokens:
        raise ModelLoadError(
            f"--max-model-len {asked}: the KV pool holds {pool_tokens} tokens; raise"
            " --kv-cache-memory-bytes or lower --max-model-len"
        )
    return asked


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"
