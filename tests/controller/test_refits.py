"""Refits: jobs leave as copies, answers come back on the loop's thread, failures cost nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from controller.runtime.refits import Refitter
from costmodel.features import StepFeatures
from costmodel.prior import flat_prior
from costmodel.refit import Refit, RefitJob
from costmodel.refitted import RefittedLeastSquares
from costmodel.synthetic import TWO_CORES, synthetic_steps
from engine.step import StepPlan, StepReport

STEPS = synthetic_steps(TWO_CORES, 4)


def a_report(step_no: int = 7) -> StepReport:
    return StepReport(step_no, 1.0, 0.5, 0.0, 0.5, StepPlan(), True, 0, 0, 0, 0, 1)


class Told:
    def __init__(self) -> None:
        self.refits: list[tuple[Refit, int]] = []

    def __call__(self, refit: Refit, report: StepReport) -> None:
        self.refits.append((refit, report.step_no))


def a_spoilt_model(count: int = 200) -> RefittedLeastSquares:
    """A model that has seen enough, and has forgotten what decodes cost."""
    model = flat_prior(RefittedLeastSquares)
    for _ in range(count):
        step = next(STEPS)
        model.observe(step.features, step.measured_s)
    for index, plane in enumerate(model._planes):
        model._install(index, type(plane)(plane.coefficients * 1.25))
    return model


def test_a_better_fit_is_taken_over_at_the_next_step() -> None:
    model, told = a_spoilt_model(), Told()
    refitter = Refitter(model, told, first=0, every=50)
    refitter.on_step(a_report(), {})
    assert model.num_adopted == 0
    assert refitter.pump()
    assert model.num_adopted == 0, "the thread must not touch the model"
    refitter.on_step(a_report(8), {})
    assert model.num_adopted == 1
    ((refit, step_no),) = told.refits
    assert step_no == 8
    assert refit.error < refit.current_error
    assert not refitter.pump()


def test_one_refit_at_a_time_and_only_when_due() -> None:
    model, told = a_spoilt_model(), Told()
    refitter = Refitter(model, told, first=10, every=30)
    for _ in range(9):
        model.observe(StepFeatures(0.0, 1.0, 40.0), 0.1)
        refitter.on_step(a_report(), {})
    assert not refitter.pump()
    for _ in range(90):
        model.observe(StepFeatures(0.0, 1.0, 40.0), 0.1)
        refitter.on_step(a_report(), {})
    assert refitter.pump()
    assert not refitter.pump(), "the next one waits for this answer to be taken over"
    refitter.on_step(a_report(), {})
    assert refitter.pump(), "by then the next one is due"


def test_too_little_is_no_job() -> None:
    refitter = Refitter(flat_prior(RefittedLeastSquares), Told(), first=0)
    refitter.on_step(a_report(), {})
    assert not refitter.pump()


def test_a_refit_that_fails_is_counted_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = a_spoilt_model()
    refitter = Refitter(model, Told(), first=0, every=1)
    run = RefitJob.run

    def broken(self: RefitJob) -> Refit:
        raise ValueError("no convergence")

    monkeypatch.setattr(RefitJob, "run", broken)
    refitter.on_step(a_report(), {})
    assert refitter.pump()
    assert (refitter.num_failures, refitter.num_refits) == (1, 0)
    assert "a refit of the cost model failed" in caplog.text
    monkeypatch.setattr(RefitJob, "run", run)
    model.observe(StepFeatures(0.0, 1.0, 40.0), 0.1)
    refitter.on_step(a_report(), {})
    assert refitter.pump()
    assert refitter.num_refits == 1


def test_the_thread_runs_jobs_and_ends_when_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = threading.Event()
    threads: list[str] = []

    def recorded(self: RefitJob) -> Any:
        threads.append(threading.current_thread().name)
        ran.set()
        return Refit(self.planes, 0.1, 0.1, 10, False, self.epoch)

    monkeypatch.setattr(RefitJob, "run", recorded)
    refitter = Refitter(a_spoilt_model(), Told(), first=0)
    refitter.start()
    refitter.on_step(a_report(), {})
    assert ran.wait(60.0)
    refitter.close(60.0)
    assert threads == ["refits"]
    assert not any(thread.name == "refits" for thread in threading.enumerate())


def test_the_solver_is_there_before_anything_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_on: list[threading.Thread] = []
    monkeypatch.setattr(
        "controller.runtime.refits.load_solver",
        lambda: loaded_on.append(threading.current_thread()),
    )
    refitter = Refitter(flat_prior(RefittedLeastSquares), lambda answer, report: None)
    refitter.start()
    refitter.close()
    assert loaded_on == [threading.current_thread()]
