"""The bodies that clients send: every field, its type and its range, strictly.

Owns shapes and ranges that need no model. Must not touch a tokenizer; what depends on the served
model is checked in `controller.api.prompts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from controller.api.unsupported import (
    CHAT,
    COMPLETIONS,
    HINTS,
    MESSAGE,
    Unsupported,
    without_unsupported,
)

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
MAX_PROMPTS = 1024
MAX_CHOICES_PER_PROMPT = 128
MAX_CHOICES = 1024
MAX_SALT_CHARS = 512
_MAX_INT = 2**31 - 1
_MAX_INT64 = 2**63 - 1


def _check_text(text: str, suffix: str = "") -> str:
    # JSON can spell half of a surrogate pair; no tokenizer can encode it.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _wrong(f"unpaired surrogate at character {error.start}", suffix) from None
    return text


def _check_salt(salt: str) -> str:
    if not 0 < len(salt) <= MAX_SALT_CHARS:
        raise _wrong(
            f"send 1 to {MAX_SALT_CHARS} characters, or leave it out to share KV with everybody who"
            f" does; got {len(salt)}"
        )
    return salt


def _check_token_id(token: object, suffix: str) -> None:
    if isinstance(token, bool) or not isinstance(token, int):
        raise _wrong("a token id must be an integer", suffix)
    if not 0 <= token <= _MAX_INT:
        raise _wrong("a token id must not be negative or beyond the vocabulary", suffix, _BAD_TOKEN)


def _check_token_ids(tokens: list[Any], suffix: str = "") -> None:
    """Check a non-empty list; the bad position is looked for only if there is one."""
    # A prompt may have a million ids, and every stream waits for this check.
    is_right = set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) <= _MAX_INT
    if not is_right:
        for position, token in enumerate(tokens):
            _check_token_id(token, f"{suffix}[{position}]")


def _wrong(message: str, suffix: str = "", code: str = "invalid_value") -> PydanticCustomError:
    context = {"suffix": suffix, "code": code, "problem": message}
    return PydanticCustomError("wrong_value", "{problem}", context)


_BAD_TOKEN = "invalid_token_id"  # noqa: S105 - an error code, no secret
Text = Annotated[str, AfterValidator(_check_text)]
Salt = Annotated[
    Text,
    AfterValidator(_check_salt),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS}),
]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT)]
Prompt = str | list[str] | list[int] | list[list[int]]

_SLO_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                name: {
                    "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}],
                    "description": what,
                }
                for name, what in (
                    ("ttft_ms", "Time to first token, from arrival, in milliseconds."),
                    ("tpot_ms", "Mean time per output token after the first, in milliseconds."),
                    ("e2e_ms", "Time to the last token, from arrival, in milliseconds."),
                )
            },
        },
        {"type": "null"},
    ]
}


class Body(BaseModel):
    """Strict base: no coercion, no NaN, no unknown field."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: Literal[False] | None = False


