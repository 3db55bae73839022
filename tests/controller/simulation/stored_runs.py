"""Runs as a server writes them, for the tests of what is made of them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from controller.config import Settings
from costmodel.prior import fit_prior, flat_prior
from costmodel.refitted import RefittedLeastSquares
from costmodel.snapshot import SnapshotKey, dump_model
from costmodel.synthetic import TWO_CORES, synthetic_steps
from engine.clock import VirtualClock
from store import schema
from store.queries import TelemetryReader
from store.records import Record
from store.writer import TelemetryWriter
from tests.store.samples import make_request, make_run, make_snapshot, make_step

KEY = SnapshotKey("demo", "cpu (2 threads)", "float32", "reference", 16, "0.1.0")
# As a server writes them.
SETTINGS = Settings(
    slo_class=("chat:ttft_ms=1000,tpot_ms=200,weight=3,on_infeasible=degrade",),
    max_num_seqs=24,
    max_num_batched_tokens=4096,
    max_waiting_requests=99,
    max_model_len=900,
    is_prefix_caching_enabled=False,
).to_json()


def database(tmp_path: Path) -> str:
    """The URL of an empty database."""
    url = f"sqlite:///{tmp_path}/p.db"
    schema.migrate(url)
    return url


def write(url: str, *records: Record, **run: Any) -> None:
    """Add a run."""
    started = make_run(**{"device": "cpu (2 threads)", "settings": SETTINGS, **run})
    writer = TelemetryWriter.open(url, started, VirtualClock())
    for record in records:
        assert writer.offer(record)
    assert writer.close()


@contextmanager
def reading(url: str) -> Iterator[TelemetryReader]:
    """A reader, closed in the end."""
    with closing(TelemetryReader.open(url)) as reader:
        yield reader


def arrived(number: int, at_s: float, **changes: Any) -> Record:
    """A chat that arrived at an instant of the server's clock."""
    return make_request(
        f"r{number:02d}", arrived_clock_s=at_s, arrived_at=int(at_s * 1000), **changes
    )


def refused(number: int, at_s: float, **changes: Any) -> Record:
    """A chat that was told no."""
    none = {"num_output_tokens": 0, "finish_reason": "rejected", "decision": "reject"}
    return arrived(number, at_s, **{**none, "attained": False, **changes})


def twenty() -> list[Record]:
    """Twenty chats, every fifth refused; two bring a target of their own, one has no class's."""
    found = []
    for i in range(20):
        changes: dict[str, Any] = {}
        if i in (3, 8):
            changes |= {"ttft_target_s": 0.25}
        if i == 6:
            changes |= {"slo_class": "default", "ttft_target_s": None, "tpot_target_s": None}
        if i % 5 == 4:
            found.append(refused(i, 50.0 + i / 2, **changes))
        else:
            found.append(arrived(i, 50.0 + i / 2, num_output_tokens=3 + i % 2, **changes))
    return found


def learnt(run_id: str = "run-a", **changes: Any) -> Any:
    """The cost model that a run kept, having seen 400 steps."""
    learner = fit_prior([])
    for step, _ in zip(synthetic_steps(TWO_CORES, seed=1), range(400), strict=False):
        learner.observe(step.features, step.measured_s)
    return make_snapshot(
        1, run_id=run_id, key=asdict(KEY), document=dump_model(learner, KEY), **changes
    )


def unlearnt(run_id: str = "run-a", **changes: Any) -> Any:
    """The cost model that a run kept, having seen nothing."""
    document = dump_model(flat_prior(RefittedLeastSquares), KEY)
    return make_snapshot(1, run_id=run_id, key=asdict(KEY), document=document, **changes)


def pool(num_blocks: int = 1800) -> Record:
    """A step that tells the size of the KV pool."""
    return make_step(1, num_blocks_total=num_blocks)
