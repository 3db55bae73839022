"""A device on trial: attention backends, tiny models and a large one, behind plain numbers.

Owns what a benchmark of a device needs of torch, so that whoever runs it (the controller) handles
names, runners and floats only. Must not plan a step or judge a result.
"""

from __future__ import annotations

import gc
import importlib.util
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import transformers

from engine.blocks import num_blocks_for
from engine.device.attention.base import (
    AttentionBackend,
    PagedStepContext,
    UnsupportedByBackendError,
)
from engine.device.attention.checks import Outcome, prove, run_cases
from engine.device.attention.flash_attn import FlashAttention
from engine.device.attention.reference import ReferenceAttention
from engine.device.attention.torch_varlen import TorchVarlenAttention
from engine.device.graphs import GraphRequest
from engine.device.inputs import build_inputs
from engine.device.kv_cache import PagedKvCache, num_blocks_within
from engine.device.model import DecoderModel
from engine.device.random_models import (
    TINY_FAMILIES,
    TINY_SHAPE,
    TINY_VOCAB_SIZE,
    Qwen2Shape,
    make_qwen2,
    make_tiny,
)
from engine.device.roofline import (
    MachineLimits,
    ModelWeight,
    measure_bandwidth,
    measure_multiply_adds,
    weigh_model,
    weigh_step,
)
from engine.device.runner import TorchRunner
from engine.device.timing import DeviceTimedRunner
from engine.request import Request
from engine.step import StepPlan, StepWork, WorkKind

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
# A margin below this between the two best logits counts as a tie in float32.
_TIE = 1e-3
_TINY_BLOCKS = 64
_CLOSENESS_CHUNK = 33
_NUM_DECODED = 8


def _flash_attn() -> AttentionBackend:
    if importlib.util.find_spec("flash_attn") is None:
        raise UnsupportedByBackendError("the flash-attn package is not installed")
    return FlashAttention()


BACKENDS: Mapping[str, Callable[[], AttentionBackend]] = {
    "flash_attn": _flash_attn,
    "torch_varlen": lambda: TorchVarlenAttention(is_paged=True),
    "torch_varlen (gathered)": lambda: TorchVarlenAttention(is_paged=False),
    "reference": ReferenceAttention,
}
"""Every way to attend, the fastest first; making one may raise UnsupportedByBackendError."""


class TrialRunner(NamedTuple):
    """A runner with the pool that it was made for; `graph_sizes` are what it has graphs of."""

    runner: TorchRunner
    block_size: int
    num_blocks: int
    graph_sizes: tuple[int, ...]
    graphs_off: str | None


Timed = DeviceTimedRunner
"""A runner that also keeps what the device itself took for each step."""


