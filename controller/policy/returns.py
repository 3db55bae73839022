"""When those are to come back who are refused: one after another, not all at once.

Owns the instants that were given away (`Returns`) and the search for the next one (`spread`). Must
not decide who is refused, nor when the queue has drained.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Mapping, Sequence

from engine.step import Admission

# Instants that are remembered, and until when they are kept apart: not everybody comes back, what
# the load is by then nobody knows, and OpenAI's clients follow no retry-after beyond a minute.
_REMEMBERED = 512
_LONGEST_S = 60.0


class Returns:
    """Instants at which refused requests were told to come back, and their prompt tokens.

    Fed by the runtime, read by planners.
    """

    def __init__(self) -> None:
        self._told: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)

    def book(self, at: float, num_tokens: int) -> None:
        """Remember that a prompt of so many tokens was told to come back at instant `at`."""
        self._told.append((at, num_tokens))

    def spans(self, now: float, token_s: float) -> list[tuple[float, float]]:
        """Return from when to when they will be computed, in seconds from `now`, the first ones
        first, at `token_s` seconds a token.
        """
        spans = [(at - now, at - now + num * token_s) for at, num in self._told]
        return sorted(span for span in spans if span[1] > 0.0)


def spread(
    verdicts: Sequence[Admission],
    num_tokens: Mapping[str, int],
    token_s: float,
    spans: Sequence[tuple[float, float]],
) -> list[Admission]:
    """Return the verdicts with each retry-after moved behind those before it and those who were
    told already (`spans`), so that everybody finds the room that it was told of, if nobody else
    comes.

    `num_tokens` are the prompts' by request id. Who has room earlier is told so: gaps are filled.
    """
    taken = list(spans)
    told: list[Admission] = []
    for verdict in verdicts:
        if verdict.retry_after_s is None:
            told.append(verdict)
            continue
        needed_s = num_tokens[verdict.request_id] * token_s
        latest_s = max(verdict.retry_after_s, _LONGEST_S)
        at = min(_first_gap(taken, verdict.retry_after_s, needed_s), latest_s)
        bisect.insort(taken, (at, at + needed_s))
        told.append(
            Admission(
                verdict.request_id,
                verdict.action,
                verdict.reason,
                verdict.message,
                predicted_ttft_s=verdict.predicted_ttft_s,
                retry_after_s=at,
            )
        )
    return told


def _first_gap(taken: Sequence[tuple[float, float]], from_s: float, needed_s: float) -> float:
    """Return from when on `needed_s` seconds are free, not before `from_s`."""
    for start_s, end_s in taken:
        if start_s >= from_s + needed_s:
            break
        from_s = max(from_s, end_s)
    return from_s
