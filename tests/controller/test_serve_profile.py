"""A profile meets the engine that was loaded: it is written down, or refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.config import Settings, load_settings
from controller.runtime.tuned_for import TunedFor
from controller.runtime.wiring import StartupError, build_runtime
from engine.device import loading
from engine.device.loading import DeviceOptions, LoadedEngine, load_engine
from store.queries import TelemetryReader
from tests.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.device

SILENT: Any = lambda *_: None  # noqa: E731 - nobody looks


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"PACELINE_{name.upper()}", raising=False)
    monkeypatch.chdir(tmp_path)
    save_tiny_llama(tmp_path / "model", num_words=60, vocab_size=64, max_len=256)
    flags = {
        "model": str(tmp_path / "model"), "served_model_name": "tiny", "is_warmup_enabled": False,
        "kv_cache_memory_bytes": 1_000_000, "db": f"sqlite:///{tmp_path}/p.db",
    }  # fmt: skip
    tuned = {"max_num_seqs": 7, "planner": {"pace": 0.75, "margin_quantile": 0.8}}
    return load_settings(flags, None, tuned)


def runs(settings: Settings) -> Sequence[Mapping[str, Any]]:
    """What a server that has stopped left: its row is written beside it, not before it."""
    with closing(TelemetryReader.open(settings.db)) as reader:
        return reader.runs()


def test_settings_reach_the_engine_and_the_run_names_the_profile(settings: Settings) -> None:
    runtime = build_runtime(settings, SILENT)
    device = runtime.engine.device_name
    runtime.close()
    owner = TunedFor("mine", "tiny", device, "float32", "reference", settings.model)
    runtime = build_runtime(settings, SILENT, owner)
    runtime.close()
    assert runtime.engine_config.max_num_seqs == 7
    assert runtime.cost_model.target_coverage == 0.8
    (run, before) = runs(settings)
    assert (run["profile"], before["profile"]) == ("mine", None)
    assert run["settings"]["planner"]["pace"] == 0.75
    with pytest.raises(StartupError, match=r"--profile: profile 'mine' belongs to device 'cuda"):
        build_runtime(settings, SILENT, replace(owner, device="cuda (another)"))
    with pytest.raises(StartupError, match="belongs to attention backend 'flash_attn'"):
        build_runtime(settings, SILENT, replace(owner, attention_backend="flash_attn"))
    with pytest.raises(StartupError, match="belongs to model source 'demo'"):
        build_runtime(settings, SILENT, replace(owner, source="demo"))


def test_a_step_of_few_tokens_has_as_few_seats_unless_others_were_asked_for(
    settings: Settings,
) -> None:
    few = settings.model_copy(update={"max_num_batched_tokens": 5})
    with pytest.raises(StartupError, match=r"max_num_seqs \(7\) must not exceed .* \(5\)"):
        build_runtime(few, SILENT)
    names = ("model", "served_model_name", "is_warmup_enabled", "kv_cache_memory_bytes", "db")
    flags = {name: getattr(settings, name) for name in names}
    for given, seats in ((5, 5), (None, 128)):
        runtime = build_runtime(load_settings(flags | {"max_num_batched_tokens": given}), SILENT)
        runtime.close()
        assert runtime.engine_config.max_num_seqs == seats
        assert runs(settings)[0]["settings"]["max_num_seqs"] == seats


def test_a_profile_that_nobody_asked_for_gives_way_to_one_that_fits_or_to_the_defaults(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[DeviceOptions] = []

    def load(source: str, options: DeviceOptions, progress: Any) -> LoadedEngine:
        asked.append(options)
        return load_engine(source, options, progress)

    monkeypatch.setattr(loading, "load_engine", load)
    plain = settings.model_copy(update={"max_num_seqs": 5})
    other = TunedFor("gpu", "tiny", "cuda (another)", source=settings.model)
    runtime = build_runtime(settings, SILENT, other, [(plain, None)])
    device = runtime.engine.device_name
    runtime.close()
    assert runtime.engine_config.max_num_seqs == 5
    assert runs(settings)[0]["profile"] is None
    assert "profile 'gpu' belongs to device 'cuda (another)'" in caplog.text
    caplog.clear()
    mine = TunedFor("mine", "tiny", device, source=settings.model)
    tuned = settings.model_copy(update={"max_num_seqs": 9})
    runtime = build_runtime(settings, SILENT, other, [(tuned, mine), (plain, None)])
    runtime.close()
    assert runtime.engine_config.max_num_seqs == 9
    # Whichever it is, its graphs are there.
    assert [each.max_graph_batch for each in asked] == [7, 9]
    # Each device has one of its own: there is nothing to warn of.
    assert "left out" not in caplog.text
