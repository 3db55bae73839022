from __future__ import annotations

from collections.abc import Callable

import pytest

from costmodel.base import CostModel
from costmodel.checks import CHECKS, MakeModel, check_snapshot
from costmodel.prior import fit_prior, flat_prior, sweep_plan
from costmodel.recursive import RecursiveLeastSquares
from costmodel.synthetic import ACCELERATOR


def _swept() -> RecursiveLeastSquares:
    shapes = sweep_plan(2048, 64, 4096)
    return fit_prior(
        [(shape.features(), ACCELERATOR.latency_s(shape.features())) for shape in shapes]
    )


MODELS: dict[str, Callable[[], RecursiveLeastSquares]] = {"flat": flat_prior, "swept": _swept}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_model_keeps_the_promises_of_the_seam(
    check: Callable[[MakeModel], None], name: str
) -> None:
    def make_model() -> CostModel:
        return MODELS[name]()

    check(make_model)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_goes_through_json_and_back(name: str) -> None:
    check_snapshot(MODELS[name])
