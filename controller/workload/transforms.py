"""Workloads from workloads: faster, shorter, a part, with other classes, several as one.

Owns pure functions that return a new `Workload`; the one given is never changed. Must not read a
file. Names stay, except where several become one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from controller.workload.arrivals import Arrival, Workload, sorted_workload
from controller.workload.draws import (
    check_count,
    check_not_negative,
    check_positive,
    rng_for,
    shares_of,
)


def scale_rate(workload: Workload, factor: float) -> Workload:
    """Compress time: `factor` times as many requests per second, in the same pattern.

    ValueError unless `factor` is a positive number.
    """
    check_positive("factor", factor)
    return _with(workload, (replace(a, at_s=a.at_s / factor) for a in workload.arrivals))


def with_rate(workload: Workload, rate: float) -> Workload:
    """Compress time to a mean of `rate` requests per second.

    ValueError unless `rate` is a positive number, and for a workload without a rate of its own
    (empty, or all at its start).
    """
    check_positive("rate", rate)
    if workload.rate == 0.0:
        raise ValueError(f"workload {workload.name!r} has no rate that could be scaled")
    return scale_rate(workload, rate / workload.rate)


def window(workload: Workload, start_s: float, end_s: float = math.inf) -> Workload:
    """Keep the arrivals of [start_s, end_s); their times count from `start_s`.

    ValueError unless 0 ≤ start_s < end_s.
    """
    check_not_negative("start_s", start_s)
    if not end_s > start_s:
        raise ValueError(f"end_s must be after start_s = {start_s}, got {end_s}")
    kept = (a for a in workload.arrivals if start_s <= a.at_s < end_s)
    return _with(workload, (replace(a, at_s=a.at_s - start_s) for a in kept))


def take(workload: Workload, num_requests: int) -> Workload:
    """Keep the first `num_requests` (all, if there are fewer); ValueError if it is below 1."""
    check_count("num_requests", num_requests)
    return _with(workload, workload.arrivals[:num_requests])


def jitter(workload: Workload, quantum_s: float, seed: int) -> Workload:
    """Add to every arrival a uniform draw from [0, quantum_s), and sort again.

    For arrivals that were written down in ticks of `quantum_s` seconds. ValueError unless it is a
    number that is not negative.
    """
    check_not_negative("quantum_s", quantum_s)
    added_s = (rng_for("jitter", seed).random(workload.num_requests) * quantum_s).tolist()
    moved = (
        replace(a, at_s=a.at_s + more_s)
        for a, more_s in zip(workload.arrivals, added_s, strict=True)
    )
    return sorted_workload(workload.name, moved)


def assign_classes(workload: Workload, mix: Mapping[str, float], seed: int) -> Workload:
    """Give every request a class of `mix` at random, `{name: share}`, whatever its length.

    Shares are relative. ValueError names what is wrong with the mix.
    """
    names, shares = shares_of("mix", mix)
    drawn = rng_for("classes", seed).choice(len(names), size=workload.num_requests, p=shares)
    return _classed(workload, (names[index] for index in drawn.tolist()))


def assign_classes_by_length(
    workload: Workload, mix: Mapping[str, float], seed: int, *, correlation: float = 1.0
) -> Workload:
    """Give the shortest prompts the first class of `mix`, `{name: share}`, longer ones the next.

    Requests are ranked by correlation·(rank of the prompt's length) + (1 − correlation)·(random
    rank), so that 1 sorts by length alone and 0 ignores it; the shares are met to within one
    request in either case. Equal prompts are ranked at random. ValueError names the mix, or a
    `correlation` outside [0, 1].
    """
    names, shares = shares_of("mix", mix)
    if not 0.0 <= correlation <= 1.0:
        raise ValueError(f"correlation must be in [0, 1], got {correlation!r}")
    num_requests = workload.num_requests
    random_ranks = rng_for("classes by length", seed).permutation(num_requests)
    lengths = np.array([a.num_prompt_tokens for a in workload.arrivals], dtype=np.int64)
    length_ranks = _ranks(np.lexsort((random_ranks, lengths)))
    scores = correlation * length_ranks + (1.0 - correlation) * random_ranks
    ranks = _ranks(np.lexsort((random_ranks, scores)))
    bounds = np.rint(np.cumsum(shares) * num_requests)
    # The last bound is all of them, whatever the sum of the shares was rounded to.
    chosen = np.minimum(np.searchsorted(bounds, ranks, side="right"), len(names) - 1)
    return _classed(workload, (names[index] for index in chosen.tolist()))


def classes_by_prompt(workload: Workload, bounds: Mapping[str, float]) -> Workload:
    """Give each request the first class whose bound its prompt does not exceed, in tokens.

    `{"chat": 512, "code": 4096, "batch": math.inf}`, for example. ValueError unless the bounds
    ascend, and for a prompt that exceeds the last one.
    """
    if not bounds:
        raise ValueError("bounds must name at least one class")
    if not all(low < high for low, high in itertools.pairwise(bounds.values())):
        raise ValueError(f"bounds must ascend, got {dict(bounds)!r}")
    names, limits = tuple(bounds), tuple(bounds.values())

    def class_of(arrival: Arrival) -> str:
        for name, limit in zip(names, limits, strict=True):
            if arrival.num_prompt_tokens <= limit:
                return name
        raise ValueError(
            f"bounds must reach every prompt: one of {arrival.num_prompt_tokens} tokens exceeds "
            f"the last, {limits[-1]!r} (math.inf takes all)"
        )

    return _classed(workload, (class_of(arrival) for arrival in workload.arrivals))


def scale_lengths(workload: Workload, *, prompt: float = 1.0, output: float = 1.0) -> Workload:
    """Multiply prompt and output lengths, rounded, at least one token.

    Blocks of shared prefixes are scaled with the prompts, so that the same share of them stays
    equal. ValueError unless both factors are positive numbers.
    """
    check_positive("prompt", prompt)
    check_positive("output", output)
    return _with(
        workload,
        (
            _resized(
                a,
                num_prompt_tokens=_scaled(a.num_prompt_tokens, prompt),
                num_output_tokens=_scaled(a.num_output_tokens, output),
                prefix_block_tokens=_scaled(a.prefix_block_tokens, prompt)
                if a.prefix_ids
                else a.prefix_block_tokens,
            )
            for a in workload.arrivals
        ),
    )


def clip_lengths(workload: Workload, max_model_len: int) -> Workload:
    """Cut requests down to a context of `max_model_len` tokens, prompt and output together.

    The answer keeps up to half of the context, the prompt the rest: a prompt that filled it all
    would leave nothing to generate. Requests that fit stay as they are; prompts lose their end.
    ValueError if `max_model_len` is below 2.
    """
    check_count("max_model_len", max_model_len, 2)

    def clipped(arrival: Arrival) -> Arrival:
        if arrival.num_prompt_tokens + arrival.num_output_tokens <= max_model_len:
            return arrival
        num_output = min(arrival.num_output_tokens, max_model_len // 2)
        num_prompt = min(arrival.num_prompt_tokens, max_model_len - num_output)
        return _resized(
            arrival,
            num_prompt_tokens=num_prompt,
            # A short prompt leaves the answer more than half.
            num_output_tokens=min(arrival.num_output_tokens, max_model_len - num_prompt),
            prefix_block_tokens=arrival.prefix_block_tokens,
        )

    return _with(workload, map(clipped, workload.arrivals))


def drop_too_long(workload: Workload, max_model_len: int) -> Workload:
    """Leave out requests whose prompt and output exceed a context of `max_model_len` tokens.

    ValueError if `max_model_len` is below 2.
    """
    check_count("max_model_len", max_model_len, 2)
    return _with(
        workload,
        (
            a
            for a in workload.arrivals
            if a.num_prompt_tokens + a.num_output_tokens <= max_model_len
        ),
    )


def merge(
    *workloads: Workload, name: str | None = None, is_prefix_shared: bool = False
) -> Workload:
    """Run several workloads at once, all from the same start; at one instant the first goes first.

    Block ids of different workloads name different blocks, unless `is_prefix_shared` says that they
    come from one source. ValueError without a workload.
    """
    if not workloads:
        raise ValueError("workloads must not be empty")
    merged: list[Arrival] = []
    next_id = 0
    for workload in workloads:
        offset = 0 if is_prefix_shared else next_id
        for arrival in workload.arrivals:
            if not arrival.prefix_ids:
                merged.append(arrival)
                continue
            ids = tuple(block + offset for block in arrival.prefix_ids)
            next_id = max(next_id, *(block + 1 for block in ids))
            merged.append(replace(arrival, prefix_ids=ids) if offset else arrival)
    return sorted_workload(name or " + ".join(w.name for w in workloads), merged)


def _with(workload: Workload, arrivals: Iterable[Arrival]) -> Workload:
    return Workload(workload.name, tuple(arrivals))


def _classed(workload: Workload, classes: Iterable[str]) -> Workload:
    return _with(
        workload,
        (replace(a, slo_class=c) for a, c in zip(workload.arrivals, classes, strict=True)),
    )


def _ranks(order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray:
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    return ranks


def _scaled(num_tokens: int, factor: float) -> int:
    return max(1, round(num_tokens * factor))


def _resized(
    arrival: Arrival, *, num_prompt_tokens: int, num_output_tokens: int, prefix_block_tokens: int
) -> Arrival:
    """Change lengths, and drop the ids of blocks that the prompt no longer reaches."""
    num_blocks = -(-num_prompt_tokens // prefix_block_tokens)
    return replace(
        arrival,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        prefix_ids=arrival.prefix_ids[:num_blocks],
        prefix_block_tokens=prefix_block_tokens,
    )
