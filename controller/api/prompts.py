"""From a checked body to `GenerationRequest`s: tokenising, the model's limits, sampling, targets.

Owns every check that needs the served model. Must not submit anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio.to_thread
from starlette.datastructures import Headers

from controller.api.context import ApiContext
from controller.api.echo import EchoedPrompt, echo_of_ids, echo_of_text
from controller.api.errors import invalid
from controller.api.headers import read_client_id, read_targets, read_tenant
from controller.api.schemas import MAX_CHOICES, ChatBody, CompletionBody, GenerationBody, Message
from controller.runtime.generation import GenerationRequest
from engine.request import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy: dividing logits by less overflows single precision."""


MAX_CHARS_PER_TOKEN = 256
"""A text with more characters per token of the context cannot fit and is not even tokenised: twice
the 128 characters of the longest tokens (runs of spaces) in the large vocabularies.
"""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt, ready to be submitted; `echo` is what stands in front of its completions."""

    request: GenerationRequest
    echo: EchoedPrompt | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A body, ready to be submitted: its prompts in order, each to be completed `num_choices`
    times.
    """

    prompts: tuple[PreparedPrompt, ...]
    model: str
    num_choices: int = 1


async def prepare_completion(
    body: CompletionBody, headers: Headers, arrived_at: float, context: ApiContext
) -> Prepared:
    """Check and tokenise `POST /v1/completions`; ApiError names the field."""
    model = context.check_model(body.model)
    scores = [body.prompt_logprobs, body.logprobs if body.echo else None]
    draft = _draft(
        body,
        headers,
        arrived_at,
        context,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=max((n for n in scores if n is not None), default=None),
    )
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompts = await _tokenize_prompts(body, context)
    _check_num_choices(body, len(prompts))
    requests = [_fitted(draft, name, ids, max_tokens, context) for name, ids in prompts.items()]
    echoes = await _echoes(body, requests, context) if body.echo else [None] * len(requests)
    ready = map(PreparedPrompt, requests, echoes)
    return Prepared(tuple(ready), model, body.num_choices)


async def prepare_chat(
    body: ChatBody, headers: Headers, arrived_at: float, context: ApiContext
) -> Prepared:
    """Check, render and tokenise `POST /v1/chat/completions`; ApiError names the field."""
    model = context.check_model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    draft = _draft(
        body,
        headers,
        arrived_at,
        context,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
    )
    ids = await render_messages(body.messages, context)
    max_tokens = body.max_completion_tokens or body.max_tokens
    request = _fitted(draft, "messages", ids, max_tokens, context)
    return Prepared((PreparedPrompt(request),), model, body.num_choices)


async def render_messages(messages: Sequence[Message], context: ApiContext) -> list[int]:
    """Render a conversation with the model's chat template, off the event loop."""
    if not context.service.model.has_chat_template:
        message = "this model has no chat template; use /v1/completions or start with one"
        raise invalid("messages", message, code="invalid_messages")
    _check_chars(sum(len(message.content) for message in messages), "messages", context)
    rendered: list[Mapping[str, Any]] = [_plain(message) for message in messages]
    try:
        ids = await anyio.to_thread.run_sync(
            context.service.tokenizer.apply_chat_template,
            rendered,
            limiter=context.tokenizer_limiter,
        )
    except ValueError as error:
        message = f"the chat template cannot render these messages: {error}"
        raise invalid("messages", message, code="invalid_messages") from error
    return list(ids)


