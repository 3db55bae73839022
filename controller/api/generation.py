"""One answer under way: its choices, submitted and ended together.

Owns the life of the requests behind one HTTP request, when each of them is submitted, and the
headers that tell of it. Must not know the JSON of an endpoint.

A prompt is computed once, however many choices it has: its first choice, the leader, is submitted
at once, the others when the leader's first token is out, so that they find the prompt's KV in the
prefix cache and its scores with the leader. Where nothing could be shared all are submitted at
once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from controller.api.choices import Choice, Delta, TextOptions, to_ms
from controller.api.context import ApiContext
from controller.api.errors import ApiError, unavailable
from controller.api.prompts import Prepared, PreparedPrompt
from controller.api.schemas import GenerationBody
from controller.api.streaming import Merger
from controller.runtime.generation import (
    FinishedEvent,
    GenerationEvent,
    GenerationRequest,
    TokenEvent,
)
from engine.request import FinishReason

_NUM_SEEDS = 1 << 64


class Generation:
    """The choices of one answer; choice i of prompt p has the index p·n + i."""

    def __init__(self, prepared: Prepared, options: TextOptions, context: ApiContext) -> None:
        self._prepared = prepared
        self._options = options
        self._service = context.service
        self._merger = Merger()
        self._choices: dict[int, Choice] = {}
        self._is_released = False

    def start(self) -> None:
        """Submit every leader, and with it whoever need not wait for it."""
        for prompt_no, prompt in enumerate(self._prepared.prompts):
            leader = self._submit(prompt_no, 0, None)
            if not self._is_shared(prompt.request):
                self._submit_rest(leader, is_late=False)

    @property
    def choices(self) -> list[Choice]:
        """The choices that were submitted, by index; all of them once the answer is complete."""
        return [choice for _, choice in sorted(self._choices.items())]

    @property
    def num_choices(self) -> int:
        """Choices that the complete answer has."""
        return len(self._prepared.prompts) * self._prepared.num_choices

    @property
    def request_id(self) -> str:
        """The server's id; that of the first choice where there are several."""
        return self._choices[0].stream.request_id

    @property
    def has_prompt_scores(self) -> bool:
        """Whether the prompts' tokens are scored: there may be many of them to write."""
        return self._prepared.prompts[0].request.sampling.num_prompt_logprobs is not None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each prompt once."""
        return sum(len(prompt.request.prompt_token_ids) for prompt in self._prepared.prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were in the prefix cache before; what the choices of a prompt share
        among themselves does not count.
        """
        return sum(c.num_cached_tokens for c in self._choices.values() if c.leader is None)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far, those of a stop string included."""
        return sum(choice.num_tokens for choice in self._choices.values())

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        num_prompt, num_completion = self.num_prompt_tokens, self.num_completion_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    async def deltas(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """Yield what each event adds; ApiError, with this request in its headers, on failure.

        Nothing is yielded before every choice has had its first verdict: a refusal of one of them
        is then the answer to all.
        """
        held: list[tuple[Choice, Delta]] = []
        try:
            async with aclosing(self._events()) as events:
                async for index, event in events:
                    choice = self._choices[index]
                    delta = choice.feed(event)
                    if delta is not None:
                        held.append((choice, delta))
                    self._follow(choice, event)
                    if held and self._may_release():
                        for each in held:
                            yield each
                        held.clear()
        except ApiError as error:
            if error.code == "generation_failed" and not self._service.health().is_live:
                # Not this request failed, the engine did: another server may answer.
                raise self._told(unavailable("dead", str(error.detail))) from error
            self._told(error)
            raise

    async def _events(self) -> AsyncGenerator[tuple[int, GenerationEvent], None]:
        if self.num_choices > 1:
            async with aclosing(self._merger.events()) as merged:
                async for index, event in merged:
                    yield index, event
            return
        # The usual case needs no task between the stream and its reader.
        async for event in self._choices[0].stream:
            yield 0, event

    async def end(self) -> None:
        """Cancel what has not ended; nothing to do after a complete answer."""
        for choice in self._choices.values():
            if not choice.is_finished and not choice.matcher.is_stopped:
                choice.stream.finish(FinishReason.CANCELLED)
        await self._merger.aclose()

    def headers(self) -> dict[str, str]:
        """Return what is known when the first token is there; the worst of several choices."""
        choices = self._choices.values()
        decision = "degraded" if any(c.decision == "degraded" for c in choices) else "admitted"
        headers = {**self._id_headers(), "x-slo-decision": decision}
        predictions = [choice.predicted_ttft_s for choice in choices]
        predicted_ms = to_ms(max((p for p in predictions if p is not None), default=None))
        if predicted_ms is not None:
            headers["x-slo-predicted-ttft-ms"] = f"{predicted_ms:.3f}"
        return headers

    def server_timing(self) -> str:
        """Return the `server-timing` of a whole answer, milliseconds."""
        spans: dict[str, float] = {}
        for choice in self._choices.values():
            finished = choice.finished
            if finished is not None:
                for name, span_s in (("queue", finished.queue_s), ("ttft", finished.ttft_s)):
                    if span_s is not None:
                        spans[name] = max(spans.get(name, 0.0), span_s * 1000)
        return ", ".join(f"{name};dur={span:.3f}" for name, span in spans.items())

    def _is_shared(self, request: GenerationRequest) -> bool:
        """Whether later choices gain by waiting for the first one."""
        if request.sampling.num_prompt_logprobs is not None:
            return True
        block_size = self._service.model.prefix_block_size
        # The last token of a prompt is always computed.
        return block_size is not None and len(request.prompt_token_ids) > block_size

    def _follow(self, choice: Choice, event: GenerationEvent) -> None:
        """Submit the other choices of a prompt as soon as its leader shows that it is computed."""
        is_computed = isinstance(event, TokenEvent | FinishedEvent)
        is_leader = choice.leader is None and self._prepared.num_choices > 1
        if is_computed and is_leader and choice.index + 1 not in self._choices:
            self._submit_rest(choice, is_late=True)

    def _submit_rest(self, leader: Choice, *, is_late: bool) -> None:
        prompt_no = leader.index // self._prepared.num_choices
        for number in range(1, self._prepared.num_choices):
            self._submit(prompt_no, number, leader, is_late=is_late)

    def _submit(
        self, prompt_no: int, number: int, leader: Choice | None, *, is_late: bool = False
    ) -> Choice:
        prompt: PreparedPrompt = self._prepared.prompts[prompt_no]
        request = _nth(prompt.request, number)
        if is_late:
            request = replace(request, ttft_extra_s=self._service.now() - request.arrived_at)
        index = prompt_no * self._prepared.num_choices + number
        stream = self._service.submit(request)
        choice = Choice.of(
            index,
            request,
            stream,
            self._service.tokenizer,
            self._options,
            echo=prompt.echo,
            leader=leader,
        )
        self._choices[index] = choice
        if self.num_choices > 1:
            self._merger.add(index, stream)
        return choice

    def _may_release(self) -> bool:
        if not self._is_released:
            self._is_released = len(self._choices) == self.num_choices and all(
                choice.is_judged for choice in self._choices.values()
            )
        return self._is_released

    def _told(self, error: ApiError) -> ApiError:
        """Put this request into the error's headers and return it."""
        error.headers = {**self._id_headers(), **(error.headers or {})}
        return error

    def _id_headers(self) -> dict[str, str]:
        headers = {"x-request-id": self.request_id}
        label = self._choices[0].request.label
        if label is not None:
            headers["x-client-request-id"] = label
        return headers


def _nth(request: GenerationRequest, number: int) -> GenerationRequest:
    """Return the request of a prompt's choice `number`: its own seed; the first one scores the
    prompt.
    """
    if number == 0:
        return request
    sampling = replace(request.sampling, num_prompt_logprobs=None)
    if sampling.seed is not None:
        # Seeds are 64-bit integers with a sign and wrap around.
        seed = (sampling.seed + number + _NUM_SEEDS // 2) % _NUM_SEEDS - _NUM_SEEDS // 2
        sampling = replace(sampling, seed=seed)
    return replace(request, sampling=sampling)


@asynccontextmanager
async def submitted(
    prepared: Prepared, body: GenerationBody, context: ApiContext
) -> AsyncIterator[Generation]:
    """Submit the requests of a body; cancel what has not ended when the block is left."""
    options = TextOptions(
        stop_strings=body.stop_strings,
        is_stop_included=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        ending_token_ids=frozenset()
        if body.ignore_eos
        else frozenset(context.service.model.eos_token_ids),
    )
    with context.in_flight.one():
        generation = Generation(prepared, options, context)
        try:
            generation.start()
            yield generation
        finally:
            await generation.end()
