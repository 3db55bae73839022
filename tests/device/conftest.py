"""Tiny random models of real families, and a small engine to run them with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

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

VOCAB_SIZE = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**_COMMON))


def _qwen2() -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**_COMMON))


def _gemma3() -> Any:
    # The window is shorter than the prompts and no multiple of a block: both edges are crossed.
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_COMMON,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=11,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        )
    )


FAMILIES: dict[str, Callable[[], Any]] = {"llama": _llama, "qwen2": _qwen2, "gemma3": _gemma3}


@dataclass(frozen=True)
class TinyModel:
    """One family: the reference as transformers runs it, and the same weights behind our engine."""

    folder: Path
    reference: Any
    served: DecoderModel


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A tiny random model in float64, its head scaled so that greedy margins are wide."""
    torch.manual_seed(7)
    model = FAMILIES[request.param]().to(torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.35)
        model.lm_head.weight.mul_(20.0)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    return TinyModel(folder, reference, load_model(str(folder), "float64", "cpu"))


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
