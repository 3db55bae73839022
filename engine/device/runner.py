"""`TorchRunner`: one packed forward for the whole mixed batch, then sampling and scores.

Owns the device side of a step: inputs, cache, model and sampler in one place. Must not change a
request or decide anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.device.attention.base import AttentionBackend, PagedStepContext
from engine.device.failures import explained
from engine.device.inputs import InputBuilder, StepInputs
from engine.device.kv_cache import PagedKvCache
from engine.device.model import DecoderModel
from engine.device.sampler import NOT_FINITE, Sampler
from engine.device.scores import prompt_scores, score_rows
from engine.device.transfer import to_host
from engine.request import Request
from engine.step import SampledToken, StepOutput, StepPlan


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
        self._inputs = InputBuilder(block_size, model.device, model.vocab_size)
        self._sampler = Sampler(seed)

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        """Run the step; returns once its results are on the host.

        DeviceLostError where no step can run any more, StepMemoryError where a smaller one may.
        """
        num_tokens = plan.num_prefill_tokens + plan.num_decode_tokens
        with explained(self._model.device, f"{num_tokens} tokens of {len(plan.work)} requests"):
            return self._execute(plan, requests)

    @torch.inference_mode()
    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy pages to host memory; whatever is executed next may overwrite them."""
        with explained(self._model.device, f"{len(blocks)} swapped blocks"):
            self._cache.copy_out(blocks, host_blocks)

    @torch.inference_mode()
    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy pages back, before whatever is executed next."""
        with explained(self._model.device, f"{len(blocks)} swapped blocks"):
            self._cache.copy_in(host_blocks, blocks)

    def forget(self, request_id: str) -> None:
        """Drop what is cached of a request."""
        self._inputs.forget(request_id)
        self._sampler.forget(request_id)

    @torch.inference_mode()
    def _execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        inputs = self._inputs.build(plan, requests)
        logits = self._model.logits(
            inputs.input_ids,
            inputs.position_ids,
            inputs.logit_rows,
            PagedStepContext(inputs, self._cache, self._backend),
        )
        num_sampled = len(inputs.sample_ids)
        # Scores first: sampling may change the logits of its own rows, not of these.
        scores = self._score(logits[num_sampled:], inputs, requests)
        sampled = [requests[request_id] for request_id in inputs.sample_ids]
        pending = self._sampler.start(logits[:num_sampled], sampled)
        fetched = pending.tensors
        arrays = to_host([*fetched, *scores], self._model.device)
        tokens = self._sampler.finish(pending, arrays[: len(fetched)])
        if not scores:
            return StepOutput(tokens)
        scored, unsound = prompt_scores(inputs.score_spans, arrays[len(fetched) :], requests)
        if unsound:
            tokens = [token for token in tokens if token.request_id not in unsound]
            tokens += [SampledToken(i, 0, failure=NOT_FINITE) for i in unsound]
        return StepOutput(tokens, scored)

    def _score(
        self, logits: torch.Tensor, inputs: StepInputs, requests: Mapping[str, Request]
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the prompt's scores, none where no request asks."""
        if not inputs.score_spans:
            return ()
        num_top = max(
            requests[span.request_id].sampling.num_prompt_logprobs or 0
            for span in inputs.score_spans
        )
        return score_rows(logits, inputs.score_token_ids, num_top).tensors
