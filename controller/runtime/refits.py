"""Refits of the cost model in the background, and their handover.

Owns the thread. The model itself is touched on the loop's thread only, in `on_step`: a job leaves
as copies, an answer comes back through a slot.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Protocol

from costmodel.refit import Refit, RefitJob, load_solver
from engine.request import Request
from engine.step import StepReport

logger = logging.getLogger("paceline")

# Samples between two refits, and before the first one.
REFIT_EVERY = 250
FIRST_REFIT = 120


class RefittableModel(Protocol):
    """What refits need of a cost model."""

    @property
    def num_remembered(self) -> int:
        """Samples that were ever kept for a refit."""
        ...

    def refit_job(self) -> RefitJob | None:
        """Return copies of all that a refit needs; None while too little is known."""
        ...

    def adopt(self, refit: Refit) -> bool:
        """Go on from what a refit found; False if it is no better, or stale."""
        ...


class AdoptionListener(Protocol):
    """Hears of coefficients that were replaced, on the loop's thread."""

    def __call__(self, refit: Refit, report: StepReport) -> None:
        """Receive the refit and the step after which it took effect."""
        ...


class Refitter:
    """A `StepListener` that lends the model's window to a thread, one refit at a time.

    `start()` begins the thread; tests drive `pump()` instead.
    """

    def __init__(
        self,
        model: RefittableModel,
        on_adopted: AdoptionListener,
        *,
        first: int = FIRST_REFIT,
        every: int = REFIT_EVERY,
    ) -> None:
        self._model = model
        self._on_adopted = on_adopted
        self._every = every
        self._due_at = model.num_remembered + first
        self._job: RefitJob | None = None
        self._answer: Refit | None = None
        self._is_busy = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.num_refits = 0
        self.num_failures = 0

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Take over an answer that has come, and hand out the next job when it is due."""
        answer = self._answer
        if answer is not None:
            self._answer = None
            self._is_busy = False
            if self._model.adopt(answer):
                self._on_adopted(answer, report)
        if self._is_busy or self._model.num_remembered < self._due_at:
            return
        self._due_at = self._model.num_remembered + self._every
        job = self._model.refit_job()
        if job is None:
            return
        self._is_busy = True
        with self._changed:
            self._job = job
            self._changed.notify()

    def start(self) -> None:
        """Load the solver, then start the thread.

        Here, not on the thread: an import holds up the loop's thread for a second, in which the
        first promises would be broken and the model would be taught a step that never was.
        """
        load_solver()
        self._thread = threading.Thread(target=self._loop, name="refits", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread; a refit under way is waited for, up to `timeout_s` seconds."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def pump(self) -> bool:
        """Run the job that waits, if there is one; False if there is none. Never raises."""
        with self._changed:
            job, self._job = self._job, None
        if job is None:
            return False
        try:
            refit = job.run()
        except Exception:
            # The step path goes on with what it has; the next window may be a better one.
            logger.exception("a refit of the cost model failed")
            self.num_failures += 1
            self._is_busy = False
            return True
        self.num_refits += 1
        self._answer = refit
        return True

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._job is not None)
                if self._is_closed:
                    return
            self.pump()
