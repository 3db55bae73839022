"""`HubTokenizer`: text in and out through the model's own tokenizer.

Owns encoding, decoding and chat templates. Thread-safe: the underlying tokenizer is immutable once
loaded and special tokens are never added later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.device.model import ModelLoadError


class HubTokenizer:
    """Wraps a fast transformers tokenizer; `vocab_size` is the width of the model's logits."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, chat_template: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        if chat_template is not None:
            tokenizer.chat_template = chat_template

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return text; incomplete UTF-8 at the end appears as U+FFFD."""
        text = self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None
    ) -> list[int]:
        """Render messages with a generation prompt; ValueError with a reason if it cannot."""
        if chat_template is None and not self.has_chat_template:
            raise ValueError(
                "the model has no chat template: start the server with --chat-template"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error
        # The template writes its own special tokens.
        return self.encode(str(text), add_special_tokens=False)


def load_tokenizer(source: str, vocab_size: int, chat_template: str | None = None) -> HubTokenizer:
    """Load the tokenizer beside the model; ModelLoadError if there is none that fits."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"{source}: no usable tokenizer: {text}") from error
    if len(tokenizer) > vocab_size:
        raise ModelLoadError(
            f"{source}: the tokenizer knows {len(tokenizer)} tokens, the model's head only"
            f" {vocab_size}: they do not belong together"
        )
    return HubTokenizer(tokenizer, vocab_size, chat_template)
