"""`HubTokenizer`: text in and out through the model's own tokenizer.

Owns encoding, decoding and chat templates. Thread-safe: the underlying tokenizer is immutable once
loaded and special tokens are never added later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.device.checkpoint import Checkpoint, find_checkpoint, gguf_options, one_line
from engine.device.servable import ModelLoadError


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
    checkpoint = find_checkpoint(source)
    return fit_tokenizer(read_tokenizer(checkpoint), checkpoint, vocab_size, chat_template)


def read_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerFast:
    """Read the checkpoint's tokenizer, a GGUF file's own; ModelLoadError if there is none."""
    source = checkpoint.source
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.location, trust_remote_code=False, **gguf_options(checkpoint)
        )
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelLoadError(
                f"{source}: no usable tokenizer: it brings Python code of its own (auto_map), and"
                " code from a checkpoint is never run"
            ) from error
        raise ModelLoadError(f"{source}: no usable tokenizer: {one_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelLoadError(
            f"{source}: no usable tokenizer: {type(tokenizer).__name__} is not safe to use from"
            " several threads; convert it to tokenizer.json"
        )
    return tokenizer


def fit_tokenizer(
    tokenizer: PreTrainedTokenizerFast,
    checkpoint: Checkpoint,
    vocab_size: int,
    chat_template: str | None = None,
) -> HubTokenizer:
    """Bind a tokenizer to a head of `vocab_size` logits; ModelLoadError if they do not belong
    together, or if the chat template does not compile.
    """
    source = checkpoint.source
    if checkpoint.gguf_file is not None and len(tokenizer) > vocab_size:
        tokenizer = _without_added(tokenizer, vocab_size)
    if len(tokenizer) > vocab_size:
        raise ModelLoadError(
            f"{source}: the tokenizer knows {len(tokenizer)} tokens, the model's head only"
            f" {vocab_size}: they do not belong together"
        )
    hub_tokenizer = HubTokenizer(tokenizer, vocab_size, chat_template)
    own = tokenizer.chat_template or {}
    for template in own.values() if isinstance(own, dict) else (own,):
        try:
            _TEMPLATES.parse(template)
        except TemplateSyntaxError as error:
            where = "the model's own" if chat_template is None else "the given"
            raise ModelLoadError(
                f"{source}: {where} chat template does not compile: line {error.lineno}:"
                f" {error.message}; give another with --chat-template"
            ) from error
    return hub_tokenizer


def _without_added(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> PreTrainedTokenizerFast:
    """Drop added tokens beyond the head: reading a GGUF file adds an `<|endoftext|>` that models of
    other families never had, and no model has a row for.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < vocab_size]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )


class _GenerationTag(Extension):
    """Reads over `{% generation %}`, which marks what training learns from."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what stands inside of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Parses only, as transformers will: nothing is rendered by it.
_TEMPLATES = Environment(  # noqa: S701 - parsed only
    extensions=["jinja2.ext.loopcontrols", _GenerationTag], trim_blocks=True, lstrip_blocks=True
)
