"""From settings to a ready device engine: model, tokenizer, KV pool and runner, or one clear line.

Owns the choices that depend on the device: dtype, attention backend, block size, size of the pool.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import transformers

from engine.blocks import num_blocks_for
from engine.device.attention.base import UnsupportedByBackendError
from engine.device.attention.choice import choose_backend
from engine.device.checkpoint import find_checkpoint, load_config, one_line
from engine.device.demo import Progress, prepare_demo
from engine.device.graphs import GraphRequest
from engine.device.kv_cache import num_bytes_per_block
from engine.device.memory import (
    GIB,
    available_bytes,
    default_host_pool_bytes,
    default_pool_bytes,
    host_available_bytes,
    in_words,
)
from engine.device.model import DecoderModel
from engine.device.runner import TorchRunner
from engine.device.servable import ModelLoadError, check_config, is_context_cut
from engine.device.tokenizer import HubTokenizer, fit_tokenizer, read_tokenizer
from engine.device.weights import load_weights


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What can be chosen; None and `auto` leave the choice to the device.

    `host_kv_bytes` is the host memory that takes the KV of preempted requests: 0 leaves the choice
    to the device too, less than a block's bytes switches it off. `max_graph_batch` is the largest
    batch of decodes that is recorded as a CUDA graph (0 records none; nothing is off CUDA).
    """

    dtype: str = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    chat_template: str | None = None
    seed: int | None = None
    host_kv_bytes: int = 0
    max_graph_batch: int = 0


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A runner with all that the loop, the doors and telemetry need to know about it.

    `graph_sizes` are the padded batch sizes of decode steps that are replayed as CUDA graphs;
    `graphs_off` says why there are none although they were asked for.
    """

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
    num_host_blocks: int = 0
    graph_sizes: tuple[int, ...] = ()
    graphs_off: str | None = None


@dataclass(frozen=True, slots=True)
class _Pools:
    """The KV pool and the host pool, in blocks of `block_bytes`; `kv_bytes` were asked for."""

    kv_bytes: int
    block_size: int
    block_bytes: int
    num_blocks: int
    num_host_blocks: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.num_blocks * self.block_size

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes of a pool that holds `num_tokens`."""
        return num_blocks_for(num_tokens, self.block_size) * self.block_bytes


def load_engine(source: str, options: DeviceOptions, progress: Progress) -> LoadedEngine:
    """Load `source` (`demo`, a directory, a GGUF file or a hub id); ModelLoadError says what to
    change.
    """
    # What they would draw and tell is told by us: progress, and errors in one line.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    device = _device_of(options.device)
    # A directory of that name is `./demo`: the word alone means the same thing everywhere.
    path = str(prepare_demo(progress)) if source == "demo" else source
    checkpoint = find_checkpoint(path)
    config = load_config(checkpoint)
    check_config(config)
    # The tokenizer first: what is wrong with it should not cost the loading of the weights.
    progress(0, 2, "loading the tokenizer")
    inner = read_tokenizer(checkpoint)
    progress(1, 2, "loading the weights")
    model = DecoderModel(load_weights(checkpoint, config, options.dtype, device), path)
    progress(2, 2, "done")
    tokenizer = fit_tokenizer(inner, checkpoint, model.vocab_size, options.chat_template)
    try:
        backend, block_size = choose_backend(
            options.attention_backend, options.block_size, model.dtype, model.device, model.layers
        )
    except UnsupportedByBackendError as error:
        raise ModelLoadError(str(error)) from error
    pools = _pools(options, model, block_size)
    max_model_len = _max_model_len(options, model, is_context_cut(config), pools)
    try:
        runner = TorchRunner(
            model,
            backend,
            pools.num_blocks,
            block_size,
            options.seed,
            num_host_blocks=pools.num_host_blocks,
            graphs=_graphs(options, model, max_model_len),
        )
    except (RuntimeError, MemoryError) as error:
        host_words = in_words(pools.num_host_blocks * pools.block_bytes)
        left = in_words(available_bytes(model.device))
        raise ModelLoadError(
            f"cannot allocate {in_words(pools.kv_bytes)} for the KV pool and {host_words} of host"
            f" memory beside it, {left} are left on {model.device}: lower --kv-cache-memory-bytes"
            f" ({one_line(error)[:120]})"
        ) from error
    return LoadedEngine(
        runner=runner,
        tokenizer=tokenizer,
        source=path,
        device_name=_device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        attention_backend=backend.name,
        block_size=block_size,
        num_blocks=pools.num_blocks,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        kv_bytes=pools.kv_bytes,
        num_host_blocks=pools.num_host_blocks,
        graph_sizes=runner.graph_sizes,
        graphs_off=runner.graphs_off,
    )


