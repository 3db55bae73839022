"""Was it the spike? Every way in which a run may have measured something else.

Owns the checks between a run and its quotation. Must not measure: a violation is a value with a
reason, and a run that has one is never shown as a number.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from controller.bench.record import SpikeRun, numbers_of
from controller.bench.series import RequestSeries


class ViolationKind(enum.StrEnum):
    """In what respect a run was not the scenario."""

    FAILED_REQUEST = "failed_request"
    WRONG_PROMPT = "wrong_prompt"
    CACHED_PROMPT = "cached_prompt"
    TOKENS_MISSING = "tokens_missing"
    BROKEN_PROMISE = "broken_promise"
    NOT_DECODING = "not_decoding"
    NOT_OUTLASTING = "not_outlasting"
    TOO_FEW_READS = "too_few_reads"
    SERVER_FAILED = "server_failed"
    LATE_CLIENT = "late_client"
    MACHINE_CHANGED = "machine_changed"


@dataclass(frozen=True, slots=True)
class Violation:
    """One reason not to quote a run; `message` is a line for the person who started it."""

    kind: ViolationKind
    message: str


def violations(run: SpikeRun) -> tuple[Violation, ...]:
    """Return every reason not to quote `run`; empty for a valid one."""
    found = tuple(_violations(run))
    if not found:
        try:
            numbers_of(run)
        except ValueError as exc:
            return (Violation(ViolationKind.TOO_FEW_READS, str(exc)),)
    return found


def _violations(run: SpikeRun) -> Iterator[Violation]:
    scenario = run.scenario
    if len(run.shorts) != scenario.num_short:
        yield Violation(
            ViolationKind.NOT_DECODING,
            f"{len(run.shorts)} short requests ran, the scenario has {scenario.num_short}",
        )
    for series in run.shorts:
        yield from check_request(series, scenario.short_prompt_tokens, scenario.short_max_tokens)
    if run.long is None:
        # Streams that ran to their full length were only too short; others broke off.
        are_complete = all(series.finish_reason == "length" for series in run.shorts)
        yield Violation(
            ViolationKind.NOT_OUTLASTING if are_complete else ViolationKind.NOT_DECODING,
            "the long prompt was never sent: a short request ended before each had received"
            f" {scenario.warm_tokens} tokens",
        )
        return
    yield from check_request(run.long, scenario.long_prompt_tokens, scenario.long_max_tokens)
    for series in run.shorts:
        yield from _check_overlap(series, run.long, scenario.warm_tokens)


def check_request(
    series: RequestSeries, num_prompt_tokens: int, max_tokens: int
) -> Iterator[Violation]:
    """Check one stream by itself: complete, of the right size, computed rather than cached.

    Yields every reason not to count it.
    """
    name = series.name
    if series.error is not None:
        yield Violation(ViolationKind.FAILED_REQUEST, f"{name} failed: {series.error}")
        return
    if series.decision not in {None, "admitted"}:
        yield Violation(
            ViolationKind.BROKEN_PROMISE,
            f"{name} was {series.decision}: it ran without the promise that the scenario asks for",
        )
    if series.server_prompt_tokens != num_prompt_tokens:
        yield Violation(
            ViolationKind.WRONG_PROMPT,
            f"{name}: the server counted {series.server_prompt_tokens} prompt tokens,"
            f" the scenario has {num_prompt_tokens}",
        )
    if series.server_cached_tokens:
        yield Violation(
            ViolationKind.CACHED_PROMPT,
            f"{name}: {series.server_cached_tokens} prompt tokens came from a cache",
        )
    if series.num_output_tokens != series.server_output_tokens:
        yield Violation(
            ViolationKind.TOKENS_MISSING,
            f"{name}: the server counted {series.server_output_tokens} output tokens, the client"
            f" saw {series.num_output_tokens} come",
        )
    if series.num_output_tokens != max_tokens or series.finish_reason != "length":
        yield Violation(
            ViolationKind.TOKENS_MISSING,
            f"{name} ended after {series.num_output_tokens} of {max_tokens} tokens"
            f" (finish_reason {series.finish_reason})",
        )


def _check_overlap(
    short: RequestSeries, long: RequestSeries, warm_tokens: int
) -> Iterator[Violation]:
    """Check that `short` was decoding from the arrival of the long prompt to its first token."""
    num_before = sum(read.num_tokens for read in short.reads if read.at <= long.sent_at)
    if num_before < warm_tokens:
        yield Violation(
            ViolationKind.NOT_DECODING,
            f"{short.name} had received {num_before} of {warm_tokens} tokens when the long prompt"
            " arrived",
        )
    elif num_before == short.num_output_tokens:
        yield Violation(
            ViolationKind.NOT_DECODING, f"{short.name} had ended when the long prompt arrived"
        )
    elif (
        short.last_token_at is not None
        and long.first_token_at is not None
        and short.last_token_at <= long.first_token_at
    ):
        yield Violation(
            ViolationKind.NOT_OUTLASTING,
            f"{short.name} had ended when the long prompt's first token came",
        )
