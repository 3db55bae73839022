"""`--dtype`, and checkpoints that transformers quantises: they pass through, untouched by us."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from engine.device.linear import FewRowLinear, use_few_row_linear
from engine.device.loading import DeviceOptions, load_engine
from engine.device.model import DecoderModel, ModelLoadError, load_model
from engine.device.packed import PackedLinear
from tests.device.families import load_reference

pytestmark = pytest.mark.device


def quiet(done: int, total: int, description: str) -> None:
    """Progress that nobody watches."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_every_dtype_is_what_is_served(llama_folder: Path, dtype: str) -> None:
    engine = load_engine(str(llama_folder), DeviceOptions(device="cpu", dtype=dtype), quiet)
    assert engine.dtype == dtype
    assert engine.runner._cache.keys[0].dtype is getattr(torch, dtype)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64"])
def test_auto_is_the_checkpoints_own(llama_folder: Path, tmp_path: Path, stored: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=getattr(torch, stored))
    model.save_pretrained(tmp_path)
    assert load_model(str(tmp_path), "auto", "cpu").dtype is getattr(torch, stored)


def _log_probabilities(
    served: DecoderModel, prompt: list[int], make_engine: Any, make_request: Any
) -> dict[int, float]:
    """Return the twenty likeliest first tokens after the prompt, computed in chunks of seven."""
    engine = make_engine(served, 7)
    other = make_request("other", prompt[:9], 6)
    engine.run([other, make_request("r", prompt, 1, num_logprobs=20)], gap_steps=3)
    (token,) = (t for r in engine.recorder.reports for t in r.tokens if t.request_id == "r")
    return {top.token_id: top.logprob for top in token.top_logprobs}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "deepseek_v3", "gpt2"])
def test_half_precision_agrees_with_transformers(
    tiny_family: Callable[[str], Any],
    make_engine: Any,
    make_request: Any,
    make_prompt: Any,
    tmp_path: Path,
    name: str,
    dtype: str,
) -> None:
    # As wide as real models' heads are: the wide margins of the exactness tests would magnify the
    # rounding of hidden states by as much.
    exact = load_reference(tiny_family(name).folder)
    head = exact.get_output_embeddings().weight
    with torch.no_grad():
        head.mul_(0.2 / head.std())
    exact.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()
    prompt = make_prompt(29, 29)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        theirs = torch.log_softmax(half(ids).logits[0, -1].double(), dim=-1)
        true = torch.log_softmax(exact(ids).logits[0, -1], dim=-1)
    served = load_model(str(tmp_path), dtype, "cpu")
    assert served.dtype is getattr(torch, dtype)
    ours = _log_probabilities(served, prompt, make_engine, make_request)
    shown = torch.tensor(list(ours))
    values = torch.tensor(list(ours.values()), dtype=torch.float64)
    # Both round, each in its own order: ours may be as far from the truth as theirs is, and more
    # by an allowance for the luck of either.
    error_of_theirs = float((theirs - true).abs().max())
    error_of_ours = float((values - true[shown]).abs().max())
    assert error_of_ours < 3 * error_of_theirs + 0.02
    assert float((values - theirs[shown]).abs().max()) < 4 * error_of_theirs + 0.02


def _edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.fixture
def eager() -> Iterator[None]:
    """What would be compiled runs as it is written: the numbers are the same, seconds sooner."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def ternary(llama_copy: Path) -> Path:
    """The tiny Llama with its projections as BitNet stores them: four 2-bit fields in a byte."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, tensor in load_file(llama_copy / "model.safetensors").items():
        weights[name] = tensor
        if "_proj" in name:
            rows, columns = tensor.shape
            fields = torch.randint(0, 3, (4, rows // 4, columns), generator=generator)
            packed = sum(fields[i] << (2 * i) for i in range(4))
            weights[name] = torch.as_tensor(packed).to(torch.uint8)
            weights[name.replace("weight", "weight_scale")] = torch.tensor([8.0])
    save_file(weights, llama_copy / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}
    _edit(llama_copy, quantization_config=settings, dtype="float32")
    return llama_copy


# transformers' integration of this method asks torch to compile.
@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
@pytest.mark.usefixtures("eager")
def test_a_quantised_checkpoint_is_served_as_transformers_runs_it(
    ternary: Path, make_engine: Any, make_request: Any
) -> None:
    served = load_model(str(ternary), "auto", "cpu")
    kinds = [type(module).__name__ for module in served._model.modules()]
    assert kinds.count("BitLinear") == 14
    # The head is an ordinary matrix, and takes a fast path that the others must not.
    assert isinstance(served._model.get_output_embeddings(), (FewRowLinear, PackedLinear))
    assert kinds.count("FewRowLinear") + kinds.count("PackedLinear") == 1
    reference = AutoModelForCausalLM.from_pretrained(ternary, attn_implementation="eager").eval()
    prompt = [5, 17, 9, 30, 8, 21, 33, 12, 4, 28]
    with torch.no_grad():
        logits = reference(torch.tensor([prompt])).logits[0, -1].double()
    theirs = torch.log_softmax(logits, dim=-1)
    for token_id, logprob in _log_probabilities(served, prompt, make_engine, make_request).items():
        assert logprob == pytest.approx(float(theirs[token_id]), abs=1e-5)


class _Packed(torch.Tensor):
    """Stands for a quantised tensor: a subclass that claims to be a float32 matrix."""


def test_few_row_products_leave_quantised_weights_alone() -> None:
    plain, packed, frozen = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    packed.weight = nn.Parameter(torch.randn(8, 8).as_subclass(_Packed), requires_grad=False)
    frozen.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    assert use_few_row_linear(nn.Sequential(plain, packed, frozen)) == 1
    assert [type(m) for m in (plain, packed, frozen)] == [FewRowLinear, nn.Linear, nn.Linear]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "pip install -U bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "pip install compressed-tensors"),
        ({"quant_method": "quanto", "weights": "int8"}, "pip install optimum-quanto"),
    ],
)
def test_a_missing_package_is_named(
    llama_copy: Path, settings: dict[str, Any], reason: str
) -> None:
    _edit(llama_copy, quantization_config=settings)
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(llama_copy), "auto", "cpu")
    text = str(caught.value)
    assert f"quantised by {settings['quant_method']}, needs a package" in text
    assert reason in text
    assert "\n" not in text


def test_an_unknown_method_is_refused(llama_copy: Path) -> None:
    _edit(llama_copy, quantization_config={"quant_method": "magic"})
    with pytest.raises(ModelLoadError, match="quantised by magic, which transformers does not"):
        load_model(str(llama_copy), "auto", "cpu")
