"""A peer to measure against: transformers' continuous batching, driven by JSON lines on stdin.

`python -m engine.device.peer_transformers MODEL` loads the same weights as the engine and runs
transformers' own manager on them: its model code, attention, cache and scheduler. Must not use
anything of ours on the way to a token, nor take a time: whoever reads the lines stamps them.

Read, one object a line: `{"name": …, "prompt": [ids], "max_tokens": n}`. Written: `ready` with the
settings in force, then per request `tokens` (how many came since the last line) and at last
`finished` or `failed`; `fatal` with a reason if nothing can go on. The process ends with its stdin.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from engine.device.checkpoint import Checkpoint, find_checkpoint
from engine.device.demo import prepare_demo
from engine.device.json_lines import LineWriter, claim_stdout, error_line
from engine.device.servable import ModelLoadError

POLL_S = 1.0
"""How long the writer sleeps at a time when nothing is being generated."""

_HEAD_TOKENS = 8
"""Prompt tokens decoded before an output, so that its first token reads as it does in a text."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What transformers lets one choose, as far as it matters on a CPU.

    `max_batch_tokens` holds a prompt of 1024 tokens beside the decodes, and eight of 128 at once.
    Its static attention masks take `max_batch_tokens` × cache tokens × 4 bytes, so the default of
    8192 would cost gigabytes and gain nothing. `num_blocks` blocks of `page_size` tokens are the
    cache. `compile_level` is transformers' `default_compile_level` (0 = eager mode); compiled
    forwards are padded to `q_padding` tokens and `kv_padding` keys.
    """

    attention: str = "sdpa"
    compile_level: int = 0
    max_batch_tokens: int = 2048
    page_size: int = 256
    num_blocks: int = 64
    q_padding: int = 0
    kv_padding: int = 0

    def to_transformers(self) -> ContinuousBatchingConfig:
        """Return transformers' own configuration; blocks are not shared between requests."""
        return ContinuousBatchingConfig(
            page_size=self.page_size,
            num_blocks=self.num_blocks,
            max_batch_tokens=self.max_batch_tokens,
            q_padding_interval_size=self.q_padding,
            kv_padding_interval_size=self.kv_padding,
            default_compile_level=self.compile_level,
            # No two prompts of a measurement begin alike: looking for a known prefix only costs.
            allow_block_sharing=False,
        )


SETTINGS = {
    "sdpa": PeerSettings(),
    "eager": PeerSettings(attention="paged|eager"),
    # Shorter gaps when a long prompt arrives, at the price of its TTFT.
    "sdpa-128": PeerSettings(max_batch_tokens=128),
    # Its defaults pad every step to 64 tokens and 16384 keys, which suits graphs on a GPU.
    "sdpa-compiled": PeerSettings(compile_level=1, q_padding=8, kv_padding=1024),
}
"""Named settings to choose from."""


