"""Where a model's files are and whether they are whole: one line of reason before anything is read.

Owns finding a checkpoint (a directory, one GGUF file, a hub id), its configuration and the check of
its safetensors headers. Must not build a model.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig

from engine.device.servable import ModelLoadError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_GGUF_MAGIC = b"GGUF"
# Longer than any header of a real file; a flipped length byte must not ask for terabytes.
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What transformers loads from: a directory or hub id, and the GGUF file in it, if it is one.

    `source` is what the operator typed.
    """

    source: str
    location: str
    gguf_file: str | None = None

    @property
    def folder(self) -> Path | None:
        """The local directory, None for a hub id."""
        path = Path(self.location)
        return path if path.is_dir() else None


def find_checkpoint(source: str) -> Checkpoint:
    """Return where `source` (a directory, a GGUF file, a hub id) is; ModelLoadError if nowhere."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _in_directory(source, path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelLoadError(
                f"{source}: expected a directory with config.json and safetensors, or a .gguf file"
            )
        return _gguf(source, path)
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or source.endswith(".gguf"):
        # Not a hub id either: no point in asking a hub for minutes.
        what = "file" if source.endswith(".gguf") else "directory"
        raise ModelLoadError(f"{source}: no such {what}")
    return Checkpoint(source, source)


def load_config(checkpoint: Checkpoint) -> Any:
    """Return transformers' configuration; ModelLoadError with the reason if it cannot be read."""
    source, folder = checkpoint.source, checkpoint.folder
    if folder is not None and checkpoint.gguf_file is None:
        _check_config_file(source, folder / "config.json")
    try:
        return AutoConfig.from_pretrained(
            checkpoint.location, trust_remote_code=False, **gguf_options(checkpoint)
        )
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise _needs_remote_code(source) from error
        raise ModelLoadError(
            f"{source}: cannot read the model's configuration: {one_line(error)}"
        ) from error


def gguf_options(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the keyword that transformers' loaders take for a GGUF file, nothing for others."""
    return {} if checkpoint.gguf_file is None else {"gguf_file": checkpoint.gguf_file}


def check_safetensors(checkpoint: Checkpoint) -> dict[torch.dtype, int]:
    """Read the headers of a local directory's safetensors; return the elements of each dtype.

    ModelLoadError on a missing shard, a header that makes no sense, a file that is shorter or
    longer than its header says. Empty where there is nothing local to check.
    """
    folder = checkpoint.folder
    elements: dict[torch.dtype, int] = {}
    if folder is None or checkpoint.gguf_file is not None:
        return elements
    for file in _shards(checkpoint.source, folder):
        for dtype, count in _read_header(checkpoint.source, file).items():
            elements[dtype] = elements.get(dtype, 0) + count
    return elements


def one_line(error: BaseException) -> str:
    """Return an exception's message without line breaks, at most 300 characters of it."""
    text = " ".join(str(error).split())
    return text[:300] if text else type(error).__name__


def _in_directory(source: str, path: Path) -> Checkpoint:
    ggufs = sorted(path.glob("*.gguf"))
    if not ggufs or any(path.glob("*.safetensors")) or (path / INDEX).is_file():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{source}: no config.json in this directory")
        return Checkpoint(source, str(path))
    if len(ggufs) > 1:
        names = ", ".join(file.name for file in ggufs)
        raise ModelLoadError(
            f"{source}: several GGUF files ({names}): name one, as in {path / ggufs[0].name}"
        )
    return _gguf(source, ggufs[0])


def _gguf(source: str, file: Path) -> Checkpoint:
    if _SPLIT_GGUF.search(file.name):
        raise ModelLoadError(
            f"{source}: {file.name} is one part of a split GGUF; merge the parts into one file"
        )
    with file.open("rb") as stream:
        if stream.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            raise ModelLoadError(f"{source}: {file.name} is not a GGUF file")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelLoadError(
            f"{source}: reading GGUF needs the package {' and '.join(missing)}:"
            f" pip install {' '.join(missing)}"
        )
    return Checkpoint(source, str(file.parent), file.name)


def _check_config_file(source: str, file: Path) -> None:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"{source}: cannot read the model's configuration: config.json is not JSON"
            f" ({one_line(error)})"
        ) from error
    if not isinstance(config, dict):
        raise ModelLoadError(
            f"{source}: cannot read the model's configuration: config.json must hold an object,"
            f" not a {type(config).__name__}"
        )
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if "auto_map" in config:
            raise _needs_remote_code(source)
        raise ModelLoadError(
            f"{source}: cannot read the model's configuration: model_type {kind!r} is unknown to"
            " transformers"
        )


def _needs_remote_code(source: str) -> ModelLoadError:
    return ModelLoadError(
        f"{source}: this checkpoint brings Python code of its own (auto_map), and code from a"
        " checkpoint is never run"
    )


def _shards(source: str, folder: Path) -> list[Path]:
    index = folder / INDEX
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not index.is_file():
        pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
        why = f"no {WEIGHTS} in this directory"
        if pickles:
            why = f"{pickles[0]} is a pickle, which can run code; convert it to safetensors"
        raise ModelLoadError(f"{source}: cannot load the weights: {why}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(
            f"{source}: cannot load the weights: {INDEX} is damaged ({one_line(error)})"
        ) from error
    if missing:
        raise ModelLoadError(
            f"{source}: cannot load the weights: {len(missing)} of {len(names)} shards are missing"
            f" ({missing[0]} first)"
        )
    return [folder / name for name in names]


def _read_header(source: str, file: Path) -> dict[torch.dtype, int]:
    """Return the elements of each dtype that a safetensors file holds.

    The format: eight bytes of length n (little-endian), n bytes of JSON, the tensors.
    """

    def damaged(why: str) -> ModelLoadError:
        return ModelLoadError(f"{source}: cannot load the weights: {file.name} is {why}")

    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or (length <= _MAX_HEADER_BYTES and 8 + length > size):
            raise damaged(f"truncated: {size:,} bytes, and its header alone is longer")
        if length > _MAX_HEADER_BYTES:
            raise damaged(f"damaged: its header claims {length:,} bytes")
        text = stream.read(length)
    try:
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        told = 8 + length + end
        elements = _count_elements(tensors)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(f"damaged: its header makes no sense ({one_line(error)})") from error
    if told != size:
        what = "truncated" if told > size else "damaged"
        raise damaged(f"{what}: {size:,} bytes, and its header speaks of {told:,}")
    return elements


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def _count_elements(tensors: Mapping[str, Mapping[str, Any]]) -> dict[torch.dtype, int]:
    """Return elements by dtype; what is not a float of torch's counts as bytes."""
    elements: dict[torch.dtype, int] = {}
    for entry in tensors.values():
        dtype = _DTYPES.get(entry["dtype"], torch.uint8)
        start, end = entry["data_offsets"]
        count = prod(entry["shape"]) if dtype is not torch.uint8 else end - start
        elements[dtype] = elements.get(dtype, 0) + count
    return elements
