"""`Tally`: a handful of counters for the status line.

Owns plain integers, written on the loop's thread and read by others without a lock: each is
replaced as a whole, and a line that is one step old harms nobody.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.request import FinishReason, Request
from engine.step import StepReport


class Tally:
    """Counts steps, tokens and endings; remembers the last step's queue and pool. A listener."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0
        self.num_finished = 0
        self.num_refused = 0
        self.num_running = 0
        self.num_waiting = 0
        self.num_blocks_used = 0

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Take one step's report."""
        self.num_steps += report.is_executed
        self.num_tokens += len(report.tokens)
        for request_id in report.finished:
            if requests[request_id].finish_reason is FinishReason.REJECTED:
                self.num_refused += 1
            else:
                self.num_finished += 1
        self.num_running = report.num_running
        self.num_waiting = report.num_waiting + report.num_preempted
        self.num_blocks_used = report.num_blocks_used
