"""Fields that real clients send and this server cannot honour yet, each with the values that
change nothing and a reason.

Owns the table. A neutral value is accepted, any other is refused: a field is never silently
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError


class Unsupported(NamedTuple):
    """Values under which the field changes nothing (None always does), and why others are
    refused.
    """

    neutral: tuple[Any, ...]
    reason: str


_TEXT_ONLY = "only text is generated"
_NO_TOOLS = "tool calling is not supported"
_NO_GUIDE = "constrained output is not supported"
_NO_TEMPLATE = "only the model's own chat template is used, with a generation prompt"

COMMON: Mapping[str, Unsupported] = {
    "use_beam_search": Unsupported((False,), "beam search is not supported"),
    "length_penalty": Unsupported((1, 1.0), "beam search is not supported"),
    "early_stopping": Unsupported((False,), "beam search is not supported"),
    "response_format": Unsupported(({"type": "text"},), _NO_GUIDE),
    "structured_outputs": Unsupported(({},), _NO_GUIDE),
    "guided_json": Unsupported((), _NO_GUIDE),
    "guided_regex": Unsupported((), _NO_GUIDE),
    "guided_choice": Unsupported((), _NO_GUIDE),
    "guided_grammar": Unsupported((), _NO_GUIDE),
    "guided_decoding_backend": Unsupported((), _NO_GUIDE),
    "allowed_token_ids": Unsupported(([],), _NO_GUIDE),
    "bad_words": Unsupported(([],), _NO_GUIDE),
    "logits_processors": Unsupported(([],), "custom logits processors are not supported"),
    "truncate_prompt_tokens": Unsupported((), "a prompt is never cut silently"),
    "spaces_between_special_tokens": Unsupported((True,), "special tokens are joined with spaces"),
    "return_token_ids": Unsupported((False,), "token ids are not returned"),
    "return_tokens_as_token_ids": Unsupported((False,), "tokens are returned as text"),
    "mm_processor_kwargs": Unsupported(({},), "only text is understood"),
    "kv_transfer_params": Unsupported(({},), "KV is not transferred between servers"),
    "vllm_xargs": Unsupported(({},), "engine arguments cannot be set per request"),
}

COMPLETIONS: Mapping[str, Unsupported] = {
    **COMMON,
    "suffix": Unsupported(("",), "the model is not asked to fill in the middle"),
    "prompt_embeds": Unsupported((), "prompts are text or token ids"),
}

CHAT: Mapping[str, Unsupported] = {
    **COMMON,
    "tools": Unsupported(([],), _NO_TOOLS),
    "tool_choice": Unsupported(("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": Unsupported((True, False), _NO_TOOLS),
    "functions": Unsupported(([],), _NO_TOOLS),
    "function_call": Unsupported(("none", "auto"), _NO_TOOLS),
    "modalities": Unsupported((["text"],), _TEXT_ONLY),
    "audio": Unsupported((), _TEXT_ONLY),
    "prediction": Unsupported((), "predicted outputs are not supported"),
    "reasoning_effort": Unsupported((), "the model's effort cannot be set"),
    "include_reasoning": Unsupported((True,), "reasoning is not separated from the answer"),
    "verbosity": Unsupported(("medium",), "verbosity cannot be set"),
    "web_search_options": Unsupported((), "the server does not search the web"),
    "store": Unsupported((False,), "answers are not stored"),
    "echo": Unsupported((False,), "the prompt is not repeated"),
    "add_generation_prompt": Unsupported((True,), _NO_TEMPLATE),
    "continue_final_message": Unsupported((False,), _NO_TEMPLATE),
    "add_special_tokens": Unsupported((False,), _NO_TEMPLATE),
    "chat_template": Unsupported((), _NO_TEMPLATE),
    "chat_template_kwargs": Unsupported(({},), _NO_TEMPLATE),
    "documents": Unsupported(([],), _NO_TEMPLATE),
}

MESSAGE: Mapping[str, Unsupported] = {
    # An answer of this API is sent back as it was received, with its empty members.
    "tool_calls": Unsupported(([],), _NO_TOOLS),
    "tool_call_id": Unsupported((), _NO_TOOLS),
    "function_call": Unsupported((), _NO_TOOLS),
    "refusal": Unsupported((), _TEXT_ONLY),
    "annotations": Unsupported(([],), _TEXT_ONLY),
    "audio": Unsupported((), _TEXT_ONLY),
    "reasoning": Unsupported((), "reasoning is not given back to the model"),
    "reasoning_content": Unsupported((), "reasoning is not given back to the model"),
}

HINTS = frozenset({"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"})
"""Hints that never change an answer: accepted and named in the header
`x-paceline-ignored-parameters`.
"""


def without_unsupported(body: Any, table: Mapping[str, Unsupported]) -> Any:
    """Return a JSON object without its neutral unsupported fields; any other value of such a
    field is an error.
    """
    if not isinstance(body, dict):
        return body
    kept = {}
    for name, value in body.items():
        entry = table.get(name)
        if entry is None:
            kept[name] = value
        elif value is not None and not any(_is_same(value, same) for same in entry.neutral):
            raise PydanticCustomError(
                "unsupported_parameter",
                "not supported with this value: {reason}",
                # A model's error carries the model's location; the handler appends the suffix to
                # it.
                {"suffix": f".{name}", "reason": entry.reason},
            )
    return kept


def _is_same(value: Any, neutral: Any) -> bool:
    # True == 1 in Python; a boolean where a number is meant is a client's mistake.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