def _graphs(options: DeviceOptions, model: DecoderModel, max_model_len: int) -> GraphRequest | None:
    """Return what to record: graphs are CUDA's, and there is nothing to miss elsewhere."""
    if options.max_graph_batch < 1 or model.device.type != "cuda":
        return None
    return GraphRequest(options.max_graph_batch, max_model_len)


def _device_of(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", name, re.ASCII)
    if found is None:
        raise ModelLoadError(f"--device {name}: expected auto, cpu or cuda[:N]")
    if name != "cpu" and not torch.cuda.is_available():
        raise ModelLoadError(f"--device {name}: no CUDA device is available; use --device cpu")
    if found[1] is not None and int(found[1]) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ModelLoadError(f"--device {name}: the last CUDA device here is cuda:{last}")
    return name


def _pools(options: DeviceOptions, model: DecoderModel, block_size: int) -> _Pools:
    """Size both pools by what was asked for, or by what memory there is."""
    available = available_bytes(model.device)
    block_bytes = num_bytes_per_block(model.layers, block_size, model.dtype)
    asked = options.kv_cache_memory_bytes
    kv_bytes = asked or default_pool_bytes(model.device, available)
    if kv_bytes > available:
        raise ModelLoadError(
            f"--kv-cache-memory-bytes {kv_bytes}: {in_words(available)} are available on"
            f" {model.device} ({available} bytes); lower it"
        )
    if kv_bytes < block_bytes:
        what = f"--kv-cache-memory-bytes {kv_bytes}: "
        if asked is None:
            what = f"{in_words(available)} are available on {model.device}, and the KV pool would"
            what += f" take {in_words(kv_bytes)} of it: "
        raise ModelLoadError(
            f"{what}a block of {block_size} tokens takes {block_bytes} bytes; free memory, raise"
            " --kv-cache-memory-bytes or lower --block-size"
        )
    on_cpu = model.device.type == "cpu"
    host_available = max(0, available - kv_bytes) if on_cpu else host_available_bytes()
    host_bytes = options.host_kv_bytes or default_host_pool_bytes(
        model.device, kv_bytes, host_available
    )
    if host_bytes > host_available:
        raise ModelLoadError(
            f"--swap-space {host_bytes / GIB:g}: {in_words(host_available)} of host memory are"
            " available beside the KV pool; lower it"
        )
    return _Pools(
        kv_bytes, block_size, block_bytes, kv_bytes // block_bytes, host_bytes // block_bytes
    )


def _max_model_len(options: DeviceOptions, model: DecoderModel, is_cut: bool, pools: _Pools) -> int:
    """Return the longest context: what was asked for, or the model's own as far as a pool that
    nobody sized holds it.
    """
    longest, asked = model.max_position_embeddings, options.max_model_len
    if asked is not None and asked > longest:
        why = ", beyond which its rotary scaling depends on the batch" if is_cut else ""
        raise ModelLoadError(f"--max-model-len {asked}: the model's own limit is {longest}{why}")
    wanted = asked or longest
    if wanted <= pools.num_tokens:
        return wanted
    holds = f"the KV pool holds {pools.num_tokens} tokens in {pools.num_blocks} blocks"
    raise_it = f"raise --kv-cache-memory-bytes to at least {pools.bytes_for(wanted)}"
    if asked is not None:
        raise ModelLoadError(
            f"--max-model-len {asked}: {holds}; {raise_it} or lower --max-model-len"
        )
    if options.kv_cache_memory_bytes is not None:
        raise ModelLoadError(
            f"--kv-cache-memory-bytes {pools.kv_bytes}: {holds}, and the model's context is"
            f" {longest}; {raise_it}, or bound the context with --max-model-len"
            f" {pools.num_tokens}"
        )
    return pools.num_tokens


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"
