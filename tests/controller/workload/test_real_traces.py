"""The public traces, where there is data: counts and percentiles that are known of them."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path

import pytest

from controller.workload.arrivals import LengthSummary, Workload
from controller.workload.traces import read_trace, write_trace

DATA = Path(os.environ.get("PACELINE_DATA", Path(__file__).parents[4] / "shared" / "data"))
CODE = DATA / "azure2023" / "AzureLLMInferenceTrace_code.csv"
CONV = DATA / "azure2023" / "AzureLLMInferenceTrace_conv.csv"
MOONCAKE = DATA / "mooncake" / "conversation_trace.jsonl"

pytestmark = pytest.mark.skipif(
    not (CODE.is_file() and CONV.is_file() and MOONCAKE.is_file()),
    reason=f"no public traces in {DATA} (set PACELINE_DATA)",
)


def rounded(summary: LengthSummary | None) -> tuple[int, int, int]:
    assert summary is not None
    return int(summary.p50), int(summary.p99), summary.max


def burst(workload: Workload) -> float:
    """The fullest second over the mean second."""
    counts = Counter(int(arrival.at_s) for arrival in workload.arrivals)
    return max(counts.values()) / workload.rate


def test_azure_code() -> None:
    workload = read_trace(CODE)
    assert workload.num_requests == 8819
    assert rounded(workload.prompt_summary) == (1469, 7436, 7437)
    assert rounded(workload.output_summary) == (13, 251, 1899)
    assert burst(workload) == pytest.approx(26, abs=1)
    assert workload.arrivals[1].at_s == 0.052


def test_azure_conversation() -> None:
    workload = read_trace(CONV)
    assert workload.num_requests == 19_366
    assert rounded(workload.prompt_summary) == (1020, 4142, 14_050)
    assert rounded(workload.output_summary) == (129, 601, 1000)
    assert 3500 < workload.duration_s < 3600
    assert burst(workload) < 5


def test_mooncake_conversation() -> None:
    workload = read_trace(MOONCAKE, jitter_s=0)
    assert workload.num_requests == 12_031
    assert rounded(workload.prompt_summary) == (6909, 85_400, 126_195)
    assert rounded(workload.output_summary) == (350, 1118, 2000)
    # Ticks of three seconds, up to three milliseconds off.
    assert max(abs(math.remainder(a.at_s, 3.0)) for a in workload.arrivals) < 0.004
    seen: set[int] = set()
    num_blocks = num_known = 0
    for arrival in workload.arrivals:
        num_blocks += len(arrival.prefix_ids)
        num_known += sum(block in seen for block in arrival.prefix_ids)
        seen.update(arrival.prefix_ids)
    assert num_known / num_blocks == pytest.approx(0.37, abs=0.01)


def test_mooncake_is_spread_over_its_ticks_unless_told_otherwise() -> None:
    raw, spread = read_trace(MOONCAKE, jitter_s=0), read_trace(MOONCAKE)
    assert len({arrival.at_s for arrival in raw.arrivals}) < raw.num_requests / 10
    assert len({arrival.at_s for arrival in spread.arrivals}) == spread.num_requests
    assert 0.0 < spread.duration_s - raw.duration_s < 3.0
    assert burst(spread) < 0.6 * burst(raw)


@pytest.mark.parametrize("path", [CODE, MOONCAKE], ids=lambda path: path.parent.name)
@pytest.mark.parametrize("suffix", [".csv.gz", ".jsonl"])
def test_a_public_trace_survives_our_own_formats(tmp_path: Path, path: Path, suffix: str) -> None:
    workload = read_trace(path)
    copy = tmp_path / f"{workload.name}{suffix}"
    write_trace(workload, copy)
    assert read_trace(copy) == workload
