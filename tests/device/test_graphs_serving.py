"""A server's steps through graphs and through the doubles of the kernels, end to end.

Tokens must be those of the reference without graphs, whatever the schedule and the sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.blocks import BlockPool
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.device.attention.base import AttentionBackend, UnsupportedByBackendError
from engine.device.attention.reference import ReferenceAttention
from engine.device.graphs import GraphRequest
from engine.device.model import DecoderModel
from engine.device.runner import TorchRunner
from engine.loop import EngineLoop
from engine.request import FinishReason, Request, SamplingParams
from tests.device.attention_doubles import FlashAttentionOnCpu, TorchVarlenOnCpu
from tests.device.conftest import ChunkPlanner
from tests.device.families import build
from tests.device.graph_double import EagerRecorder

pytestmark = pytest.mark.device

NUM_BLOCKS = 96
BLOCK_SIZE = 4
MAX_CONTEXT = 128

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "flash_attn": FlashAttentionOnCpu,
    "torch_varlen": lambda: TorchVarlenOnCpu(is_paged=True),
    "torch_varlen, gathered": lambda: TorchVarlenOnCpu(is_paged=False),
    "reference": ReferenceAttention,
}


def make_runner(
    model: DecoderModel, backend: AttentionBackend, graphs: GraphRequest | None
) -> TorchRunner:
    return TorchRunner(model, backend, NUM_BLOCKS, BLOCK_SIZE, seed=0, graphs=graphs)


def serve(
    runner: TorchRunner, requests: Sequence[Request], chunk: int | None = None, gap_steps: int = 1
) -> list[list[int]]:
    """Run the requests, arriving `gap_steps` steps apart, and return their tokens."""
    loop = EngineLoop(
        ChunkPlanner(chunk),
        runner,
        BlockPool(NUM_BLOCKS, BLOCK_SIZE),
        EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_CONTEXT,
            is_prefix_cache_enabled=False,
        ),
        VirtualClock(),
    )
    for request in requests:
        loop.submit(request)
        for _ in range(gap_steps):
            loop.step()
    while loop.step() is not None:
        pass
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * len(requests)
    return [request.output_token_ids for request in requests]


def make_requests(make_prompt: Any) -> list[Request]:
    """Greedy and sampled ones, penalties and log-probabilities: all sees a replay's logits."""
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=3, top_p=0.9),
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, num_logprobs=3),
        SamplingParams(temperature=1.2, seed=-5, logit_bias=((4, 3.0),)),
        SamplingParams(),
    ]
    return [
        Request(f"r{i}", tuple(make_prompt(i, length)), 9, 0.0, sampling)
        for i, (length, sampling) in enumerate(zip((1, 5, 17, 33, 12), params, strict=True))
    ]


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("name", ["flash_attn", "torch_varlen"])
def test_tokens_are_those_of_a_run_without_graphs(
    tiny: Any, make_prompt: Any, name: str, chunk: int | None
) -> None:
    expected = serve(
        make_runner(tiny.served, ReferenceAttention(), None), make_requests(make_prompt), chunk
    )
    recorder = EagerRecorder()
    runner = make_runner(tiny.served, BACKENDS[name](), GraphRequest(4, MAX_CONTEXT, recorder))
    assert runner.graph_sizes == (1, 2, 4)
    assert runner.graphs_off is None
    num_proofs = recorder.num_replays
    assert serve(runner, make_requests(make_prompt), chunk) == expected
    assert runner.num_graph_replays == recorder.num_replays - num_proofs > 0


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("name", ["flash_attn", "torch_varlen", "torch_varlen, gathered"])
def test_tokens_through_the_kernels_doubles(
    tiny: Any, make_prompt: Any, name: str, chunk: int | None
) -> None:
    expected = serve(
        make_runner(tiny.served, ReferenceAttention(), None), make_requests(make_prompt), chunk
    )
    assert len({token for tokens in expected for token in tokens}) > 10
    backend: Any = BACKENDS[name]()
    assert serve(make_runner(tiny.served, backend, None), make_requests(make_prompt), chunk) == (
        expected
    )
    assert backend.double.num_calls > 0


