"""Tiny random models of real families, and a small engine to run them with."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.blocks import BlockPool
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.device.attention.reference import ReferenceAttention
from engine.device.model import DecoderModel, load_model
from engine.device.runner import TorchRunner
from engine.loop import EngineLoop
from engine.ports import EngineView
from engine.request import Request, SamplingParams
from engine.step import Admission, AdmissionAction, StepPlan, StepReport, StepWork, WorkKind
from tests.device.families import (
    CORE_FAMILIES,
    LENGTHS,
    VOCAB_SIZE,
    Continuation,
    build,
    generate,
    load_reference,
)
from tests.tiny_llama import save_tiny_llama


@dataclass(frozen=True)
class TinyModel:
    """One family: the reference as transformers runs it, and the same weights behind our engine."""

    name: str
    folder: Path
    reference: Any
    served: DecoderModel


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny products gain nothing from threads, and lose much where other work keeps cores busy."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Return a factory: name of a family -> its tiny random model in float64, made once."""
    transformers.utils.logging.disable_progress_bar()

    @functools.cache
    def make(name: str) -> TinyModel:
        folder = tmp_path_factory.mktemp(name)
        build(name).save_pretrained(folder)
        return TinyModel(
            name, folder, load_reference(folder), load_model(str(folder), "float64", "cpu")
        )

    return make


@pytest.fixture(scope="session", params=CORE_FAMILIES)
def tiny(request: pytest.FixtureRequest, tiny_family: Callable[[str], TinyModel]) -> TinyModel:
    """One of the few families that schedules are tested on."""
    return tiny_family(request.param)


@pytest.fixture(scope="session")
def continuations(
    tiny_family: Callable[[str], TinyModel], make_prompt: Callable[..., list[int]]
) -> Callable[[str], dict[int, Continuation]]:
    """Return a factory: name of a family -> its greedy continuations by prompt length, made once.

    Fails where they would prove nothing: ties, or a model that says the same few tokens.
    """

    @functools.cache
    def make(name: str) -> dict[int, Continuation]:
        reference = tiny_family(name).reference
        table = {length: generate(reference, make_prompt(length, length)) for length in LENGTHS}
        num_ties = sum(item.num_ties for item in table.values())
        num_choices = sum(len(item.tokens) for item in table.values())
        print(f"{name}: {num_ties} ties in {num_choices} choices")  # noqa: T201 - for a reader of -s
        assert num_ties == 0
        assert len({token for item in table.values() for token in item.tokens}) > 10
        return table

    return make


@dataclass
class ChunkPlanner:
    """A double: everyone is admitted; decodes first, then every prompt in chunks of `chunk`."""

    chunk: int | None = None

    def plan(self, view: EngineView) -> StepPlan:
        work = []
        budget = view.max_num_batched_tokens
        unfinished = [*view.running, *view.preempted, *view.waiting]
        for request in sorted(unfinished, key=lambda r: not r.is_decoding):
            num_tokens = min(request.num_remaining_tokens, self.chunk or 10**9, budget)
            budget -= num_tokens
            if num_tokens:
                kind = WorkKind.DECODE if request.is_decoding else WorkKind.PREFILL
                work.append(
                    StepWork(request.request_id, kind, num_tokens, request.num_computed_tokens)
                )
        admissions = tuple(
            Admission(request.request_id, AdmissionAction.ADMIT, "admitted")
            for request in view.waiting
        )
        return StepPlan(work=tuple(work), admissions=admissions)


class Recorder:
    """A listener that keeps every report."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        self.reports.append(report)


@dataclass
class SmallEngine:
    """A loop over a real runner, driven by hand."""

    loop: EngineLoop
    pool: BlockPool
    recorder: Recorder

    def run(self, requests: Sequence[Request], gap_steps: int = 0) -> None:
        """Submit the requests `gap_steps` steps apart and run until all have ended."""
        for request in requests:
            self.loop.submit(request)
            for _ in range(gap_steps):
                self.loop.step()
        for _ in itertools.count():
            if self.loop.step() is None:
                return


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., SmallEngine]:
    """Return a factory: (model, chunk, block_size, num_blocks) -> SmallEngine."""

    def make(
        model: DecoderModel,
        chunk: int | None = None,
        *,
        block_size: int = 4,
        num_blocks: int = 256,
        planner: Any = None,
    ) -> SmallEngine:
        pool = BlockPool(num_blocks, block_size)
        recorder = Recorder()
        loop = EngineLoop(
            planner or ChunkPlanner(chunk),
            TorchRunner(model, ReferenceAttention(), num_blocks, block_size, seed=0),
            pool,
            EngineConfig(block_size=block_size, num_blocks=num_blocks, max_model_len=512),
            VirtualClock(),
            (recorder,),
        )
        return SmallEngine(loop, pool, recorder)

    return make


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a word tokenizer, as any local directory would hold it."""
    path = tmp_path_factory.mktemp("llama-with-tokenizer")
    save_tiny_llama(path, num_words=30, vocab_size=40, max_len=128)
    return path


@pytest.fixture
def llama_copy(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may break."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


@pytest.fixture(scope="session")
def make_request() -> Callable[..., Request]:
    """Return a factory: (id, prompt, max_tokens, **sampling) -> Request."""

    def make(request_id: str, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> Request:
        return Request(request_id, tuple(prompt), max_tokens, 0.0, SamplingParams(**sampling))

    return make


@pytest.fixture(scope="session")
def make_prompt() -> Callable[[int, int], list[int]]:
    """Return a factory of random prompts: (seed, length) -> token ids."""

    def make(seed: int, length: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()

    return make
