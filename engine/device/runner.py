"""`TorchRunner`: one packed forward for the whole mixed batch, then sampling.

Owns the device side of a step: inputs, cache, model and sampler in one place. Must not change a
request or decide anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.device.attention.base import AttentionBackend, PagedStepContext
from engine.device.inputs import build_inputs
from engine.device.kv_cache import PagedKvCache
from engine.device.model import DecoderModel
from engine.device.sampler import Sampler
from engine.request import Request
from engine.step import StepOutput, StepPlan


class TorchRunner:
    """Implements `engine.ports.ModelRunner` on a torch device."""

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        num_blocks: int,
        block_size: int,
        seed: int | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        backend.check(block_size, model.dtype, model.device)
        self._model = model
        self._backend = backend
        self._cache = PagedKvCache(
            model.layers, num_blocks, block_size, model.dtype, model.device, num_host_blocks
        )
        self._sampler = Sampler(seed)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        """Run the step; returns once the sampled ids are on the host."""
        inputs = build_inputs(plan, requests, self._cache.block_size, self._model.device)
        logits = self._model.logits(
            inputs.input_ids,
            inputs.position_ids,
            inputs.sample_rows,
            PagedStepContext(inputs, self._cache, self._backend),
        )
        return StepOutput(self._sampler.sample(logits, [requests[i] for i in inputs.sample_ids]))

    @torch.inference_mode()
    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy pages to host memory; whatever is executed next may overwrite them."""
        self._cache.copy_out(blocks, host_blocks)

    @torch.inference_mode()
    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy pages back, before whatever is executed next."""
        self._cache.copy_in(host_blocks, blocks)

    def forget(self, request_id: str) -> None:
        """Drop the request's random generator."""
        self._sampler.forget(request_id)
