"""One answer under way: its choices, submitted together and ended together.

Owns the life of the requests behind one HTTP request, and the headers that tell of it. Must not
know the JSON of an endpoint.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from controller.api.choices import Choice, Delta, TextOptions, to_ms
from controller.api.context import ApiContext
from controller.api.errors import ApiError
from controller.api.prompts import Prepared
from controller.api.schemas import GenerationBody
from controller.api.streaming import merge
from engine.request import FinishReason


class Generation:
    """The choices of one answer."""

    def __init__(self, choices: list[Choice]) -> None:
        self.choices = choices

    @property
    def request_id(self) -> str:
        """The server's id; that of the first choice where there are several."""
        return self.choices[0].stream.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(choice.request.prompt_token_ids) for choice in self.choices)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far, those of a stop string included."""
        return sum(choice.num_tokens for choice in self.choices)

    def usage(self) -> dict[str, int]:
        """Return OpenAI's usage object."""
        num_prompt, num_completion = self.num_prompt_tokens, self.num_completion_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }

    async def deltas(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """Yield what each event adds; ApiError, with this request in its headers, on failure."""
        try:
            async with aclosing(merge([choice.stream for choice in self.choices])) as events:
                async for position, event in events:
                    choice = self.choices[position]
                    delta = choice.feed(event)
                    if delta is not None:
                        yield choice, delta
        except ApiError as error:
            error.headers = {**self._id_headers(), **(error.headers or {})}
            raise

    def end(self) -> None:
        """Cancel what has not ended; nothing to do after a complete answer."""
        for choice in self.choices:
            if not choice.is_finished and not choice.matcher.is_stopped:
                choice.stream.finish(FinishReason.CANCELLED)

    def headers(self) -> dict[str, str]:
        """Return what is known when the first token is there; the worst of several prompts."""
        decisions = {choice.decision for choice in self.choices}
        decision = "degraded" if "degraded" in decisions else "admitted"
        headers = {**self._id_headers(), "x-slo-decision": decision}
        predictions = [choice.predicted_ttft_s for choice in self.choices]
        predicted_ms = to_ms(max((p for p in predictions if p is not None), default=None))
        if predicted_ms is not None:
            headers["x-slo-predicted-ttft-ms"] = f"{predicted_ms:.3f}"
        return headers

    def server_timing(self) -> str:
        """Return the `server-timing` of a whole answer, milliseconds."""
        spans: dict[str, float] = {}
        for choice in self.choices:
            finished = choice.finished
            if finished is not None:
                for name, span_s in (("queue", finished.queue_s), ("ttft", finished.ttft_s)):
                    if span_s is not None:
                        spans[name] = max(spans.get(name, 0.0), span_s * 1000)
        return ", ".join(f"{name};dur={span:.3f}" for name, span in spans.items())

    def _id_headers(self) -> dict[str, str]:
        headers = {"x-request-id": self.request_id}
        label = self.choices[0].request.label
        if label is not None:
            headers["x-client-request-id"] = label
        return headers


@contextmanager
def submitted(
    prepared: Prepared, body: GenerationBody, context: ApiContext
) -> Iterator[Generation]:
    """Submit every request of a body; cancel what has not ended when the block is left."""
    service = context.service
    options = TextOptions(
        stop_strings=body.stop_strings,
        is_stop_included=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        ending_token_ids=frozenset() if body.ignore_eos else frozenset(service.model.eos_token_ids),
    )
    generation = Generation([])
    with context.in_flight.one():
        try:
            for index, request in enumerate(prepared.requests):
                stream = service.submit(request)
                choice = Choice.of(index, request, stream, service.tokenizer, options)
                generation.choices.append(choice)
            yield generation
        finally:
            generation.end()