class GenerationBody(Body):
    """The fields that completions and chat completions share."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {}

    model: Text | None = Field(default=None, description="Defaults to the served model.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=1, ge=1, le=MAX_CHOICES_PER_PROMPT)
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES_PER_PROMPT)
    max_tokens: int | None = Field(default=None, ge=1, le=_MAX_INT)
    min_tokens: int | None = Field(default=0, ge=0, le=_MAX_INT)
    temperature: float | None = Field(default=1.0, ge=0, le=2)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=0, ge=-1, le=_MAX_INT)
    min_p: float | None = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(default=1.0, gt=0, le=10)
    presence_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(default=None, ge=-_MAX_INT64 - 1, le=_MAX_INT64)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    ignore_eos: bool | None = False
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    cache_salt: Salt | None = None
    user: Text | None = None
    priority: int | None = Field(default=0, ge=-_MAX_INT, le=_MAX_INT)
    service_tier: str | None = None
    slo: Annotated[object, WithJsonSchema(_SLO_SCHEMA)] = None
    _ignored_hints: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _set_aside(cls, body: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        hints: tuple[str, ...] = ()
        if isinstance(body, dict):
            body = without_unsupported(body, cls.unsupported)
            hints = tuple(sorted(name for name in HINTS if body.get(name) is not None))
            body = {name: value for name, value in body.items() if name not in HINTS}
        checked = handler(body)
        checked._ignored_hints = hints
        return checked

    @field_validator("stop", mode="plain", json_schema_input_type=str | list[str] | None)
    @classmethod
    def _check_stop(cls, stop: Any) -> Any:
        if stop is None:
            return None
        strings = stop if isinstance(stop, list) else [stop]
        if len(strings) > MAX_STOP_STRINGS:
            raise _wrong(f"at most {MAX_STOP_STRINGS} stop strings are allowed")
        for position, text in enumerate(strings):
            suffix = f"[{position}]" if isinstance(stop, list) else ""
            if not isinstance(text, str):
                raise _wrong("a stop string must be a string", suffix)
            if not 0 < len(text) <= MAX_STOP_CHARS:
                raise _wrong(f"a stop string must have 1 to {MAX_STOP_CHARS} characters", suffix)
            _check_text(text, suffix)
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (biases or {}).items():
            suffix = f".{token[:20]}"
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise _wrong("a key must be a token id", suffix, _BAD_TOKEN)
            if not -100 <= bias <= 100:
                raise _wrong("a bias must lie in [-100, 100]", suffix)
        return biases

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_choices:
            problem = "best_of must equal n: every completion that is generated is returned"
            raise _wrong(problem, ".best_of", "unsupported_parameter")
        if self.prompt_logprobs is not None and self.stream:
            raise _wrong("prompt_logprobs are not sent in a stream", ".prompt_logprobs")
        return self

    @property
    def num_choices(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def ignored_hints(self) -> tuple[str, ...]:
        """Names of the accepted fields that change nothing."""
        return self._ignored_hints

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, each once."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(dict.fromkeys(stop))


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    unsupported = COMPLETIONS

    prompt: Prompt
    max_tokens: int | None = Field(default=None, ge=0, le=_MAX_INT)
    echo: bool | None = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = True

    @field_validator("prompt", mode="plain", json_schema_input_type=Prompt)
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, str):
            return _check_prompt_text(prompt, "")
        if not isinstance(prompt, list):
            raise _wrong("a prompt must be a string, a list of strings, or token ids")
        if not prompt:
            raise _wrong("the prompt is empty")
        first = prompt[0]
        if isinstance(first, int | float):
            _check_token_ids(prompt)
            return prompt
        if len(prompt) > MAX_PROMPTS:
            raise _wrong(f"at most {MAX_PROMPTS} prompts are allowed")
        for position, item in enumerate(prompt):
            suffix = f"[{position}]"
            if isinstance(item, str) and isinstance(first, str):
                _check_prompt_text(item, suffix)
            elif isinstance(item, list) and isinstance(first, list):
                if not item:
                    raise _wrong("the prompt is empty", suffix)
                _check_token_ids(item, suffix)
            else:
                raise _wrong("prompts must be all strings or all lists of token ids", suffix)
        return prompt


def _check_prompt_text(text: str, suffix: str) -> str:
    if not text:
        raise _wrong("the prompt is empty", suffix)
    return _check_text(text, suffix)


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation; `content` is text, or parts of type text that are joined by
    newlines.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, message: Any) -> Any:
        return without_unsupported(message, MESSAGE)

    @field_validator("content", mode="plain", json_schema_input_type=str | list[TextPart])
    @classmethod
    def _join_parts(cls, content: Any) -> str:
        if isinstance(content, str):
            return _check_text(content)
        if not isinstance(content, list) or not content:
            raise _wrong("content must be a string or a list of text parts")
        texts = []
        for position, part in enumerate(content):
            suffix = f"[{position}]"
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise _wrong("a part must be an object with a type", suffix)
            if part["type"] != "text":
                problem = "only parts of type text are understood"
                raise _wrong(problem, f"{suffix}.type", "unsupported_parameter")
            if not isinstance(part.get("text"), str):
                raise _wrong("the text of a part must be a string", f"{suffix}.text")
            unknown = sorted(part.keys() - {"type", "text"})
            if unknown:
                raise _wrong("unknown parameter", f"{suffix}.{unknown[0]}", "unknown_parameter")
            texts.append(_check_text(part["text"], f"{suffix}.text"))
        return "\n".join(texts)


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    unsupported = CHAT

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_MAX_INT)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)


class TokenizeBody(Body):
    """`POST /tokenize`: a text, or messages."""

    model: Text | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = True


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: Text | None = None
    tokens: list[TokenId]
