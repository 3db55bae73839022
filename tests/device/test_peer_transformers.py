"""The peer's process: what it forwards, and that it generates what transformers generates."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from controller.bench.peers_contestants import PEER_SETTINGS
from engine.device import peer_transformers
from engine.device.json_lines import LineWriter
from engine.device.peer_transformers import SETTINGS, Forwarder, PeerSettings, serve
from tests.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.device


class Lines(io.StringIO):
    """Output that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def write(self, text: str) -> int:
        with self.changed:
            self.changed.notify_all()
            return super().write(text)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]

    def wait_for(self, kind: str, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(
                lambda: sum(e["event"] == kind for e in self.events()) >= count, timeout=60
            )


def output(name: str, tokens: list[int], *, done: bool = False, error: str | None = None) -> Any:
    return SimpleNamespace(
        request_id=name,
        generated_tokens=tokens,
        prompt_ids=[1, 2, 3],
        error=error,
        is_finished=lambda: done,
    )


def test_cumulative_outputs_become_new_tokens() -> None:
    lines = Lines()
    forwarder = Forwarder(None, LineWriter(lines), None)
    for item in (
        output("a", [7]),
        output("b", [7, 8]),
        output("a", [7]),
        output("a", [7, 8, 9], done=True),
        # The same name again starts from nothing.
        output("a", [7], done=True),
        output("b", [7, 8], error="out of blocks"),
    ):
        forwarder.forward(item)
    end = {"event": "finished", "name": "a", "num_prompt_tokens": 3, "text": None}
    assert lines.events() == [
        {"event": "tokens", "name": "a", "num_tokens": 1},
        {"event": "tokens", "name": "b", "num_tokens": 2},
        {"event": "tokens", "name": "a", "num_tokens": 2},
        {**end, "num_output_tokens": 3},
        {"event": "tokens", "name": "a", "num_tokens": 1},
        {**end, "num_output_tokens": 1},
        {"event": "failed", "name": "b", "error": "out of blocks"},
    ]


def test_a_dead_generation_thread_is_fatal() -> None:
    lines = Lines()
    manager = SimpleNamespace(
        get_result=lambda timeout: None,
        background_thread_status=SimpleNamespace(fatal_error=MemoryError("8 GiB")),
        is_running=lambda: True,
    )
    Forwarder(manager, LineWriter(lines), None).run()
    assert lines.events() == [{"event": "fatal", "error": "MemoryError: 8 GiB"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peer")
    save_tiny_llama(path, num_words=92, vocab_size=96, max_len=256)
    return path


@pytest.mark.parametrize("attention", ["sdpa", "paged|eager"])
def test_it_generates_what_transformers_generates(folder: Path, attention: str) -> None:
    prompts = {f"r{i}": list(range(5 + i, 25 + 2 * i)) for i in range(3)}
    lines = Lines()

    def commands() -> Iterator[str]:
        for name, prompt in prompts.items():
            yield json.dumps({"name": name, "prompt": prompt, "max_tokens": 6})
        lines.wait_for("finished", len(prompts))

    settings = PeerSettings(attention=attention, max_batch_tokens=64, page_size=16, num_blocks=32)
    serve(str(folder), settings, "float32", "cpu", commands(), LineWriter(lines))
    events = lines.events()
    assert events[0]["event"] == "ready"
    assert events[0]["attention"] == attention
    assert events[0]["max_batch_tokens"] == 64
    assert not events[0]["is_compiled"]

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    finished = {e["name"]: e for e in events if e["event"] == "finished"}
    for name, prompt in prompts.items():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=-1
        )
        whole = tokenizer.decode(ids[0], skip_special_tokens=True)
        event = finished[name]
        assert whole.endswith(event["text"])
        assert len(event["text"].split()) == event["num_output_tokens"] == 6
        assert event["num_prompt_tokens"] == len(prompt)
        counted = [e["num_tokens"] for e in events if e["event"] == "tokens" and e["name"] == name]
        assert sum(counted) == 6


def test_the_names_of_its_settings_are_those_that_the_benchmark_knows() -> None:
    assert tuple(SETTINGS) == PEER_SETTINGS


def test_what_cannot_be_loaded_is_one_fatal_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    monkeypatch.setattr(peer_transformers, "claim_stdout", lambda: LineWriter(lines))
    assert peer_transformers.main(["./no-such-model"]) == 1
    (event,) = lines.events()
    assert event["event"] == "fatal"
    assert "no-such-model" in event["error"]
