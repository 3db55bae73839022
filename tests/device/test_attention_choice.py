"""Which backend is chosen, and every limit that a backend names when it refuses."""

from __future__ import annotations

import logging
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.device.attention import choice, torch_varlen
from engine.device.attention.base import AttentionBackend, UnsupportedByBackendError
from engine.device.attention.choice import choose_backend
from engine.device.attention.flash_attn import FlashAttention
from engine.device.attention.reference import ReferenceAttention
from engine.device.attention.torch_varlen import TorchVarlenAttention, find_kernel, takes_pages
from engine.device.kv_cache import LayerGeometry
from tests.device.attention_doubles import FlashAttnDouble, VarlenDouble

pytestmark = pytest.mark.device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LAYER = LayerGeometry(num_kv_heads=2, key_dim=64, value_dim=64, num_heads=4)
HALF = torch.bfloat16


class Rig:
    """A machine with CUDA as far as choosing goes: proofs are recorded, or refused by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, has_flash_attn: bool = True) -> None:
        self.proved: list[str] = []
        self.broken: set[str] = set()
        self.kernel: Any = VarlenDouble()
        monkeypatch.setattr(choice, "has_flash_attn", lambda: has_flash_attn)
        monkeypatch.setattr(choice, "_flash_attn", lambda: FlashAttention(FlashAttnDouble()))
        monkeypatch.setattr(choice, "prove", self.prove)
        monkeypatch.setattr(torch_varlen, "find_kernel", lambda: self.kernel)

    def prove(self, backend: AttentionBackend, *rest: Any) -> None:
        label = backend.name
        if isinstance(backend, TorchVarlenAttention) and not backend.is_paged:
            label = "gathered"
        self.proved.append(label)
        if label in self.broken:
            raise UnsupportedByBackendError(f"{label} does not work here")


def chosen(
    name: str = "auto",
    block_size: int | None = None,
    dtype: torch.dtype = HALF,
    layer: LayerGeometry = LAYER,
) -> tuple[str, int]:
    backend, size = choose_backend(name, block_size, dtype, CUDA, (layer, LAYER))
    return backend.name, size


def test_flash_attn_comes_first_with_the_block_size_that_it_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch)
    assert chosen() == ("flash_attn", 256)
    assert rig.proved == ["flash_attn"]


def test_without_the_package_torchs_own_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, has_flash_attn=False)
    assert chosen() == ("torch_varlen", 256)
    assert rig.proved == ["torch_varlen"]


def test_small_blocks_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    assert chosen(block_size=16) == ("torch_varlen", 16)
    assert rig.proved == ["gathered"]
    backend, _ = choose_backend("torch_varlen", 16, HALF, CUDA, (LAYER,))
    assert not backend.is_capturable


def test_whoever_fails_its_proof_is_passed_over_and_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(monkeypatch)
    rig.broken = {"flash_attn", "torch_varlen"}
    with caplog.at_level(logging.INFO, logger="paceline"):
        assert chosen() == ("torch_varlen", 16)
    assert rig.proved == ["flash_attn", "torch_varlen", "gathered"]
    assert [m.count("does not work here") for m in caplog.messages] == [1, 1]
    rig.broken.add("gathered")
    assert chosen() == ("reference", 16)


@pytest.mark.parametrize(
    ("has_flash_attn", "dtype", "layer", "expected"),
    [
        (True, torch.float32, LAYER, "reference"),
        (True, torch.float64, LAYER, "reference"),
        (True, torch.float16, LAYER, "flash_attn"),
        (True, HALF, replace(LAYER, softcap=30.0), "flash_attn"),
        (False, HALF, replace(LAYER, softcap=30.0), "reference"),
        (True, HALF, replace(LAYER, value_dim=32), "reference"),
        (True, HALF, replace(LAYER, key_dim=264, value_dim=264), "reference"),
        (True, HALF, replace(LAYER, sliding_window=4096), "flash_attn"),
    ],
)
def test_auto_falls_through_to_what_can_serve_the_layers(
    monkeypatch: pytest.MonkeyPatch,
    has_flash_attn: bool,
    dtype: torch.dtype,
    layer: LayerGeometry,
    expected: str,
) -> None:
    Rig(monkeypatch, has_flash_attn)
    assert chosen(dtype=dtype, layer=layer)[0] == expected


@pytest.mark.parametrize(
    ("name", "block_size", "dtype", "layer", "words"),
    [
        ("flash_attn", 16, HALF, LAYER, "--block-size 16.*256"),
        ("flash_attn", None, torch.float32, LAYER, "not float32.*--dtype bfloat16"),
        ("torch_varlen", None, torch.float32, LAYER, "torch_varlen.*--dtype bfloat16"),
        ("torch_varlen", None, HALF, replace(LAYER, softcap=50.0), "layer 0: it soft-caps.*50"),
        ("flash_attn", None, HALF, replace(LAYER, value_dim=32), "values are 32 wide, keys 64"),
        ("flash_attn", None, HALF, replace(LAYER, key_dim=512, value_dim=512), "at most 256"),
        ("flash_attn", None, HALF, replace(LAYER, key_dim=12, value_dim=12), "no multiple of 8"),
        ("flash_attn", None, HALF, replace(LAYER, num_heads=5), "5 query heads"),
        ("xformers", None, HALF, LAYER, "expected one of auto, flash_attn"),
    ],
)
def test_a_named_backend_that_cannot_says_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    block_size: int | None,
    dtype: torch.dtype,
    layer: LayerGeometry,
    words: str,
) -> None:
    Rig(monkeypatch)
    with pytest.raises(UnsupportedByBackendError, match=words) as caught:
        chosen(name, block_size, dtype, layer)
    assert "--" in str(caught.value)


def test_a_named_backend_that_fails_its_proof_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Rig(monkeypatch).broken = {"flash_attn"}
    with pytest.raises(UnsupportedByBackendError, match="does not work here"):
        chosen("flash_attn")


def test_a_package_that_cannot_be_imported_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    monkeypatch.setattr(choice, "_flash_attn", FlashAttention)
    # As a wheel for another torch: found, but not to be imported.
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    assert chosen() == ("torch_varlen", 256)
    assert rig.proved == ["torch_varlen"]
    with pytest.raises(UnsupportedByBackendError, match="cannot be used with torch") as caught:
        chosen("flash_attn")
    assert "use --attention-backend torch_varlen" in str(caught.value)


def test_on_a_cpu_there_is_one() -> None:
    assert choose_backend("auto", None, HALF, CPU, (LAYER,))[1] == 16
    backend, size = choose_backend("reference", 5, HALF, CPU, (LAYER,))
    assert (backend.name, size) == ("reference", 5)
    assert isinstance(backend, ReferenceAttention)
    with pytest.raises(UnsupportedByBackendError, match="needs a CUDA device, not cpu"):
        choose_backend("torch_varlen", None, HALF, CPU, (LAYER,))
    with pytest.raises(UnsupportedByBackendError, match=r"pip install 'paceline\[cuda\]'"):
        choose_backend("flash_attn", None, HALF, CPU, (LAYER,))


def old_kernel(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any, *,
    scale: Any = None, window_size: Any = (-1, -1), enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """The signature before pages could be read."""


def older_kernel(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any,
    is_causal: bool = False,
) -> Any:  # fmt: skip
    """The signature before windows."""


def test_this_torchs_kernel_takes_pages() -> None:
    kernel = find_kernel()
    assert kernel is not None
    assert takes_pages(kernel)


def test_an_older_kernel_is_used_by_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, has_flash_attn=False)
    rig.kernel = old_kernel
    assert chosen() == ("torch_varlen", 16)
    with pytest.raises(UnsupportedByBackendError, match="takes no block_table"):
        TorchVarlenAttention(is_paged=True)


def test_a_kernel_without_windows_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", older_kernel)
    assert find_kernel() is None
    with pytest.raises(UnsupportedByBackendError, match="has no varlen_attn"):
        TorchVarlenAttention()


def test_a_torch_without_the_module_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    assert find_kernel() is None
