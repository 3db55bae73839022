"""The prompt as it is repeated in front of a completion (`echo`): its text, and where each token
begins in it.

Owns that one reading of a prompt. Must not know scores, JSON or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controller.runtime.detokenize import Detokenizer
from controller.runtime.generation import Tokenizer


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt's text and the character at which each of its tokens begins.

    A prompt of token ids may end inside a character: `text` is then without it, and `detokenizer`,
    to be forked for each completion, gives it out with the tokens that finish it. None for a prompt
    that came as text.
    """

    text: str
    offsets: tuple[int, ...]
    detokenizer: Detokenizer | None = None


def echo_of_ids(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
    is_all: bool,
) -> EchoedPrompt:
    """Read a prompt of token ids; `is_all` says that no token will follow."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    offsets: list[int] = []
    pieces: list[str] = []
    num_chars = 0
    for token_id in token_ids:
        offsets.append(num_chars)
        piece = detokenizer.push(token_id)
        pieces.append(piece)
        num_chars += len(piece)
    if is_all:
        pieces.append(detokenizer.flush())
    return EchoedPrompt("".join(pieces), tuple(offsets), detokenizer)


def echo_of_text(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> EchoedPrompt:
    """Repeat a prompt that came as `text`, exactly.

    Some tokenizers lose or add a space in front, or normalise characters: the offsets are then
    those of the decoded text moved by what is missing in front, and never beyond the text.
    """
    decoded = echo_of_ids(tokenizer, token_ids, skip_special_tokens=True, is_all=True)
    shift = len(text) - len(decoded.text)
    is_suffix = text.endswith(decoded.text) if shift >= 0 else decoded.text.endswith(text)
    if not is_suffix:
        shift = 0
    moved = (min(max(0, offset + shift), len(text)) for offset in decoded.offsets)
    offsets = list(moved)
    if offsets:
        # Whatever stands in front of the first decoded character belongs to the first token.
        offsets[0] = 0
    return EchoedPrompt(text, tuple(offsets))