class Expected(NamedTuple):
    """A prompt, its greedy continuation by transformers, and how many choices were ties."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    num_ties: int


class Closeness(NamedTuple):
    """Logits in half precision against float32 arithmetic with the same weights.

    `error` is our largest difference and `peer_error` that of transformers' own half-precision run,
    both in standard deviations of the logits; `agreement` and `peer_agreement` are the shares of
    positions with the same best token.
    """

    error: float
    peer_error: float
    agreement: float
    peer_agreement: float


def is_there(device: str) -> bool:
    """Whether a device of that name can be used: cpu, cuda or cuda:N."""
    kind, _, index = device.partition(":")
    if kind == "cuda":
        return (index or "0").isdigit() and int(index or 0) < torch.cuda.device_count()
    return device == "cpu"


class DeviceTrial:
    """One device; `is_tiny` replaces the large model by a toy, for a dry run on a CPU."""

    def __init__(self, device: str, *, is_tiny: bool) -> None:
        self._device = torch.device(device)
        self._is_tiny = is_tiny
        self.is_cuda = self._device.type == "cuda"

    @property
    def families(self) -> tuple[str, ...]:
        """The tiny models' families."""
        return tuple(TINY_FAMILIES)

    @property
    def half_dtypes(self) -> tuple[str, ...]:
        """The dtypes in which backends are compared."""
        return ("bfloat16", "float16") if self.is_cuda else ("bfloat16",)

    def describe(self) -> dict[str, str | float | None]:
        """Return what the numbers depend on: the device, its memory and the versions."""
        facts: dict[str, str | float | None] = {
            "device": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        if self.is_cuda:
            facts["device"] = torch.cuda.get_device_name(self._device)
            free, total = torch.cuda.mem_get_info(self._device)
            facts["memory_gib"], facts["free_gib"] = total / 2**30, free / 2**30
            major, minor = torch.cuda.get_device_capability(self._device)
            facts["capability"] = f"{major}.{minor}"
        return facts

    def refusal(self, backend: str, dtype: str) -> str | None:
        """Return why a backend cannot run here at all, or None."""
        try:
            made = BACKENDS[backend]()
            made.check(made.default_block_size, _DTYPES[dtype], self._device)
        except UnsupportedByBackendError as error:
            return str(error)
        return None

    def conformance(self, backend: str, dtype: str) -> Iterator[Outcome]:
        """Run the conformance suite."""
        made = BACKENDS[backend]()
        yield from run_cases(made, self._device, _DTYPES[dtype], made.default_block_size)

    def timed(self, made: TrialRunner) -> Timed | None:
        """Return the runner with the device's own timing around it; None off CUDA."""
        return DeviceTimedRunner(made.runner, self._device) if self.is_cuda else None

    def tiny(self, family: str) -> TinyTrial:
        """Return one family in miniature."""
        return TinyTrial(family, self._device)

    def large(self) -> LargeTrial:
        """Make the large model on the device."""
        if self._is_tiny:
            return LargeTrial(TINY_SHAPE, torch.float32, self._device, 64 << 20)
        return LargeTrial(Qwen2Shape(), torch.bfloat16, self._device, None)


class TinyTrial:
    """A tiny random model: transformers' own run, and the same weights behind our engine."""

    def __init__(self, family: str, device: torch.device) -> None:
        self._family = family
        self._device = device

    def prompts(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """Return one random prompt per length."""
        generator = torch.Generator().manual_seed(len(lengths))
        draw = torch.randint
        return [
            tuple(draw(2, TINY_VOCAB_SIZE, (length,), generator=generator).tolist())
            for length in lengths
        ]

    @torch.inference_mode()
    def expected(self, prompts: Sequence[tuple[int, ...]], num_new: int) -> list[Expected]:
        """Return transformers' greedy continuations in float32."""
        reference = make_tiny(self._family, torch.float32, self._device)
        results = []
        for prompt in prompts:
            output = reference.generate(
                torch.tensor([prompt], device=self._device),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long, device=self._device),
                max_new_tokens=num_new,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            best = torch.cat(output.logits).topk(2, dim=-1).values
            ties = int((best[:, 0] - best[:, 1] < _TIE).sum())
            tokens = tuple(output.sequences[0, len(prompt) :].tolist())
            results.append(Expected(prompt, tokens, ties))
        return results

    def runner(self, backend: str, dtype: str, *, with_graphs: bool = False) -> TrialRunner:
        """Return a runner; UnsupportedByBackendError if the backend cannot serve the family."""
        served = DecoderModel(make_tiny(self._family, _DTYPES[dtype], self._device), self._family)
        made = BACKENDS[backend]()
        block_size = made.default_block_size
        made.check(block_size, served.dtype, served.device, served.layers)
        return _make_runner(served, made, _TINY_BLOCKS, block_size, 16, 512, with_graphs)

    @torch.inference_mode()
    def closeness(self, backend: str, dtype: str, lengths: Sequence[int]) -> Closeness:
        """Compare logits at every position of prompts that are computed in chunks, then one token
        at a time; UnsupportedByBackendError if the backend cannot serve the family.
        """
        half = _DTYPES[dtype]
        made = BACKENDS[backend]()
        served = DecoderModel(make_tiny(self._family, half, self._device), self._family)
        made.check(made.default_block_size, half, self._device, served.layers)
        peer = make_tiny(self._family, half, self._device)
        # The same rounded weights, so that only the arithmetic differs.
        exact = make_tiny(self._family, half, self._device).float()
        prompts = self.prompts(lengths)
        ours = torch.cat(_paged_logits(served, made, prompts))
        yardstick, theirs = (
            torch.cat(
                [m(torch.tensor([p], device=self._device)).logits[0].float() for p in prompts]
            )
            for m in (exact, peer)
        )
        spread = yardstick.std()
        best = yardstick.argmax(-1)

        def off(logits: torch.Tensor) -> tuple[float, float]:
            error = float((logits - yardstick).abs().max() / spread)
            return error, float((logits.argmax(-1) == best).double().mean())

        (error, agreement), (peer_error, peer_agreement) = off(ours), off(theirs)
        return Closeness(error, peer_error, agreement, peer_agreement)


class LargeTrial:
    """A model of a real size with random weights, and the machine's limit for its steps.

    `kv_bytes` bounds the pool (None = 80 % of what is left on the device).
    """

    def __init__(
        self, shape: Qwen2Shape, dtype: torch.dtype, device: torch.device, kv_bytes: int | None
    ) -> None:
        self.shape = shape
        self.dtype = str(dtype).removeprefix("torch.")
        self.vocab_size = shape.vocab_size
        self._device = device
        self._dtype = dtype
        self._kv_bytes = kv_bytes
        self._limits: MachineLimits | None = None
        self._model = make_qwen2(shape, dtype, device)
        self._weight: ModelWeight = weigh_model(self._model._model, self._model.layers)

    def measure(self) -> tuple[float, float]:
        """Measure the device: (bytes per second, multiply-adds per second)."""
        size = None if self._device.type == "cuda" else 32 << 20
        sizes = None if self._device.type == "cuda" else (256,)
        self._limits = MachineLimits(
            measure_bandwidth(self._device, self._dtype, num_bytes=size),
            measure_multiply_adds(self._device, self._dtype, sizes=sizes),
        )
        return self._limits.bytes_per_s, self._limits.multiply_adds_per_s

    def limit_s(self, work: Sequence[StepWork], num_sampled: int) -> float | None:
        """Return the least seconds that this step can take, None before `measure`."""
        if self._limits is None:
            return None
        return self._limits.limit_s(weigh_step(self._weight, work, num_sampled))

    def runner(
        self, backend: str, max_batch: int, max_context: int, *, with_graphs: bool
    ) -> TrialRunner:
        """Return a runner with as large a pool as fits, its backend proved on this model's layers.

        UnsupportedByBackendError if it cannot. The runner before it must be gone: pools are large.
        """
        made = BACKENDS[backend]()
        block_size = made.default_block_size
        made.check(block_size, self._dtype, self._device, self._model.layers)
        prove(made, self._device, self._dtype, block_size, self._model.layers)
        kv_bytes = self._kv_bytes
        if kv_bytes is None:
            # A runner and its graphs know each other: only the collector frees the last pool.
            gc.collect()
            torch.cuda.empty_cache()
            kv_bytes = int(torch.cuda.mem_get_info(self._device)[0] * 0.8)
        num_blocks = num_blocks_within(kv_bytes, self._model.layers, block_size, self._dtype)
        return _make_runner(
            self._model, made, num_blocks, block_size, max_batch, max_context, with_graphs
        )


def _make_runner(
    model: DecoderModel,
    backend: AttentionBackend,
    num_blocks: int,
    block_size: int,
    max_batch: int,
    max_context: int,
    with_graphs: bool,
) -> TrialRunner:
    runner = TorchRunner(
        model,
        backend,
        num_blocks,
        block_size,
        seed=0,
        graphs=GraphRequest(max_batch, max_context) if with_graphs else None,
    )
    return TrialRunner(runner, block_size, num_blocks, runner.graph_sizes, runner.graphs_off)


def _paged_logits(
    model: DecoderModel, backend: AttentionBackend, prompts: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Return float32 logits (length, vocab_size) per prompt through the paged cache: all prompts
    side by side, in chunks, the last tokens one by one as decodes are.
    """
    block_size = backend.default_block_size
    requests: dict[str, Request] = {}
    first = 0
    for index, prompt in enumerate(prompts):
        request = Request(f"r{index}", prompt, 1, 0.0)
        count = num_blocks_for(len(prompt), block_size)
        request.block_table = list(range(first, first + count))
        first += count
        requests[request.request_id] = request
    cache = PagedKvCache(model.layers, first, block_size, model.dtype, model.device)
    parts: dict[str, list[torch.Tensor]] = {request_id: [] for request_id in requests}
    while True:
        work = []
        for request_id, request in requests.items():
            left = request.num_prompt_tokens - request.num_computed_tokens
            size = min(_CLOSENESS_CHUNK, left - _NUM_DECODED) if left > _NUM_DECODED else 1
            if left:
                kind = WorkKind.PREFILL
                work.append(StepWork(request_id, kind, size, request.num_computed_tokens))
        if not work:
            return [torch.cat(pieces) for pieces in parts.values()]
        inputs = build_inputs(StepPlan(work=tuple(work)), requests, block_size, model.device)
        rows = torch.arange(inputs.num_tokens, device=model.device)
        context = PagedStepContext(inputs, cache, backend)
        logits = model.logits(inputs.input_ids, inputs.position_ids, rows, context).float()
        pieces = torch.split(logits, [item.num_tokens for item in work])
        for item, piece in zip(work, pieces, strict=True):
            parts[item.request_id].append(piece)
            requests[item.request_id].num_computed_tokens += item.num_tokens
