"""The shapes of what the HTTP door answers, for the OpenAPI page and for clients that generate
code from it.

Owns documentation: routes build plain dictionaries, and a test holds them against these models.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReasonName = Literal["stop", "length"]


class Answer(BaseModel):
    """Base of every answer: nothing that is not declared."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    """OpenAI's error object; `code` is stable, `param` names the field or header."""

    message: str
    type: str
    param: str | None
    code: str
    predicted_ttft_ms: float | None = None


class ErrorAnswer(Answer):
    """Every refusal."""

    error: ErrorDetail


class SloOutcome(Answer):
    """The promise and how it was kept; milliseconds, `*_met` None without such a target."""

    slo_class: str = Field(alias="class")
    ttft_ms: float | None
    tpot_ms: float | None
    queue_ms: float | None
    ttft_met: bool | None
    tpot_met: bool | None
    predicted_ttft_ms: float | None


class PromptTokensDetails(Answer):
    """Prompt tokens that the prefix cache spared; each prompt counts once, however many choices it
    has.
    """

    cached_tokens: int


class Usage(Answer):
    """Tokens of the prompts, each once, and of all completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Answer):
    """How likely a token was at a position of the prompt; `rank` 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Answer):
    """One entry per token; `text_offset` counts characters of the choice's text.

    With `echo` the prompt's tokens come first, the very first one without a score.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Answer):
    """One completion; choice i of prompt p has the index p·n + i."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    prompt_logprobs: PromptLogprobs | None = None
    slo: SloOutcome | None = None


class CompletionAnswer(Answer):
    """`POST /v1/completions`; a stream sends the same object with pieces of text."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    slo: SloOutcome | None = None


class TopLogprob(Answer):
    """One alternative; `bytes` is None where the token is not a whole character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(TopLogprob):
    """The chosen token and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """One entry per completion token."""

    content: list[TokenLogprobs]
    refusal: None = None


class ChatMessage(Answer):
    """The answer of the model."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(Answer):
    """One answer to the conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    slo: SloOutcome | None = None


class ChatAnswer(Answer):
    """`POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    slo: SloOutcome | None = None


class ChatDelta(Answer):
    """What a chunk adds: first the role, then pieces of content."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Answer):
    """One piece; `finish_reason` is set on the last one."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None


class ChatChunk(Answer):
    """A server-sent event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    slo: SloOutcome | None = None


class ModelCard(Answer):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(Answer):
    """`GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Answer):
    """`POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(Answer):
    """`POST /detokenize`."""

    prompt: str


class TokenizerInfo(Answer):
    """`GET /tokenizer_info`."""

    vocab_size: int
    eos_token_ids: list[int]
    has_chat_template: bool
    max_model_len: int


class HealthAnswer(Answer):
    """`GET /health` and `GET /ready`; `reason` says why not."""

    status: Literal["ok", "unavailable"]
    reason: str | None = None


class VersionAnswer(Answer):
    """`GET /version`."""

    version: str


class LoadAnswer(Answer):
    """`GET /load`: generations under way at this door."""

    server_load: int
