"""From token times to numbers: gaps, TTFT, tokens per second. Pure functions of recorded instants.

Owns the arithmetic and the frozen record of one stream. Must not read a clock or send anything.
Every instant is in seconds on the client's clock, taken when bytes were received.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRead:
    """Tokens that became visible to the client in one read from the socket; `num_tokens` ≥ 1."""

    at: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestSeries:
    """What the client saw of one request.

    `sent_at` is taken before the request is written: the arrival, in an open loop. Counts under
    `server_` are those the server reported (None = not reported). `decision` is the server's
    `x-slo-decision`. `error` is one line, None for a stream that ended as it should. `text` is what
    was generated, None where the server sends none. `status` is that of HTTP, None without an
    answer; `dropped_reason` and `retry_after_s` (seconds) are what a refusal said of itself.
    """

    name: str
    sent_at: float
    reads: tuple[TokenRead, ...] = ()
    finish_reason: str | None = None
    server_prompt_tokens: int | None = None
    server_cached_tokens: int | None = None
    server_output_tokens: int | None = None
    decision: str | None = None
    error: str | None = None
    text: str | None = None
    status: int | None = None
    dropped_reason: str | None = None
    retry_after_s: float | None = None

    @property
    def first_token_at(self) -> float | None:
        """Instant of the first token; None if none came."""
        return self.reads[0].at if self.reads else None

    @property
    def last_token_at(self) -> float | None:
        """Instant of the last token; None if none came."""
        return self.reads[-1].at if self.reads else None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token from arrival, queue and connection included; None if none came."""
        return self.reads[0].at - self.sent_at if self.reads else None

    @property
    def num_output_tokens(self) -> int:
        """Tokens received."""
        return sum(read.num_tokens for read in self.reads)

    @property
    def num_merged_reads(self) -> int:
        """Reads that delivered several tokens: the client could not tell their times apart."""
        return sum(read.num_tokens > 1 for read in self.reads)


@dataclass(frozen=True, slots=True)
class Gap:
    """Silence of one stream between two reads that follow each other."""

    name: str
    start_at: float
    end_at: float

    @property
    def duration_s(self) -> float:
        """Length of the silence in seconds."""
        return self.end_at - self.start_at

    def spans(self, at: float) -> bool:
        """Whether the silence had begun by `at` and lasted beyond it."""
        return self.start_at <= at < self.end_at


def gaps(series: RequestSeries) -> list[Gap]:
    """Return every gap of the stream, in order: one fewer than its reads.

    Tokens of one read count once: zeros between them would be an invention that pulls the median
    down.
    """
    return [Gap(series.name, a.at, b.at) for a, b in itertools.pairwise(series.reads)]


def largest_gap(streams: Iterable[RequestSeries]) -> Gap | None:
    """Return the longest gap of all streams, warm-up and arrival included; None without a gap."""
    every = (gap for series in streams for gap in gaps(series))
    return max(every, key=lambda gap: gap.duration_s, default=None)


def all_streaming_at(streams: Sequence[RequestSeries]) -> float | None:
    """Return the instant from which every stream had its first token; None if one never did."""
    firsts = [series.first_token_at for series in streams]
    known = [at for at in firsts if at is not None]
    return max(known) if known and len(known) == len(firsts) else None


def normal_gap_s(streams: Sequence[RequestSeries], until: float) -> float | None:
    """Return the median gap from when all are streaming up to `until`; None without one.

    Only gaps that lie wholly inside count, so that neither another stream's prefill nor the spike
    can pose as normal.
    """
    since = all_streaming_at(streams)
    if since is None:
        return None
    steady = [
        gap.duration_s
        for series in streams
        for gap in gaps(series)
        if gap.start_at >= since and gap.end_at <= until
    ]
    return statistics.median(steady) if steady else None


def tokens_per_second(streams: Sequence[RequestSeries]) -> float | None:
    """Return output tokens of all streams per second, first arrival to last token; None if 0 s."""
    lasts = [series.last_token_at for series in streams if series.last_token_at is not None]
    if not lasts:
        return None
    span_s = max(lasts) - min(series.sent_at for series in streams)
    return sum(series.num_output_tokens for series in streams) / span_s if span_s > 0 else None
