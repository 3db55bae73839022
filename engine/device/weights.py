"""Weights into a transformers model on its device, or one line that says why not.

Owns the dtype, the room that the weights take, and what a checkpoint may lack (nothing). Must not
know attention or a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from engine.device.attention.base import ATTENTION_NAME
from engine.device.checkpoint import Checkpoint, check_safetensors, gguf_options, one_line
from engine.device.memory import available_bytes, in_words
from engine.device.servable import ModelLoadError

_DTYPE_NAMES = ("float32", "bfloat16", "float16", "float64")


def load_weights(checkpoint: Checkpoint, config: Any, dtype: str, device: str) -> Any:
    """Return the model on `device`, nothing of it drawn at random; ModelLoadError on refusal.

    `dtype` is a torch dtype's name, or `auto`: the checkpoint's own, and for a GGUF file of
    quantised blocks float32 on a CPU, bfloat16 on a card.
    """
    wanted = _dtype_of(dtype, checkpoint, device)
    elements = check_safetensors(checkpoint)
    method = quantization_method(config)
    known = AUTO_QUANTIZER_MAPPING
    if method and checkpoint.gguf_file is None and not {method, f"{method}_4bit"} & set(known):
        # transformers would skip it with a warning, and read blocks as if they were numbers.
        raise ModelLoadError(
            f"{checkpoint.source}: quantised by {method}, which transformers does not know"
        )
    _check_room(checkpoint.source, elements, None if method else wanted, device)
    options: dict[str, Any] = dict(gguf_options(checkpoint))
    if checkpoint.gguf_file is not None and hasattr(transformers, "GgufConfig"):
        # Kept packed, blocks are multiplied by kernels that are fetched from a hub.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if method and device != "cpu":
        # Quantised modules cannot be moved afterwards.
        options["device_map"] = {"": device}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoint.location,
            config=config,
            dtype=wanted,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            # Told below, with the shapes; by itself it would raise and point at a logged table.
            ignore_mismatched_sizes=True,
            **options,
        )
        _check_complete(checkpoint.source, report)
        return model if "device_map" in options else model.to(device)
    except ModelLoadError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelLoadError(
            f"{checkpoint.source}: out of memory while loading the weights on {device}:"
            f" {in_words(available_bytes(torch.device(device)))} are left; choose a smaller model"
            f" or --dtype bfloat16 ({one_line(error)[:120]})"
        ) from error
    except ImportError as error:
        raise ModelLoadError(
            f"{checkpoint.source}: {_quantised_by(method)}needs a package that is not installed:"
            f" {one_line(error)}"
        ) from error
    except Exception as error:
        # Whatever else a checkpoint can be wrong in: one line.
        raise ModelLoadError(
            f"{checkpoint.source}: {_quantised_by(method)}cannot load the weights:"
            f" {one_line(error)}"
        ) from error


def quantization_method(config: Any) -> str | None:
    """Return the name of transformers' quantisation method that the checkpoint uses, if any."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    if isinstance(settings, Mapping):
        method = settings.get("quant_method")
    else:
        method = getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method) or "unnamed")


def _quantised_by(method: str | None) -> str:
    return f"quantised by {method}, " if method else ""


def _dtype_of(name: str, checkpoint: Checkpoint, device: str) -> torch.dtype | str:
    if name == "auto":
        if checkpoint.gguf_file is None or device == "cpu":
            return "auto"
        return torch.bfloat16
    if name not in _DTYPE_NAMES:
        raise ModelLoadError(
            f"--dtype {name}: expected auto, {', '.join(_DTYPE_NAMES[:-1])} or float64"
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _check_room(
    source: str, elements: Mapping[torch.dtype, int], dtype: torch.dtype | str | None, device: str
) -> None:
    """Refuse weights that cannot fit: a host that overcommits would be killed halfway."""
    if not elements:
        return
    fixed = dtype if isinstance(dtype, torch.dtype) else None
    num_bytes = sum(
        count * (own if fixed is None or own is torch.uint8 else fixed).itemsize
        for own, count in elements.items()
    )
    available = available_bytes(torch.device(device))
    if num_bytes > available:
        shown = "as stored" if fixed is None else f"as {str(fixed).removeprefix('torch.')}"
        raise ModelLoadError(
            f"{source}: the weights take {in_words(num_bytes)} {shown}, and"
            f" {in_words(available)} are available on {device}: choose a smaller model"
            " or --dtype bfloat16"
        )


def _check_complete(source: str, report: Mapping[str, Any]) -> None:
    """Refuse a model of which anything was drawn at random: it would answer, and answer rubbish."""
    if mismatched := sorted(report["mismatched_keys"]):
        name, found, wanted = mismatched[0]
        raise ModelLoadError(
            f"{source}: cannot load the weights: {name} is of shape {tuple(found)}, the"
            f" configuration wants {tuple(wanted)}{_and_more(mismatched)}"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadError(
            f"{source}: cannot load the weights: {missing[0]} is missing{_and_more(missing)}"
        )
    if errors := report["error_msgs"]:
        raise ModelLoadError(f"{source}: cannot load the weights: {' '.join(errors)[:300]}")


def _and_more(found: list[Any]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""