async def encode(
    texts: Sequence[str], context: ApiContext, *, add_special_tokens: bool
) -> list[list[int]]:
    """Tokenise texts off the event loop, in one go."""
    tokenizer = context.service.tokenizer

    def run() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    return await anyio.to_thread.run_sync(run, limiter=context.tokenizer_limiter)


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ApiError 400 `invalid_token_id` for an id that is not a row of the logits."""
    if ids and max(ids) >= vocab_size:
        position = next(i for i, token in enumerate(ids) if token >= vocab_size)
        message = (
            f"{param}[{position}]: token id {ids[position]} is outside the vocabulary of"
            f" {vocab_size} tokens"
        )
        raise invalid(f"{param}[{position}]", message, code="invalid_token_id")


async def _tokenize_prompts(body: CompletionBody, context: ApiContext) -> dict[str, list[int]]:
    """Return token ids by the name that an error would use, in order of the prompts."""
    prompt = body.prompt
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else list(prompt)
    names = ["prompt"] if prompts[0] is prompt else [f"prompt[{i}]" for i in range(len(prompts))]
    if isinstance(prompts[0], str):
        for name, text in zip(names, prompts, strict=True):
            _check_chars(len(text), name, context)
        special = body.add_special_tokens is not False
        encoded = await encode(prompts, context, add_special_tokens=special)
        return dict(zip(names, encoded, strict=True))
    for name, ids in zip(names, prompts, strict=True):
        check_token_ids(ids, context.service.tokenizer.vocab_size, name)
    return dict(zip(names, prompts, strict=True))


def _check_num_choices(body: GenerationBody, num_prompts: int) -> None:
    if num_prompts * body.num_choices > MAX_CHOICES:
        message = (
            f"{num_prompts} prompts with {body.num_choices} completions each are more than"
            f" {MAX_CHOICES} choices"
        )
        raise invalid("n", message)


async def _echoes(
    body: CompletionBody, requests: Sequence[GenerationRequest], context: ApiContext
) -> list[EchoedPrompt]:
    """Read every prompt back, off the event loop: a long one takes as long as to tokenise it."""
    tokenizer = context.service.tokenizer
    texts: list[Any] = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt)
    skip_special_tokens = body.skip_special_tokens is not False

    def run() -> list[EchoedPrompt]:
        if isinstance(texts[0], str):
            return [
                echo_of_text(tokenizer, text, request.prompt_token_ids)
                for text, request in zip(texts, requests, strict=True)
            ]
        return [
            echo_of_ids(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=skip_special_tokens,
                is_all=request.max_tokens == 0,
            )
            for request in requests
        ]

    return await anyio.to_thread.run_sync(run, limiter=context.tokenizer_limiter)


def _check_chars(num_chars: int, name: str, context: ApiContext) -> None:
    """Refuse a text that cannot fit before a tokenizer spends seconds on it."""
    limit = context.service.model.max_model_len * MAX_CHARS_PER_TOKEN
    if num_chars > limit:
        message = (
            f"{name}: a text of {num_chars} characters exceeds the context of"
            f" {context.service.model.max_model_len} tokens"
        )
        raise invalid(name, message, code="context_length_exceeded")


def _is_ids(prompt: Sequence[Any]) -> bool:
    return isinstance(prompt[0], int)


def _draft(
    body: GenerationBody,
    headers: Headers,
    arrived_at: float,
    context: ApiContext,
    *,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
) -> GenerationRequest:
    """Return what the prompts of one body share, without a prompt."""
    targets = read_targets(
        headers,
        body_slo=body.slo,
        service_tier=body.service_tier,
        classes=context.slo_classes.keys(),
        is_lenient=context.is_slo_lenient,
    )
    if targets.num_ignored and context.metrics is not None:
        context.metrics.on_slo_ignored(targets.num_ignored)
    return GenerationRequest(
        prompt_token_ids=(),
        max_tokens=1,
        arrived_at=arrived_at,
        sampling=replace(
            _sampling(body, context, num_logprobs), num_prompt_logprobs=num_prompt_logprobs
        ),
        slo=targets.slo,
        slo_class=targets.slo_class,
        priority=body.priority or 0,
        tenant=read_tenant(headers, body.user),
        label=read_client_id(headers),
        cache_salt=body.cache_salt,
    )


def _fitted(
    draft: GenerationRequest,
    name: str,
    ids: Sequence[int],
    max_tokens: int | None,
    context: ApiContext,
) -> GenerationRequest:
    """Return the draft with a prompt and the output that fits beside it (all of it for None)."""
    model = context.service.model
    if not ids:
        raise invalid(name, f"{name}: the prompt has no tokens")
    room = min(model.max_model_len, model.num_pool_tokens) - len(ids)
    least = 0 if max_tokens == 0 else 1
    if room < least:
        answer = "; with at least one token of answer it" if least else ", which"
        message = (
            f"{name}: the prompt has {len(ids)} tokens{answer}"
            f" exceeds the context of {model.max_model_len} tokens"
        )
        if model.num_pool_tokens < model.max_model_len:
            message += f" or the KV pool of {model.num_pool_tokens} tokens"
        raise invalid(name, message, code="context_length_exceeded")
    wanted = room if max_tokens is None else max_tokens
    min_tokens = draft.sampling.min_tokens
    if min_tokens > wanted:
        message = f"min_tokens ({min_tokens}) exceeds the {wanted} tokens that max_tokens allows"
        raise invalid("min_tokens", message)
    return replace(draft, prompt_token_ids=tuple(ids), max_tokens=min(wanted, room))


def _sampling(
    body: GenerationBody, context: ApiContext, num_logprobs: int | None
) -> SamplingParams:
    model, vocab_size = context.service.model, context.service.tokenizer.vocab_size
    stop_token_ids = list(body.stop_token_ids or ())
    check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
    if not body.ignore_eos:
        stop_token_ids += model.eos_token_ids
    biases = {int(token): float(bias) for token, bias in (body.logit_bias or {}).items()}
    for token in biases:
        if token >= vocab_size:
            message = (
                f"logit_bias: token id {token} is outside the vocabulary of {vocab_size} tokens"
            )
            raise invalid(f"logit_bias.{token}", message, code="invalid_token_id")
    temperature = _given(body.temperature, 1.0)
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=_given(body.top_p, 1.0),
        top_k=max(0, int(_given(body.top_k, 0))),
        min_p=_given(body.min_p, 0.0),
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        logit_bias=tuple(sorted(biases.items())),
        seed=body.seed,
        num_logprobs=num_logprobs,
        stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
        min_tokens=body.min_tokens or 0,
    )


def _given(value: float | None, default: float) -> float:
    # null means the default, as in OpenAI's API.
    return default if value is None else float(value)


def _plain(message: Message) -> dict[str, Any]:
    # Templates know no developer; OpenAI's models treat it as the system's successor.
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": message.content}
    return {**plain, "name": message.name} if message.name is not None else plain
