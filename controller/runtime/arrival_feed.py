"""`ArrivalFeed`: tells the planner's view of demand who arrived and who was turned away.

Owns that translation of a step's verdicts. Runs on the loop's thread: bounded arithmetic only.
"""

from __future__ import annotations

from collections.abc import Mapping

from controller.policy.admission import (
    CONTEXT_LENGTH,
    DRAINING,
    KV_NEVER_FITS,
    TPOT_UNREACHABLE,
    TTFT_UNREACHABLE,
)
from controller.policy.demand import Demand
from controller.runtime.feedback import promise_of
from engine.request import Request
from engine.step import AdmissionAction, StepReport

# Who hears these is nobody's burden, on no day.
_NEVER_SERVED = frozenset(
    (CONTEXT_LENGTH, KV_NEVER_FITS, TTFT_UNREACHABLE, TPOT_UNREACHABLE, DRAINING)
)


class ArrivalFeed:
    """Counts requests with promises when they are judged for the first time."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Observe who has a verdict; who is refused or degraded will take nobody's time, but may
        come back when it was told to.
        """
        verdicts = report.plan.admissions
        if len(verdicts) > 1:
            verdicts = tuple(sorted(verdicts, key=lambda a: requests[a.request_id].arrival_no))
        for admission in verdicts:
            request = requests[admission.request_id]
            if admission.retry_after_s is not None:
                at = report.started_at
                self._demand.returns.book(
                    at, at + admission.retry_after_s, request.num_prompt_tokens
                )
            promise = promise_of(request)
            if promise.slo.is_best_effort:
                continue
            if admission.reason not in _NEVER_SERVED:
                self._demand.observe(
                    promise.slo_class.name,
                    request.request_id,
                    request.arrival_no,
                    request.arrived_at,
                    request.num_prompt_tokens,
                    promise.slo,
                    promise.slo_class.weight,
                )
            if admission.action is AdmissionAction.REJECT or admission.is_degraded:
                self._demand.refuse(request.request_id)
