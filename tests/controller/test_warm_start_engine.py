"""A server's cost model outlives it: the real engine twice over one database."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.api.app import create_app
from controller.config import Settings
from controller.runtime.snapshots import LEAST_OBSERVED
from controller.runtime.wiring import build_runtime
from store.records import EventKind
from tests.controller.service_double import call
from tests.controller.test_api_engine import save_tiny_model

pytestmark = pytest.mark.device


def test_the_next_start_goes_on_where_this_one_ended(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    settings = Settings(
        model=str(tmp_path),
        served_model_name="tiny",
        dtype="float32",
        device="cpu",
        db=f"sqlite:///{tmp_path / 'telemetry.db'}",
        kv_cache_memory_bytes=1 << 20,
        max_model_len=256,
        is_warmup_enabled=False,
    )
    first = build_runtime(settings, lambda done, total, what: None)
    try:
        assert first.start.origin == "flat"
        app = create_app(first.service, slo_classes=first.settings.slo_classes)
        body = {"prompt": "hello", "max_tokens": LEAST_OBSERVED + 40, "ignore_eos": True}
        answer = call(app, "POST", "/v1/completions", body=body)
        assert answer.status_code == 200, answer.text
    finally:
        first.close()
    learnt = first.cost_model.quality()
    assert learnt.num_observed >= LEAST_OBSERVED

    second = build_runtime(settings, lambda done, total, what: None)
    try:
        assert (second.start.origin, second.start.problem) == ("restored", None)
        assert second.start.numbers["stored_run_id"] == first.service.run_id
        assert second.cost_model.coefficients == first.cost_model.coefficients
        assert second.cost_model.quality() == learnt
    finally:
        second.close()

    # Another block size is another key: what was learnt says nothing there.
    other = settings.model_copy(update={"block_size": 32})
    third = build_runtime(other, lambda done, total, what: None)
    try:
        assert third.start.origin == "flat"
        third.writer.close()
        starts = third.reader.events(kind=EventKind.WARM_START).rows
        assert sorted(row["reason"] for row in starts) == ["flat", "flat", "restored"]
    finally:
        third.close()
