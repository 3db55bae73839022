"""`TorchRunner`: one packed forward for the whole mixed batch, then sampling and scores.

Owns the device side of a step: inputs, cache, model and sampler in one place. Must not change a
request or decide anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from engine.device.attention.base import AttentionBackend, PagedStepContext
from engine.device.failures import explained
from engine.device.graphs import GraphRequest, make_graphs
from engine.device.inputs import InputBuilder, StepInputs
from engine.device.kv_cache import PagedKvCache
from engine.device.model import DecoderModel
from engine.device.sampler import NOT_FINITE, Sampler
from engine.device.scores import prompt_scores, score_rows
from engine.device.transfer import to_host
from engine.request import Request
from engine.step import SampledToken, StepOutput, StepPlan


class StepSpan(Protocol):
    """Hears when a step's inputs are queued on the device, and when its last copy back is."""

    def begin(self) -> None:
        """The inputs are queued; everything else follows."""
        ...

    def end(self) -> None:
        """All is queued; the wait follows."""
        ...


class TorchRunner:
    """Implements `engine.ports.ModelRunner` on a torch device.

    With `graphs`, steps of decodes alone replay what is recorded here; one block more than
    `num_blocks` is allocated, for the rows that pad a batch. `span` may be set to hear of a step's
    two ends.
    """

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        num_blocks: int,
        block_size: int,
        seed: int | None = None,
        num_host_blocks: int = 0,
        graphs: GraphRequest | None = None,
    ) -> None:
        backend.check(block_size, model.dtype, model.device, model.layers)
        self._model = model
        self._backend = backend
        num_scratch = 0 if graphs is None else 1
        self._cache = PagedKvCache(
            model.layers,
            num_blocks + num_scratch,
            block_size,
            model.dtype,
            model.device,
            num_host_blocks,
        )
        self._inputs = InputBuilder(block_size, model.device, model.vocab_size)
        self._sampler = Sampler(seed)
        self.span: StepSpan | None = None
        self._graphs, self._graphs_off = None, None
        if graphs is not None:
            self._graphs, self._graphs_off = make_graphs(
                graphs, self._all_logits, backend, block_size, num_blocks, model.device
            )

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """The padded batch sizes of decode steps that are replayed as graphs."""
        return () if self._graphs is None else self._graphs.sizes

    @property
    def graphs_off(self) -> str | None:
        """Why the graphs that were asked for are not there; None if they are, or nobody asked."""
        return self._graphs_off

    @property
    def num_graph_replays(self) -> int:
        """Steps that were replayed so far."""
        return 0 if self._graphs is None else self._graphs.num_replayed

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
        if self.span is not None:
            self.span.begin()
        logits = self._logits(inputs)
        num_sampled = len(inputs.sample_ids)
        # Scores first: sampling may change the logits of its own rows, not of these.
        scores = self._score(logits[num_sampled:], inputs, requests)
        sampled = [requests[request_id] for request_id in inputs.sample_ids]
        pending = self._sampler.start(logits[:num_sampled], sampled)
        fetched = pending.tensors
        on_queued = None if self.span is None else self.span.end
        arrays = to_host([*fetched, *scores], self._model.device, on_queued)
        tokens = self._sampler.finish(pending, arrays[: len(fetched)])
        if not scores:
            return StepOutput(tokens)
        scored, unsound = prompt_scores(inputs.score_spans, arrays[len(fetched) :], requests)
        if unsound:
            tokens = [token for token in tokens if token.request_id not in unsound]
            tokens += [SampledToken(i, 0, failure=NOT_FINITE) for i in unsound]
        return StepOutput(tokens, scored)

    def _logits(self, inputs: StepInputs) -> torch.Tensor:
        """Return the logits of the rows that are wanted, replayed where a graph fits the step."""
        replayed = None if self._graphs is None else self._graphs.run(inputs)
        if replayed is None:
            return self._forward(inputs, inputs.logit_rows)
        # Decodes want every row, in order; a one-token chunk in the middle of a prompt wants none.
        is_all = len(inputs.sample_ids) == len(replayed) and not inputs.score_spans
        return replayed if is_all else replayed[inputs.logit_rows]

    def _all_logits(self, inputs: StepInputs) -> torch.Tensor:
        return self._forward(inputs, inputs.sample_rows)

    def _forward(self, inputs: StepInputs, rows: torch.Tensor) -> torch.Tensor:
        context = PagedStepContext(inputs, self._cache, self._backend)
        return self._model.logits(inputs.input_ids, inputs.position_ids, rows, context)

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
