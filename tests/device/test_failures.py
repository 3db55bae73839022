"""A runner whose device fails: lost for good, out of memory with numbers, or an ordinary error."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
import torch

from engine.device import failures
from engine.device.attention.reference import ReferenceAttention
from engine.device.failures import StepMemoryError, explained
from engine.device.runner import TorchRunner
from engine.ports import DeviceLostError
from engine.request import Request
from engine.step import StepPlan, StepWork, WorkKind

pytestmark = pytest.mark.device

CPU = torch.device("cpu")


def accelerator_error(text: str, code: int) -> torch.AcceleratorError:
    error = torch.AcceleratorError(text)
    error.error_code = code  # type: ignore[attr-defined]
    return error


CUDA_NOTE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the"
    " stacktrace below might be incorrect."
)
LOST = [
    accelerator_error("CUDA error: device-side assert triggered" + CUDA_NOTE, 710),
    accelerator_error("CUDA error: an illegal memory access was encountered" + CUDA_NOTE, 700),
    accelerator_error("CUDA error: unspecified launch failure" + CUDA_NOTE, 719),
    accelerator_error("CUDA error: something new", 716),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: the launch timed out and was terminated"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
]
ORDINARY = [
    accelerator_error("CUDA error: invalid configuration argument", 9),
    RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx`"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    ValueError("device-side assert is only a word here"),
    KeyError("out of memory"),
]
CUDA_MEMORY = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.15 GiB of"
    " which 20.00 MiB is free. Including non-PyTorch memory, this process has 79.10 GiB memory in"
    " use."
)
MEMORY = [
    (torch.OutOfMemoryError(CUDA_MEMORY), "asked for 1.5 GiB with"),
    (
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"
            " memory: you tried to allocate 4194304 bytes. Error code 12 (Cannot allocate memory)"
        ),
        "asked for 4 MiB with",
    ),
    (
        RuntimeError("DefaultCPUAllocator: you tried to allocate 480 bytes. Error code 12"),
        "asked for 480 bytes with",
    ),
    (MemoryError(), "asked for memory"),
    (accelerator_error("CUDA error: out of memory", 2), "asked for memory"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "memory"),
]


class FailingModel:
    """A tiny model's stand-in whose forward raises, holding a tensor as a forward would."""

    def __init__(self, model: Any, error: Exception) -> None:
        self._model = model
        self._error = error
        self.held: weakref.ref[torch.Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, *_: Any) -> torch.Tensor:
        activations = torch.zeros(1000)
        self.held = weakref.ref(activations)
        raise self._error


def plan_of(*lengths: int) -> tuple[StepPlan, dict[str, Request]]:
    requests, work = {}, []
    for index, length in enumerate(lengths):
        request = Request(f"r{index}", tuple(range(2, 2 + length)), 5, 0.0)
        request.block_table = [4 * index + block for block in range(4)]
        requests[request.request_id] = request
        work.append(StepWork(request.request_id, WorkKind.PREFILL, length, 0))
    return StepPlan(work=tuple(work)), requests


def failing_runner(tiny: Any, error: Exception) -> tuple[TorchRunner, FailingModel]:
    model = FailingModel(tiny.served, error)
    return TorchRunner(model, ReferenceAttention(), 16, 4, seed=0), model  # type: ignore[arg-type]


@pytest.mark.parametrize("error", LOST, ids=range(len(LOST)))
def test_a_lost_device_is_named(tiny: Any, error: Exception) -> None:
    runner, _ = failing_runner(tiny, error)
    with pytest.raises(DeviceLostError, match="cpu is lost: CUDA error") as raised:
        runner.execute(*plan_of(5, 3))
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", ORDINARY, ids=range(len(ORDINARY)))
def test_an_ordinary_error_passes_unchanged(tiny: Any, error: Exception) -> None:
    runner, _ = failing_runner(tiny, error)
    with pytest.raises(type(error)) as raised:
        runner.execute(*plan_of(5, 3))
    assert raised.value is error


def test_a_suspect_device_that_answers_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_answers", lambda _: False)
    with pytest.raises(DeviceLostError), explained(CPU, "1 token"):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`")
    with pytest.raises(RuntimeError, match="shape"), explained(CPU, "1 token"):
        raise RuntimeError("the shape is wrong")


@pytest.mark.parametrize(("error", "size"), MEMORY, ids=range(len(MEMORY)))
def test_out_of_memory_says_how_much_and_what_to_lower(
    tiny: Any, error: Exception, size: str
) -> None:
    runner, model = failing_runner(tiny, error)
    with pytest.raises(StepMemoryError) as raised:
        runner.execute(*plan_of(5, 3))
    message = str(raised.value)
    assert not isinstance(raised.value, DeviceLostError)
    assert "8 tokens of 2 requests" in message
    assert size in message
    assert re.search(r" with [\d.,]+ (GiB|MiB|KiB|bytes) free;", message)
    assert "--max-num-batched-tokens" in message
    assert "\n" not in message
    # What the failed forward held is gone while the error is still alive: a smaller step may run.
    gc.collect()
    assert model.held is not None
    assert model.held() is None


def test_caches_are_emptied_once_nothing_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []
    held: list[weakref.ref[torch.Tensor]] = []

    def allocate() -> None:
        tensor = torch.zeros(10)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError(CUDA_MEMORY)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(held[0]() is None))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 << 20, 9 << 20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 7 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2 << 20)
    with (
        pytest.raises(StepMemoryError, match=r"8 MiB free"),
        explained(torch.device("cuda"), "1 token"),
    ):
        allocate()
    assert emptied == [True]


def test_the_runner_works_again_after_a_failed_step(tiny: Any) -> None:
    runner, _ = failing_runner(tiny, torch.OutOfMemoryError(CUDA_MEMORY))
    plan, requests = plan_of(5, 3)
    with pytest.raises(StepMemoryError):
        runner.execute(plan, requests)
    runner._model = tiny.served
    tokens = runner.execute(plan, requests).tokens
    fresh = TorchRunner(tiny.served, ReferenceAttention(), 16, 4, seed=0)
    assert tokens == fresh.execute(*plan_of(5, 3)).tokens


@pytest.mark.parametrize("bad", [-1, 96, 10**6])
def test_a_token_that_the_model_does_not_know_fails_before_the_device_sees_it(
    tiny: Any, bad: int
) -> None:
    runner = TorchRunner(tiny.served, ReferenceAttention(), 16, 4, seed=0)
    plan, requests = plan_of(5, 3)
    requests["r1"].prompt_token_ids = (4, bad, 5)
    with pytest.raises(ValueError, match=rf"r1: token id {bad} is outside the model's 96 tokens"):
        runner.execute(plan, requests)


def test_swapping_fails_with_numbers_too(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TorchRunner(tiny.served, ReferenceAttention(), 16, 4, seed=0, num_host_blocks=4)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError(CUDA_MEMORY)

    monkeypatch.setattr(runner._cache, "copy_out", fail)
    monkeypatch.setattr(runner._cache, "copy_in", fail)
    with pytest.raises(StepMemoryError, match="2 swapped blocks"):
        runner.swap_out([0, 1], [2, 3])
    with pytest.raises(StepMemoryError, match="1 swapped blocks"):
        runner.swap_in([2], [0])
