from __future__ import annotations

from collections.abc import Callable

import pytest

from costmodel.base import CostModel
from costmodel.checks import CHECKS, MakeModel, check_snapshot
from costmodel.judged import JudgedPlanes
from costmodel.prior import fit_prior, flat_prior, sweep_plan
from costmodel.recursive import RecursiveLeastSquares
from costmodel.refitted import RefittedLeastSquares
from costmodel.synthetic import ACCELERATOR
from costmodel.windowed import WindowedRegression

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
