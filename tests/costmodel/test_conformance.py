from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from costmodel.base import CostModel
from costmodel.checks import CHECKS, MakeModel, check_snapshot
from costmodel.features import StepFeatures
from costmodel.judged import JudgedPlanes
from costmodel.prior import fit_prior, flat_prior, sweep_plan
from costmodel.recursive import RecursiveLeastSquares
from costmodel.refitted import RefittedLeastSquares
from costmodel.synthetic import ACCELERATOR, synthetic_steps
from costmodel.windowed import WindowedRegression

# As often as the service does it (`controller.runtime.refits`), and each within the step.
REFIT_EVERY = 250


class Pumped:
    """The refitted learner with its refits: by itself it waits for somebody to run them.

    Beside it, not a kind of it: where the package is compiled nothing here can inherit from it.
    """

    def __init__(self, model: RefittedLeastSquares) -> None:
        self.model = model
        self.num_observed = 0
        self.num_refits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        is_taught = self.model.observe(features, latency_s)
        self.num_observed += 1
        if self.num_observed % REFIT_EVERY == 0 and (job := self.model.refit_job()) is not None:
            self.num_refits += 1
            self.model.adopt(job.run())
        return is_taught


LEARNERS: tuple[type[JudgedPlanes], ...] = (
    RecursiveLeastSquares,
    WindowedRegression,
    RefittedLeastSquares,
)


def _swept(learner: type[JudgedPlanes]) -> JudgedPlanes:
    shapes = sweep_plan(2048, 64, 4096)
    samples = [(shape.features(), ACCELERATOR.latency_s(shape.features())) for shape in shapes]
    return fit_prior(samples, learner)


PRIORS: dict[str, Callable[[type[JudgedPlanes]], JudgedPlanes]] = {
    "flat": flat_prior,
    "swept": _swept,
}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("learner", LEARNERS, ids=lambda learner: learner.kind)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_model_keeps_the_promises_of_the_seam(
    check: Callable[[MakeModel], None], learner: type[JudgedPlanes], prior: str
) -> None:
    def make_model() -> CostModel:
        return PRIORS[prior](learner)

    check(make_model)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("learner", LEARNERS, ids=lambda learner: learner.kind)
def test_every_model_goes_through_json_and_back(learner: type[JudgedPlanes], prior: str) -> None:
    check_snapshot(lambda: PRIORS[prior](learner))


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_refits_break_no_promise(check: Callable[[MakeModel], None], prior: str) -> None:
    def make_model() -> CostModel:
        model = PRIORS[prior](RefittedLeastSquares)
        assert isinstance(model, RefittedLeastSquares)
        pumped: Any = Pumped(model)
        made: CostModel = pumped
        return made

    check(make_model)


def test_refits_are_among_what_is_checked() -> None:
    model = Pumped(flat_prior(RefittedLeastSquares))
    for step, _ in zip(synthetic_steps(ACCELERATOR), range(2000), strict=False):
        model.observe(step.features, step.measured_s)
    assert model.num_refits == 8