class Forwarder:
    """Turns what the manager delivers into lines: tokens as they come, each request's end once."""

    def __init__(self, manager: Any, writer: LineWriter, tokenizer: Any) -> None:
        self._manager = manager
        self._writer = writer
        self._tokenizer = tokenizer
        self._num_sent: dict[str, int] = {}

    def run(self) -> None:
        """Forward until the manager stops; a dead generation thread is told as `fatal`."""
        while True:
            output = self._manager.get_result(timeout=POLL_S)
            if output is not None:
                self.forward(output)
            elif self._manager.background_thread_status.fatal_error is not None:
                error = self._manager.background_thread_status.fatal_error
                self._writer.write("fatal", error=error_line(error))
                return
            elif not self._manager.is_running():
                return

    def forward(self, output: Any) -> None:
        """Write the lines for one `GenerationOutput`, whose tokens are all those so far."""
        name = output.request_id
        token_ids = output.generated_tokens
        if output.error is not None:
            self._num_sent.pop(name, None)
            self._writer.write("failed", name=name, error=output.error)
            return
        num_new = len(token_ids) - self._num_sent.get(name, 0)
        if num_new > 0:
            self._num_sent[name] = len(token_ids)
            self._writer.write("tokens", name=name, num_tokens=num_new)
        if output.is_finished():
            self._num_sent.pop(name, None)
            self._writer.write(
                "finished",
                name=name,
                num_prompt_tokens=len(output.prompt_ids),
                num_output_tokens=len(token_ids),
                text=self._text(output.prompt_ids, token_ids),
            )

    def _text(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> str | None:
        if self._tokenizer is None:
            return None
        head_ids = list(prompt_ids[-_HEAD_TOKENS:])
        head: str = self._tokenizer.decode(head_ids, skip_special_tokens=True)
        whole: str = self._tokenizer.decode([*head_ids, *token_ids], skip_special_tokens=True)
        return whole[len(head) :]


def serve(
    source: str,
    settings: PeerSettings,
    dtype: str,
    device: str,
    lines: Iterable[str],
    writer: LineWriter,
) -> None:
    """Load `source`, tell that it is ready, and generate for every line until the input ends."""
    path = str(prepare_demo(lambda done, total, text: None)) if source == "demo" else source
    checkpoint = find_checkpoint(path)
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint.location,
        gguf_file=checkpoint.gguf_file,
        dtype=getattr(torch, dtype),
        attn_implementation=settings.attention,
    )
    model = model.to(device).eval()
    # Greedy, and no token ends a request before its number of tokens is complete.
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    # The manager runs its thread in the mode of whoever starts it; inference mode costs least.
    with torch.inference_mode():
        manager = model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=settings.to_transformers()
        )
        manager.warmup()
        manager.start()
    forwarder = threading.Thread(
        target=Forwarder(manager, writer, _tokenizer_of(checkpoint)).run, name="peer-forwarder"
    )
    forwarder.start()
    writer.write("ready", **_facts(manager, model, settings))
    for line in lines:
        command = json.loads(line)
        manager.add_request(
            command["prompt"],
            request_id=command["name"],
            max_new_tokens=command["max_tokens"],
            streaming=True,
        )
    # Nobody reads any more: whatever still runs is of no use.
    manager.stop(block=True, hard_stop=True)
    forwarder.join()


def _facts(manager: Any, model: Any, settings: PeerSettings) -> dict[str, Any]:
    """Return what is in force, as transformers resolved it: numbers that belong to a result."""
    resolved = manager.continuous_batching_config
    return {
        "settings": asdict(settings),
        "attention": model.config._attn_implementation,
        "max_batch_tokens": resolved.max_batch_tokens,
        "num_blocks": resolved.num_blocks,
        "page_size": resolved.page_size,
        "scheduler": resolved.scheduler_type,
        "is_async": bool(resolved.use_async_batching),
        "is_compiled": resolved.varlen_compile_config is not None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "num_threads": torch.get_num_threads(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }


def _tokenizer_of(checkpoint: Checkpoint) -> Any:
    try:
        return AutoTokenizer.from_pretrained(checkpoint.location, gguf_file=checkpoint.gguf_file)
    except (OSError, ValueError):
        # A model without one can be measured; its texts just cannot be compared.
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the peer; returns the exit code, 1 after a `fatal` line."""
    parser = argparse.ArgumentParser(description="transformers' continuous batching as a peer")
    parser.add_argument("model")
    parser.add_argument("--settings", choices=sorted(SETTINGS), default="sdpa")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    writer = claim_stdout()
    try:
        serve(
            options.model,
            SETTINGS[options.settings],
            options.dtype,
            options.device,
            sys.stdin,
            writer,
        )
    except ModelLoadError as error:
        writer.write("fatal", error=str(error))
        return 1
    except Exception as error:
        # Whatever a version of transformers trips over: one line for the person who measures.
        writer.write("fatal", error=error_line(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
