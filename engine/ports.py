"""The holes the loop calls through: `Planner` decides, `ModelRunner` executes, `StepListener`
watches.

Owns protocols and the frozen view a planner sees. Must not hold an implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.request import Request, RequestPhase
from engine.step import Admission, StepOutput, StepPlan, StepReport


class RequestView(Protocol):
    """What a planner may read of a request (a live `Request`, seen read-only)."""

    @property
    def request_id(self) -> str: ...
    @property
    def promise(self) -> object | None: ...
    @property
    def phase(self) -> RequestPhase: ...
    @property
    def arrived_at(self) -> float: ...
    @property
    def arrival_no(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_known_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_remaining_tokens(self) -> int: ...
    @property
    def is_decoding(self) -> bool: ...
    @property
    def block_table(self) -> Sequence[int]: ...
    @property
    def host_block_table(self) -> Sequence[int]: ...
    @property
    def admission(self) -> Admission | None: ...
    @property
    def admitted_at(self) -> float | None: ...
    @property
    def first_token_at(self) -> float | None: ...
    @property
    def last_token_at(self) -> float | None: ...
    @property
    def num_preemptions(self) -> int: ...


def _held_once(block: int) -> int:
    return 1


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine as a planner sees it at the start of a step; the collections are live and must not
    be changed.

    `waiting` is in arrival order, `running` in order of admission, `preempted` in order of
    preemption. Free blocks exclude those that running requests hold; blocks that only the prefix
    cache remembers are free. `num_holders(block)` says how many running requests hold a block: a
    waiting or preempted request whose table names cached blocks takes those that nobody holds from
    the free ones when it starts, beside the ones that it has to fill. A swapped request
    (`host_block_table`) takes as many as it left. `num_free_host_blocks` bounds what a plan may
    swap.
    """

    now: float
    step_no: int
    waiting: Collection[RequestView]
    running: Collection[RequestView]
    preempted: Collection[RequestView]
    num_free_blocks: int
    num_total_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting_requests: int
    is_draining: bool = False
    num_free_host_blocks: int = 0
    num_holders: Callable[[int], int] = _held_once


class Planner(Protocol):
    """Chooses the next step. Planning changes nothing: the same view gives the same plan."""

    def plan(self, view: EngineView) -> StepPlan:
        """Return the next step; empty work means that nothing can or need be computed now."""
        ...


class DeviceLostError(RuntimeError):
    """The device is gone for good (a CUDA context after a fault, say): no request can go on."""


class ModelRunner(Protocol):
    """Executes a plan on a device (or pretends to, in the simulator)."""

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        """Compute the plan's work in ONE forward pass and sample where a request's known tokens are
        complete; score prompt tokens for requests that ask.

        `requests` maps every id in `plan.work` to its request, whose block table already covers the
        work. Must not change a request, and executing the same work again gives the same tokens:
        after an exception the loop runs parts of the plan to find whose fault it was. Raises
        DeviceLostError when trying again is pointless.
        """
        ...

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy the KV of `blocks` to `host_blocks` (same length) before anything else is written.

        Returns once the device blocks may be overwritten.
        """
        ...

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy the KV of `host_blocks` back to `blocks` (same length) before the next execute."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop per-request state (random generator, penalties); unknown ids are ignored."""
        ...


class StepListener(Protocol):
    """Hears of every step after commit, on the loop's thread: must be quick and must not block."""

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Receive a report; `requests` holds every request that the report names.

        Finished ones included.
        """
        ...
