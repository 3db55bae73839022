"""A stored run: what was written down is replayed, what was not is assumed and said."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from controller.policy.slo import OnInfeasible, Slo
from controller.simulation.hardware import A100_8B, HardwareError
from controller.simulation.stored import RunRows, StoredRun, StoredRunError, read_run, stored_run
from costmodel.features import StepFeatures
from store.records import Record
from tests.controller.simulation.stored_runs import (
    KEY,
    SETTINGS,
    arrived,
    database,
    learnt,
    pool,
    reading,
    refused,
    twenty,
    unlearnt,
    write,
)
from tests.store.samples import make_step


@pytest.fixture
def url(tmp_path: Path) -> str:
    return database(tmp_path)


def read(url: str, run_id: str = "run-a") -> RunRows:
    with reading(url) as reader:
        return read_run(reader, run_id)


def run_of(url: str, *records: Record, **run: Any) -> StoredRun:
    write(url, *records, **run)
    return stored_run(read(url))


def test_a_run_is_its_arrivals_its_promises_its_limits_and_its_machine(url: str) -> None:
    # Written at their end, so in any order.
    run = run_of(
        url,
        refused(4, 63.0, slo_class="batch", ttft_target_s=None, tpot_target_s=None),
        arrived(2, 61.5, num_output_tokens=9, ttft_target_s=2.0),
        arrived(3, 62.0, num_output_tokens=7, num_prompt_tokens=40),
        arrived(1, 60.0, num_output_tokens=7),
        pool(1800),
        learnt(),
    )
    assert (run.run_id, run.workload.name) == ("run-a", "run run-a of the demo model")
    given = [(a.at_s, a.num_prompt_tokens, a.slo_class) for a in run.workload.arrivals]
    assert given == [
        (0.0, 96, "chat"), (1.5, 96, "chat#2"), (2.0, 40, "chat"), (3.0, 96, "batch"),
    ]  # fmt: skip
    lengths = [a.num_output_tokens for a in run.workload.arrivals]
    assert lengths[:3] == [7, 9, 7]
    # No batch has ended: as long as anybody's, and its client asked for 8.
    assert lengths[3] in (7, 8)
    assert [(c.name, c.slo, c.weight, c.on_infeasible) for c in run.classes] == [
        ("chat", Slo(1.0, 0.2), 3.0, OnInfeasible.DEGRADE),
        ("chat#2", Slo(2.0, 0.2), 3.0, OnInfeasible.DEGRADE),
        ("batch", Slo(), 1.0, OnInfeasible.REJECT),
    ]
    assert run.limits == {
        "block_size": 16, "num_blocks": 1800, "max_model_len": 900, "max_num_seqs": 24,
        "max_num_batched_tokens": 4096, "max_waiting_requests": 99,
        "is_prefix_cache_enabled": False,
    }  # fmt: skip
    assert run.max_tokens == 8
    machine = run.machine()
    assert machine.name == "demo-cpu (2 threads)"
    assert "learnt by" in machine.source
    assert run.machine(A100_8B) == A100_8B


def test_the_machine_of_a_run_has_the_noise_of_its_steps(url: str) -> None:
    work: dict[str, Any] = {"prefill_tokens": 0, "decode_requests": 4, "decode_context_tokens": 400}
    slow = [
        make_step(i, num_blocks_total=1800, duration_s=0.2 if i < 60 else 0.1, **work)
        for i in range(1, 150)
    ]
    failed = make_step(150, num_blocks_total=1800, duration_s=9.0, failure="boom", **work)
    run = run_of(url, arrived(1, 60.0, num_output_tokens=7), learnt(), *slow, failed)
    machine = run.machine()
    assert machine.recorded is not None
    factors = machine.recorded.factors
    assert len(factors) == 149
    assert factors[0] == pytest.approx(2.0 * factors[-1], rel=1e-3)
    assert factors[-1] == pytest.approx(0.1 / machine.seconds(StepFeatures(0, 4, 400)), rel=1e-3)
    # Another machine has its own.
    assert run.machine(A100_8B).recorded is None


def test_the_same_rows_tell_the_same(url: str) -> None:
    assert run_of(url, *reversed(twenty())) == stored_run(read(url))


def test_requests_stand_in_order_of_arrival_and_then_of_their_ids(url: str) -> None:
    told = [(3, 50.0, 5), (1, 52.0, 9), (5, 51.0, 9), (2, 51.0, 5)]
    run = run_of(
        url, *(arrived(i, at, num_prompt_tokens=i, max_tokens=most) for i, at, most in told)
    )
    arrivals = run.workload.arrivals
    assert [(a.at_s, a.num_prompt_tokens) for a in arrivals] == [(0, 3), (1, 2), (1, 5), (2, 1)]
    assert run.max_tokens == 9


def test_the_most_frequent_targets_have_the_name_of_the_class(url: str) -> None:
    targets = [0.25, None, 1.0, 0.5, 1.0, 0.5, 1.0]
    chats = [arrived(i, float(i), ttft_target_s=each) for i, each in enumerate(targets)]
    # An operator may have called a class so.
    other = arrived(9, 9.0, slo_class="chat#3")
    run = run_of(url, *chats, other)
    assert [(c.name, c.slo.ttft_s) for c in run.classes] == [
        ("chat", 1.0), ("chat#2", 0.5), ("chat#4", 0.25), ("chat#5", None), ("chat#3", 1.0),
    ]  # fmt: skip
    assert [a.slo_class for a in run.workload.arrivals] == [
        "chat#4", "chat#5", "chat", "chat#2", "chat", "chat#2", "chat", "chat#3",
    ]  # fmt: skip


def test_answers_that_nobody_saw_are_drawn_from_those_that_ended(url: str) -> None:
    ended = [arrived(i, float(i), num_output_tokens=n) for i, n in enumerate((2, 10, 50))]
    bulk = arrived(3, 3.0, slo_class="bulk", num_output_tokens=400, max_tokens=999)
    unseen = [refused(10 + i, 10.0 + i, max_tokens=30) for i in range(40)]
    cut_off = [
        arrived(50 + i, 50.0 + i, num_output_tokens=4, finish_reason="abort", max_tokens=60)
        for i in range(20)
    ]
    longest = arrived(80, 80.0, num_output_tokens=55, finish_reason="error", max_tokens=60)
    nothing = arrived(81, 81.0, num_output_tokens=0, finish_reason="length", max_tokens=0)
    run = run_of(url, *ended, bulk, *unseen, *cut_off, longest, nothing)
    lengths = [a.num_output_tokens for a in run.workload.arrivals]
    assert lengths[:4] == [2, 10, 50, 400]
    # A draw of the class's own; no longer than was asked for.
    drawn = Counter(lengths[4:44])
    assert set(drawn) == {2, 10, 30}
    assert min(drawn.values()) > 5
    # Somebody who was cut off after four tokens would have had more.
    assert set(lengths[44:64]) == {10, 50}
    # Longer than any: what was given is all that is known.
    assert lengths[64:] == [55, 1]
    assert run.max_tokens == 30


def test_blocks_of_unknown_size_are_no_pool(url: str) -> None:
    run = run_of(url, arrived(1, 1.0), pool(77))
    assert not {"block_size", "num_blocks"} & set(run.limits)
    with pytest.raises(StoredRunError, match="stored no cost model: name a machine with --hardw"):
        run.machine()
    said = {**SETTINGS, "block_size": 32, "max_num_seqs": None}
    write(url, arrived(1, 1.0, run_id="run-b"), run_id="run-b", settings=said)
    limits = stored_run(read(url, "run-b")).limits
    assert limits["block_size"] == 32
    assert not {"num_blocks", "max_num_seqs"} & set(limits)


def test_a_later_run_under_the_same_key_does_not_lend_its_machine(url: str) -> None:
    write(url, *twenty(), learnt())
    newer = unlearnt("run-b", at=2**42)
    write(url, arrived(1, 60.0, run_id="run-b"), newer, run_id="run-b", started_at=2**41)
    own, other = read(url, "run-a"), read(url, "run-b")
    assert own.document == learnt().document
    assert own.key == other.key == asdict(KEY)
    assert stored_run(own).machine() != stored_run(other).machine()


def test_the_newest_run_is_the_last_that_has_requests_by_either_word(url: str) -> None:
    write(url, *twenty(), started_at=1000)
    later = [arrived(i, 50.0 + i, run_id="run-b") for i in range(3)]
    write(url, *later, run_id="run-b", started_at=2000)
    write(url, run_id="run-c", started_at=3000)
    assert read(url, "last").run["run_id"] == "run-b"
    assert read(url, "latest") == read(url, "last") == read(url, "run-b")
    assert len(read(url, "run-a").requests) == 20


def test_a_run_is_found_by_its_id_however_many_came_after_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.simulation.stored.MAX_RUNS", 1)
    write(url, *twenty(), started_at=1000)
    write(url, run_id="run-b", started_at=2000)
    assert len(read(url, "run-a").requests) == 20


def test_more_requests_than_a_page_holds_are_all_read(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.simulation.stored._PAGE", 3)
    write(url, *twenty())
    assert [row["request_id"] for row in read(url).requests] == [f"r{i:02d}" for i in range(20)]


def test_what_is_missing_is_said(url: str) -> None:
    with pytest.raises(StoredRunError, match="no stored run has a request that ended"):
        read(url, "last")
    with pytest.raises(StoredRunError, match="no run 'x' is stored; the newest are: none"):
        read(url, "x")
    write(url)
    with pytest.raises(StoredRunError, match="no run 'other' is stored; the newest are: run-a"):
        read(url, "other")
    with pytest.raises(StoredRunError, match="run run-a has no request that ended"):
        read(url)
    write(url, *(refused(i, float(i), run_id="run-b") for i in range(3)), run_id="run-b")
    with pytest.raises(StoredRunError, match="no request of run run-b has ended by itself"):
        stored_run(read(url, "run-b"))


def test_a_damaged_model_is_named_unless_another_machine_is(url: str) -> None:
    write(url, *twenty())
    run = stored_run(read(url)._replace(key=asdict(KEY), document={"key": 5}))
    with pytest.raises(HardwareError, match="key"):
        run.machine()
    assert run.machine(A100_8B) == A100_8B
