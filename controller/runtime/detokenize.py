"""Token ids to text, one token at a time, and where a stop string cuts it.

Owns the incremental detokenizer and the stop matcher of one stream. Must not know HTTP, an engine
or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most four bytes, so it is spread over at most four tokens that hold
text.
"""

NUM_CONTEXT_TOKENS = 6
MAX_WINDOW_TOKENS = 16


class Decoder(Protocol):
    """The half of a tokenizer that a detokenizer needs."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return text; incomplete UTF-8 at the end appears as U+FFFD."""
        ...


class Detokenizer:
    """Turns the tokens of one stream into pieces of text whose concatenation is the decoded output.

    Prefix-offset method: a short window of tokens is decoded together, and what it adds to the
    text already given out is the new piece; the tokens in front of the new one keep a tokenizer
    that strips or adds leading spaces honest. The window never exceeds `MAX_WINDOW_TOKENS`, so
    the work per token is bounded.

    Trailing U+FFFD are held back while they can still be a character whose bytes are spread over
    tokens, that is for at most `MAX_CHARACTER_TOKENS`; after that the bytes are really invalid
    and are shown, the last three excepted, which a later byte may complete. `flush()` gives out
    what is held.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        # The end of the prompt is context: without it a first token that begins a word would lose
        # its space.
        self._window, self._num_settled, self._settled = self._context_of(prompt_token_ids)
        self._num_pending = len(self._window) - self._num_settled
        self._text = self._read()
        # A character that the prompt leaves unfinished belongs to the token that finishes it.
        self._num_given = max(len(self._settled), len(self._text.rstrip(REPLACEMENT)))
        self._prompt_text = self._text

    def fork(self) -> Detokenizer:
        """Return an independent detokenizer in the same state."""
        twin = copy(self)
        twin._window = list(self._window)
        return twin

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is certain now, often one word, sometimes
        nothing.
        """
        self._window.append(token_id)
        text = self._read()
        has_changed = text != self._text
        self._text = text
        num_trailing = len(text) - len(text.rstrip(REPLACEMENT))
        if num_trailing == 0:
            piece = self._give(len(text))
            if has_changed:
                # Settled. The tokens of this piece stay as context, all of them: a tokenizer with
                # byte fallback decodes neighbouring byte tokens only as a whole run.
                self._restart(self._num_pending + 1)
            elif len(self._window) > MAX_WINDOW_TOKENS:
                # It adds nothing, now or later; the tokens with text are the better context.
                self._window.pop()
            self._num_pending = 0
            return piece
        self._num_pending += 1
        if self._num_pending >= MAX_CHARACTER_TOKENS:
            num_trailing = min(num_trailing, MAX_CHARACTER_TOKENS - 1)
        piece = self._give(len(text) - num_trailing)
        if len(self._window) > MAX_WINDOW_TOKENS:
            num_held = len(self._text) - self._num_given
            self._restart(MAX_CHARACTER_TOKENS)
            self._num_given = max(0, len(self._text) - num_held)
            # No token boundary is known between what is given and what is held.
            self._settled, self._num_settled = "", 0
        return piece

    def flush(self) -> str:
        """Return what is still held back; nothing can complete it any more."""
        return self._give(len(self._text))

    def _give(self, end: int) -> str:
        if end <= self._num_given:
            return ""
        if self._prompt_text and self._text.startswith(self._prompt_text):
            # Nothing finished what the prompt left: its U+FFFD are the prompt's.
            self._num_given = max(self._num_given, len(self._prompt_text))
        self._prompt_text = ""
        piece = self._text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        return piece

    def _restart(self, num_tokens: int) -> None:
        self._window = self._window[-num_tokens:]
        self._text = self._settled = self._decode(self._window)
        self._num_settled = len(self._window)
        self._num_given = len(self._text)
        self._prompt_text = ""

    def _read(self) -> str:
        """Decode the window; a settled character stays, whatever bytes follow it."""
        text = self._decode(self._window)
        if text.startswith(self._settled):
            return text
        # A run of byte tokens became invalid as a whole by a character that is not complete.
        return self._settled + self._decode(self._window[self._num_settled :])

    def _context_of(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], int, str]:
        """Return the end of the prompt, how many of its tokens are whole characters, and their
        text.

        A window that begins inside a character, or ends in one, decodes to U+FFFD there, and with
        byte fallback its whole run of byte tokens does. So up to three tokens are added in front
        and up to three at the end are left unsettled until both ends are clean. If they never are,
        the prompt's bytes are invalid and stand as they are.
        """
        num_prompt = len(prompt_token_ids)
        first = max(0, num_prompt - NUM_CONTEXT_TOKENS)
        for num_open in range(min(MAX_CHARACTER_TOKENS, num_prompt + 1)):
            end = num_prompt - num_open
            for start in range(first, max(-1, first - MAX_CHARACTER_TOKENS), -1):
                text = self._decode(prompt_token_ids[start:end])
                if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                    return list(prompt_token_ids[start:]), max(0, end - start), text
        window = list(prompt_token_ids[first:])
        return window, len(window), self._decode(window)

    def _decode(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class StopMatcher:
    """Cuts a stream of text before the earliest occurrence of any stop string.

    "Earliest" is by the first character, as in `min(text.find(stop))`, and does not depend on how
    the text was split into tokens: while a string that begins earlier can still be completed, a
    later one that is complete waits for it. Text is held back only while it is a proper prefix of
    a stop string.
    """

    def __init__(self, stop_strings: Sequence[str] = (), *, is_included: bool = False) -> None:
        if "" in stop_strings:
            raise ValueError("stop_strings must not hold an empty string")
        self._stops = tuple(stop_strings)
        self._is_included = is_included
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Take the next piece of text; return what is certain to stand before any stop string.

        `is_stopped` becomes True when a stop string is complete; what follows is thrown away.
        """
        if self.is_stopped:
            return ""
        self._held += text
        start = self._first_open_start()
        match = self._first_match()
        if match is not None and match[0] <= start:
            return self._cut(match)
        certain, self._held = self._held[:start], self._held[start:]
        return certain

    def skip(self, text: str) -> str:
        """Take text in which a stop string does not count (before `min_tokens`); return it with
        what was held.
        """
        certain, self._held = self._held + text, ""
        return certain

    def flush(self) -> str:
        """Return what is held back at the end of the text, up to a stop string that waited for an
        earlier one.
        """
        if self.is_stopped:
            return ""
        match = self._first_match()
        if match is not None:
            return self._cut(match)
        certain, self._held = self._held, ""
        return certain

    def _cut(self, match: tuple[int, int]) -> str:
        certain = self._held[: match[1] if self._is_included else match[0]]
        self._held = ""
        self.is_stopped = True
        return certain

    def _first_match(self) -> tuple[int, int] | None:
        """Start and end of the earliest complete stop string; the shortest of those that begin
        together.
        """
        found = [(self._held.find(stop), len(stop)) for stop in self._stops]
        matches = [(start, start + length) for start, length in found if start >= 0]
        return min(matches, default=None)

    def _first_open_start(self) -> int:
        """Where the longest suffix begins that is a proper prefix of a stop string; the length if
        there is none.
        """
        held = self._held
        first = len(held)
        for stop in self._stops:
            start = held.find(stop[0], max(0, len(held) - len(stop) + 1), first)
            while start >= 0:
                if stop.startswith(held[start:]):
                    first = start
                    break
                start = held.find(stop[0], start + 1, first)
        return first
