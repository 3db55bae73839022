"""`Service`: owns the loop's thread, from readiness to drain.

Owns submission, health and shutdown. Which planner, runner and listeners run is `wiring`'s choice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from controller.policy.promise import Promise
from controller.policy.slo import MAX_TARGET_S, Slo, SloClass
from controller.runtime.generation import (
    GenerationRequest,
    ServedModel,
    ServiceHealth,
    Tokenizer,
)
from controller.runtime.streams import Stream, StreamHub
from engine.clock import Clock
from engine.loop import EngineLoop
from engine.request import FinishReason, Request

logger = logging.getLogger("paceline")

# A loop that was asked to try again although nothing could be planned: long enough not to burn a
# core, short enough for a queue's age bounds.
_RETRY_S = 0.05
# A device that fails this many steps in a row has failed for good.
_MAX_FAILURES = 5
# How long a stop waits for the step under way once it has ended everything else.
_LAST_STEP_S = 30.0
STOPPED = "the server was stopped"


@dataclass(frozen=True, slots=True)
class PromiseTerms:
    """The SLO classes on offer and the one for requests that name none."""

    classes: Mapping[str, SloClass]
    default: str

    def promise(self, request: GenerationRequest) -> Promise:
        """Merge the request's targets over its class's; KeyError on an unknown class."""
        slo_class = self.classes[request.slo_class or self.default]
        given, defaults = request.slo, slo_class.slo

        def pick(own: float | None, default: float | None) -> float | None:
            return default if own is None else own

        ttft_s = pick(given.ttft_s, defaults.ttft_s)
        if ttft_s is not None:
            ttft_s = min(ttft_s + request.ttft_extra_s, MAX_TARGET_S)
        slo = Slo(
            ttft_s=ttft_s,
            tpot_s=pick(given.tpot_s, defaults.tpot_s),
            e2e_s=pick(given.e2e_s, defaults.e2e_s),
        )
        return Promise(slo, slo_class, request.arrived_at, priority=request.priority)


class Service:
    """A running engine behind `submit`; implements `InferenceService`."""

    def __init__(
        self,
        loop: EngineLoop,
        hub: StreamHub,
        clock: Clock,
        model: ServedModel,
        tokenizer: Tokenizer,
        terms: PromiseTerms,
        *,
        run_id: str,
        on_abort: Callable[[tuple[Request, ...]], None],
        on_failure: Callable[[str], None],
        settle_in: Callable[[], None] = lambda: None,
        stuck_after_s: float = 120.0,
        last_step_s: float = _LAST_STEP_S,
    ) -> None:
        self._loop = loop
        self._hub = hub
        self._clock = clock
        self._model = model
        self._tokenizer = tokenizer
        self._terms = terms
        self._run_id = run_id
        self._on_abort = on_abort
        self._on_failure = on_failure
        self._settle_in = settle_in
        self._is_settled = threading.Event()
        self._stuck_after_s = stuck_after_s
        self._last_step_s = last_step_s
        self._numbers = itertools.count(1)
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_draining = False
        self._is_stopping = False
        self._abort_lock = threading.Lock()
        self._fatal: str | None = None
        self._failure: str | None = None
        self._is_hung = False
        # Set by the loop's thread once it will not touch the loop again outside `_abort`.
        self._is_over = False
        self._num_failures = 0
        self._last_progress_at = clock.now()

    @property
    def model(self) -> ServedModel:
        """What is served."""
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def run_id(self) -> str:
        """This server life in telemetry."""
        return self._run_id

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return self._loop.num_unfinished

    @property
    def failure(self) -> str | None:
        """Why the engine stopped though nobody asked it to, None if it did not."""
        return self._failure

    @property
    def is_hung(self) -> bool:
        """Whether the loop's thread was left behind inside a step: what it owns is not ours."""
        return self._is_hung

    def now(self) -> float:
        """Return monotonic seconds."""
        return self._clock.now()

    def start(self) -> None:
        """Start the loop's thread, and return once it has done what `settle_in` wants of it."""
        self._thread = threading.Thread(target=self._run, name="paceline-loop", daemon=True)
        self._thread.start()
        self._is_settled.wait()

    def submit(self, request: GenerationRequest) -> Stream:
        """Hand a request to the loop and return its stream; never blocks.

        KeyError on a class that the settings do not know.
        """
        request_id = f"{self._run_id}-{next(self._numbers)}"
        promise = self._terms.promise(request)
        if not self._loop.has_work:
            # Whoever asks right now must not find the idle time before this request.
            self._last_progress_at = self._clock.now()
        stream = Stream(request_id, asyncio.get_running_loop(), self._end)
        submitted = Request(
            request_id=request_id,
            prompt_token_ids=request.prompt_token_ids,
            max_tokens=request.max_tokens,
            arrived_at=request.arrived_at,
            sampling=request.sampling,
            promise=promise,
            cache_salt=request.cache_salt,
        )
        self._hub.register(stream, submitted)
        self._loop.submit(submitted)
        if self._is_over:
            # The loop's thread is gone: nobody else will end what was just handed in.
            self._abort()
        elif self._is_hung:
            self._hub.end_rest(self._fatal or STOPPED)
        self._wake.set()
        return stream

    def health(self) -> ServiceHealth:
        """Return liveness (dead or stuck: not live) and readiness (also not while draining)."""
        if self._fatal is not None:
            return ServiceHealth(False, False, f"the engine stopped: {self._fatal}")
        if self._thread is None:
            return ServiceHealth(True, False, "loading")
        if not self._thread.is_alive():
            return ServiceHealth(False, False, "the engine's thread has ended")
        if self._num_failures >= _MAX_FAILURES:
            return ServiceHealth(False, False, f"{self._num_failures} steps in a row have failed")
        idle_s = self._clock.now() - self._last_progress_at
        if self._loop.num_unfinished and idle_s > self._stuck_after_s:
            return ServiceHealth(False, False, f"no step has ended for {idle_s:.0f} s")
        if self._is_draining:
            return ServiceHealth(True, False, "draining")
        return ServiceHealth(True, True)

    def drain(self) -> None:
        """Refuse new requests; running ones go on."""
        self._is_draining = True
        self._loop.drain()
        self._wake.set()

    def stop(self, timeout_s: float) -> None:
        """Drain, give running requests `timeout_s` seconds, end the rest with ERROR, join.

        A step that then does not end is left behind with its thread (`is_hung`): a device that
        never answers must not keep the process.
        """
        self.drain()
        self._is_stopping = True
        self._wake.set()
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return
        self._fatal = self._fatal or STOPPED
        self._wake.set()
        self._thread.join(self._last_step_s)
        if self._thread.is_alive() and not self._is_hung:
            failure = f"the engine hangs: a step did not end within {self._last_step_s:.0f} s"
            logger.error("%s after the server was told to stop; it is left behind", failure)
            self._fatal = failure
            self._is_hung = True
            self._hub.end_rest(failure)
            self._fail(failure)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        self._loop.finish(request_id, reason)
        self._wake.set()

    def _run(self) -> None:
        failure: str | None = None
        try:
            try:
                self._settle_in()
            finally:
                self._is_settled.set()
            while True:
                # Cleared before the flags are read: whoever sets one wakes the thread afterwards.
                self._wake.clear()
                if self._fatal is not None or (self._is_stopping and not self._loop.has_work):
                    break
                report = self._loop.step()
                if report is None:
                    may_sleep = not (self._loop.has_work or self._is_stopping)
                    self._wake.wait(None if may_sleep else _RETRY_S)
                    # A pass that does nothing although somebody waits is not progress.
                    continue
                self._last_progress_at = self._clock.now()
                if report.is_executed:
                    self._num_failures = 0
                elif report.failure is not None:
                    self._num_failures += 1
        except Exception as error:
            logger.exception("the engine stopped")
            self._fatal = failure = f"{type(error).__name__}: {error}"
        if self._fatal is None:
            # Whoever slips in after the last look must get an ending too.
            self._fatal = STOPPED
        self._is_over = True
        self._abort()
        if failure is not None:
            self._fail(failure)

    def _fail(self, failure: str) -> None:
        """Remember and tell, once, that the engine has failed for good."""
        if self._failure is not None:
            return
        self._failure = failure
        try:
            self._on_failure(failure)
        except Exception:
            logger.exception("the engine's failure could not be recorded")

    def _abort(self) -> None:
        """End whatever is left after a fatal error; any thread, as the loop's is gone by then."""
        failure = self._fatal or "the engine stopped"
        ended: tuple[Request, ...] = ()
        with self._abort_lock:
            try:
                ended = self._loop.abort(failure)
            except Exception:
                # A device that is lost may not even forget a request; its readers must not wait.
                logger.exception("the engine could not end its requests")
        self._hub.end_all(ended)
        self._hub.end_rest(failure)
        try:
            self._on_abort(ended)
        except Exception:
            logger.exception("the ends of %d requests could not be recorded", len(ended))
