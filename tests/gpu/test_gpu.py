"""What `make gpu` checks, one test per comparison, on whatever CUDA device is here.

The functions are the same: the conformance suite, logits against transformers, graphs on and off.
"""

from __future__ import annotations

import pytest
import torch

from controller.bench.gpu.exactness import check_exactness
from controller.bench.gpu.rows import TimeBox, Verdict
from controller.bench.gpu.sizes import FULL
from engine.clock import VirtualClock
from engine.device.attention.base import UnsupportedByBackendError
from engine.device.attention.checks import CASES, check_case
from engine.device.roofline import best_s
from engine.device.trial import BACKENDS, DeviceTrial

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_conformance(name: str, dtype: torch.dtype, case: object) -> None:
    try:
        backend = BACKENDS[name]()
        check_case(backend, case, torch.device("cuda"), dtype, backend.default_block_size)  # type: ignore[arg-type]
    except UnsupportedByBackendError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", BACKENDS)
def test_tokens_logits_and_graphs(name: str) -> None:
    trial = DeviceTrial("cuda", is_tiny=False)
    refusal = trial.refusal(name, "bfloat16")
    if refusal is not None:
        pytest.skip(refusal)
    clock = VirtualClock()
    rows = list(check_exactness(trial, FULL, TimeBox(clock, 1.0), clock, (name,)))
    assert [row for row in rows if row.verdict.is_bad] == []
    assert any(row.verdict is Verdict.OK for row in rows)


def test_events_time_the_device() -> None:
    # Nothing about how long: only that events bracket the work, whatever the host does meanwhile.
    matrix = torch.ones((2048, 2048), device="cuda")
    assert best_s(lambda: matrix @ matrix, torch.device("cuda"), 3) > 0.0