def test_every_batch_size_up_to_the_largest_and_beyond(tiny: Any, make_prompt: Any) -> None:
    def requests() -> list[Request]:
        return [Request(f"r{i}", tuple(make_prompt(i, 3 + i)), 6, 0.0) for i in range(10)]

    expected = serve(make_runner(tiny.served, ReferenceAttention(), None), requests())
    recorder = EagerRecorder()
    runner = make_runner(
        tiny.served, TorchVarlenOnCpu(is_paged=True), GraphRequest(5, MAX_CONTEXT, recorder)
    )
    assert runner.graph_sizes == (1, 2, 4, 5)
    for gap_steps in (0, 1, 2):
        assert serve(runner, requests(), gap_steps=gap_steps) == expected


def test_a_middle_chunk_of_one_token_samples_nothing(tiny: Any, make_prompt: Any) -> None:
    # Such a step has the shape of a decode and is replayed, but wants no logits of that row.
    requests = [Request("a", tuple(make_prompt(1, 9)), 3, 0.0)]
    expected = serve(make_runner(tiny.served, ReferenceAttention(), None), requests)
    runner = make_runner(
        tiny.served, FlashAttentionOnCpu(), GraphRequest(4, MAX_CONTEXT, EagerRecorder())
    )
    again = [Request("a", tuple(make_prompt(1, 9)), 3, 0.0)]
    assert serve(runner, again, chunk=1) == expected
    assert runner.num_graph_replays == 9 + 2


def test_contexts_beyond_the_graphs_run_without(tiny: Any, make_prompt: Any) -> None:
    def requests() -> list[Request]:
        return [Request(f"r{i}", tuple(make_prompt(i, 18)), 12, 0.0) for i in range(3)]

    expected = serve(make_runner(tiny.served, ReferenceAttention(), None), requests())
    runner = make_runner(tiny.served, FlashAttentionOnCpu(), GraphRequest(4, 24, EagerRecorder()))
    assert serve(runner, requests(), gap_steps=0) == expected
    assert 0 < runner.num_graph_replays < 11


@pytest.mark.parametrize("name", ["reference", "torch_varlen, gathered"])
def test_a_backend_that_reads_lengths_on_the_host_has_no_graphs(
    tiny: Any, make_prompt: Any, name: str
) -> None:
    recorder = EagerRecorder()
    runner = make_runner(tiny.served, BACKENDS[name](), GraphRequest(4, MAX_CONTEXT, recorder))
    assert runner.graph_sizes == ()
    assert runner.graphs_off is not None
    assert "cannot be recorded" in runner.graphs_off
    assert recorder.num_recorded == 0
    serve(runner, make_requests(make_prompt))
    assert runner.num_graph_replays == 0


def test_no_cuda_graphs_without_cuda(tiny: Any) -> None:
    runner = make_runner(tiny.served, FlashAttentionOnCpu(), GraphRequest(4, MAX_CONTEXT))
    assert runner.graphs_off == "no CUDA graphs on cpu"


def test_padding_leaves_every_block_of_the_pool_alone(tiny: Any, make_prompt: Any) -> None:
    runner = make_runner(
        tiny.served, FlashAttentionOnCpu(), GraphRequest(8, MAX_CONTEXT, EagerRecorder())
    )
    cache = runner._cache
    assert cache.num_blocks == NUM_BLOCKS + 1
    for keys in cache.keys:
        assert not keys[:NUM_BLOCKS].any()
        assert keys[NUM_BLOCKS].any()
    serve(runner, make_requests(make_prompt))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "mixtral", "gpt_neox"])
def test_families_through_kernels_and_graphs(family: str, make_prompt: Any) -> None:
    # Windows in every layer, soft-caps beside windows, experts, partial rotary positions.
    served = DecoderModel(build(family), family)
    expected = serve(make_runner(served, ReferenceAttention(), None), make_requests(make_prompt), 7)
    assert len({token for tokens in expected for token in tokens}) > 10
    graphs = GraphRequest(4, MAX_CONTEXT, EagerRecorder())
    runner = make_runner(served, FlashAttentionOnCpu(), graphs)
    assert serve(runner, make_requests(make_prompt), 7) == expected
    assert runner.num_graph_replays > 0
    if family == "gemma2":
        with pytest.raises(UnsupportedByBackendError, match="soft-caps"):
            make_runner(served, TorchVarlenOnCpu(is_paged=True), None)
    else:
        runner = make_runner(served, TorchVarlenOnCpu(is_paged=True), None)
        assert serve(runner, make_requests(make_prompt), 7) == expected
