"""From arrivals to engine requests: made-up tokens, promises, and a runner that knows when answers
end.

Owns what a simulated client sends and gets. Must not know a policy or a step's latency.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping

from controller.policy.promise import Promise
from controller.policy.slo import SloClass
from controller.simulation.hardware import Device
from controller.workload.arrivals import Arrival
from costmodel.features import StepFeatures
from engine.clock import VirtualClock
from engine.request import Request, SamplingParams
from engine.simulated import SimulatedRunner
from engine.step import SampledToken, StepOutput, StepPlan, WorkKind

# Outputs are one of two tokens; prompts use larger ones, so that no prompt begins like an answer.
WORD_TOKEN = 0
END_TOKEN = 1
_FIRST_PROMPT_TOKEN = 2
_SAMPLING = SamplingParams(stop_token_ids=(END_TOKEN,))


class Population:
    """Makes the requests of a workload in order, with the promises of their classes.

    `max_tokens` is what clients ask for: an answer ends earlier by itself, and nobody is told when;
    None lets every client ask for exactly as many tokens as it will get.
    """

    def __init__(
        self, classes: Mapping[str, SloClass], default_class: str, max_tokens: int | None
    ) -> None:
        self._classes = classes
        self._default = default_class
        self._max_tokens = max_tokens
        self._prefix_numbers: dict[int, int] = {}
        # Of unfinished requests, by id; the runner reads it.
        self.output_lengths: dict[str, int] = {}

    def request(self, arrival: Arrival, index: int) -> Request:
        """Return the request number `index`; KeyError on a class that does not exist."""
        slo_class = self._classes[arrival.slo_class or self._default]
        request_id = str(index)
        wanted = arrival.num_output_tokens
        self.output_lengths[request_id] = wanted
        return Request(
            request_id,
            self._prompt(arrival, index),
            wanted if self._max_tokens is None else max(wanted, self._max_tokens),
            arrival.at_s,
            _SAMPLING,
            Promise(slo_class.slo, slo_class, arrival.at_s),
        )

    def _prompt(self, arrival: Arrival, index: int) -> tuple[int, ...]:
        """Return a made-up prompt that shares exactly what the workload says it does.

        Every block with the same prefix id holds the same token throughout, so prompts whose first
        ids are equal begin alike; whatever has no id is made of a token that nobody else uses.
        """
        num_tokens = arrival.num_prompt_tokens
        own = (_FIRST_PROMPT_TOKEN + 2 * index,)
        if not arrival.prefix_ids:
            return own * num_tokens
        # Ids are a trace's own and may be of any size; token ids may not.
        numbers = self._prefix_numbers
        shared = tuple(
            itertools.chain.from_iterable(
                (_FIRST_PROMPT_TOKEN + 1 + 2 * numbers.setdefault(prefix, len(numbers)),)
                * arrival.prefix_block_tokens
                for prefix in arrival.prefix_ids
            )
        )[:num_tokens]
        return shared + own * (num_tokens - len(shared))


class PopulationRunner(SimulatedRunner):
    """A simulated runner on a `Device`, whose answers end where the workload says."""

    def __init__(
        self,
        clock: VirtualClock,
        device: Device,
        output_lengths: Mapping[str, int],
        swap_block_s: float = 0.0,
    ) -> None:
        super().__init__(clock, self._step_s, WORD_TOKEN, swap_block_s)
        self._device = device
        self._output_lengths = output_lengths
        # One word per request, said again and again, and after how many its answer ends: a new one
        # for every token costs more than the rest of a step.
        self._answers: dict[str, tuple[SampledToken, int]] = {}
        self._num_prompt_ends = 0

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        """Let the step's time pass; the last token of an answer is the end token."""
        answers, prefill = self._answers, WorkKind.PREFILL
        tokens = []
        num_prompt_ends = 0
        for request_id, kind, num_tokens, num_computed in plan.work:
            request = requests[request_id]
            num_output = len(request.output_token_ids)
            if kind is prefill:
                if num_computed + num_tokens < len(request.prompt_token_ids) + num_output:
                    continue
                num_prompt_ends += 1
            answer = answers.get(request_id)
            if answer is None:
                # The requests of a warm-up are nobody's: they have no length of their own.
                num_words = self._output_lengths.get(request_id, sys.maxsize) - 1
                answer = answers[request_id] = (SampledToken(request_id, WORD_TOKEN), num_words)
            word, num_words = answer
            tokens.append(word if num_output < num_words else SampledToken(request_id, END_TOKEN))
        self._num_prompt_ends = num_prompt_ends
        self._clock.advance(self._step_s(plan))
        return StepOutput(tokens)

    def forget(self, request_id: str) -> None:
        """Drop what was kept for a request."""
        self._answers.pop(request_id, None)

    def _step_s(self, plan: StepPlan) -> float:
        features = StepFeatures.of(plan.work, self._num_prompt_ends)
        return self._device.step_s(features, self._clock.now())
