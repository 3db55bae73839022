"""Traces in and out: every format, every spelling of a text file, and round trips."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.workload.arrivals import Arrival, Workload, sorted_workload
from controller.workload.traces import TraceFormat, read_trace, write_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 23:59:59.9799600,4808,10\n"
    "2023-11-17 00:00:00.0319601,3180,8\n"
    "2023-11-17 00:00:00.0319601,110,27\n"
)
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3000, "input_length": 600, "output_length": 6, "hash_ids": [0, 9]}\n'
    '{"timestamp": 9000, "input_length": 7, "output_length": 7, "hash_ids": []}\n'
)
OWN_CSV = "at_s,num_prompt_tokens,num_output_tokens,slo_class\n0.5,10,20,chat\n1.5,30,40,\n"
OWN = (Arrival(0.5, 10, 20, "chat"), Arrival(1.5, 30, 40))


def put(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_azure(tmp_path: Path) -> None:
    workload = read_trace(put(tmp_path, "code.csv", AZURE))
    assert workload.name == "code"
    # Seven digits count, across midnight, from the first request.
    assert [a.at_s for a in workload.arrivals] == [0.0, 0.0520001, 0.0520001]
    assert [a.num_prompt_tokens for a in workload.arrivals] == [4808, 3180, 110]
    assert [a.num_output_tokens for a in workload.arrivals] == [10, 8, 27]
    assert {(a.slo_class, a.prefix_ids) for a in workload.arrivals} == {(None, ())}


def test_azure_with_offsets_other_columns_and_another_order(tmp_path: Path) -> None:
    text = (
        "Model,GeneratedTokens, TIMESTAMP ,ContextTokens\n"
        "a,1,2024-05-10T00:00:00+00:00,5\n"
        "b,2,2024-05-10 02:00:01.5+02:00,6\n"
        "c,3,2024-05-10 00:00:02Z,7\n"
    )
    workload = read_trace(put(tmp_path, "x.csv", text))
    assert [a.at_s for a in workload.arrivals] == [0.0, 1.5, 2.0]
    assert [a.num_output_tokens for a in workload.arrivals] == [1, 2, 3]


def test_mooncake_without_jitter(tmp_path: Path) -> None:
    workload = read_trace(put(tmp_path, "conversation.jsonl", MOONCAKE), jitter_s=0)
    assert workload.arrivals == (
        Arrival(0.0, 1025, 5, prefix_ids=(0, 1, 2)),
        Arrival(0.0, 600, 6, prefix_ids=(0, 9)),
        Arrival(6.0, 7, 7),
    )


def test_mooncake_ticks_are_spread_over_their_quantum(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 3000 * (i // 50), "input_length": 1 + i, "output_length": 1}
        for i in range(2000)
    ]
    path = put(tmp_path, "m.jsonl", "\n".join(map(json.dumps, rows)))
    workload = read_trace(path)
    moved_s = [a.at_s - 3.0 * ((a.num_prompt_tokens - 1) // 50) for a in workload.arrivals]
    assert all(0 <= by_s < 3.0 for by_s in moved_s)
    for low in (0.0, 1.0, 2.0):
        assert sum(low <= by_s < low + 1.0 for by_s in moved_s) == pytest.approx(2000 / 3, abs=100)
    assert read_trace(path) == workload
    assert read_trace(path, seed=1) != workload
    assert sorted(a.num_prompt_tokens for a in workload.arrivals) == list(range(1, 2001))


def test_published_ticks_may_be_a_few_milliseconds_off(tmp_path: Path) -> None:
    path = put(tmp_path, "m.jsonl", MOONCAKE.replace("9000", "8997"))
    assert read_trace(path) == read_trace(path, jitter_s=3.0)


@pytest.mark.parametrize("text", [MOONCAKE.replace("9000", "9011"), MOONCAKE.splitlines()[0]])
def test_times_that_are_no_ticks_are_left_alone(tmp_path: Path, text: str) -> None:
    path = put(tmp_path, "m.jsonl", text)
    assert read_trace(path) == read_trace(path, jitter_s=0)


def test_jitter_can_be_asked_for_in_any_format(tmp_path: Path) -> None:
    path = put(tmp_path, "own.csv", OWN_CSV)
    first, second = read_trace(path, jitter_s=0.25, seed=3).arrivals
    assert 0.5 < first.at_s < 0.75
    assert 1.5 < second.at_s < 1.75


def test_our_own_formats_keep_their_times(tmp_path: Path) -> None:
    lines = (
        '{"at_s": 0.5, "num_prompt_tokens": 10, "num_output_tokens": 20, "slo_class": "chat"}\n'
        '{"num_output_tokens": 40, "num_prompt_tokens": 30, "at_s": 1.5, "slo_class": null}\n'
    )
    assert read_trace(put(tmp_path, "a.csv", OWN_CSV)).arrivals == OWN
    assert read_trace(put(tmp_path, "a.jsonl", lines)).arrivals == OWN
    without = OWN_CSV.replace(",slo_class", "").replace(",chat", "").replace("40,", "40")
    assert [a.slo_class for a in read_trace(put(tmp_path, "b.csv", without)).arrivals] == [None] * 2


@pytest.mark.parametrize(
    "data",
    [
        OWN_CSV.encode("utf-8-sig"),
        OWN_CSV.replace("\n", "\r\n").encode(),
        OWN_CSV.replace("\n", "\r\n").encode("utf-8-sig"),
        ("\n \n" + OWN_CSV.replace("\n", "\n\n") + "\n , , \n").encode(),
        OWN_CSV.rstrip("\n").encode(),
        OWN_CSV.replace("10", '"10"').replace("chat", '" chat "').encode(),
        OWN_CSV.replace(",", " , ").encode(),
        gzip.compress(OWN_CSV.encode("utf-8-sig")),
        gzip.compress(OWN_CSV[:60].encode()) + gzip.compress(OWN_CSV[60:].encode()),
    ],
    ids=[
        "bom", "crlf", "bom and crlf", "blank lines", "no last line end", "quotes", "spaces",
        "gzip without the suffix", "gzip members",
    ],
)  # fmt: skip
def test_every_spelling_of_a_text_file(tmp_path: Path, data: bytes) -> None:
    assert read_trace(put(tmp_path, "trace.csv", data)).arrivals == OWN


def test_mooncake_with_a_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    text = MOONCAKE.replace("\n", "\r\n\r\n").encode("utf-8-sig")
    assert read_trace(put(tmp_path, "m.jsonl", text), jitter_s=0).num_requests == 3


def test_the_name_is_the_file_without_its_suffixes(tmp_path: Path) -> None:
    path = put(tmp_path, "v1.2 calls.csv.gz", gzip.compress(OWN_CSV.encode()))
    assert read_trace(path).name == "v1.2 calls"
    assert read_trace(str(path), name="mine").name == "mine"


def test_rows_in_any_order_are_sorted_on_request(tmp_path: Path) -> None:
    header, first, second, third = AZURE.splitlines()
    path = put(tmp_path, "x.csv", "\n".join((header, third, second, first)))
    workload = read_trace(path, sort=True)
    assert [a.num_prompt_tokens for a in workload.arrivals] == [4808, 110, 3180]
    assert workload.arrivals[0].at_s == 0.0


def test_no_more_rows_are_read_than_asked_for(tmp_path: Path) -> None:
    # The broken row is never reached.
    path = put(tmp_path, "x.csv", OWN_CSV + "oops\n")
    assert read_trace(path, max_requests=2).arrivals == OWN
    with pytest.raises(ValueError, match="max_requests"):
        read_trace(path, max_requests=0)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_is_as_good_as_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(OWN_CSV.encode(),))
    writer.start()
    try:
        assert read_trace(pipe).arrivals == OWN
    finally:
        writer.join()


@pytest.mark.parametrize("name", ["w.csv", "w.jsonl", "w.csv.gz", "w.JSONL.gz"])
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    workload = Workload("w", (*OWN, Arrival(1.5, 1024, 1, 'a "b", c', (7, 8), 512)))
    path = tmp_path / name
    write_trace(workload, path)
    data = path.read_bytes()
    assert data.startswith(b"\x1f\x8b") == name.endswith(".gz")
    if name.endswith(".gz"):
        assert data[4:8] == bytes(4)  # no time of writing: the bytes depend on the workload alone
    assert read_trace(path) == workload
    write_trace(workload, path)
    assert path.read_bytes() == data


arrivals = st.builds(
    Arrival,
    at_s=st.floats(0, 1e6),
    num_prompt_tokens=st.integers(600, 10**9),
    num_output_tokens=st.integers(1, 10**9),
    slo_class=st.none() | st.from_regex(r"\S([\S ]*\S)?", fullmatch=True),
    prefix_ids=st.lists(st.integers(0, 2**63 - 1), max_size=2).map(tuple),
    prefix_block_tokens=st.integers(16, 600),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(arrivals, min_size=1, max_size=8), word=st.sampled_from(["csv", "jsonl"]))
def test_every_workload_survives_a_round_trip(
    tmp_path: Path, rows: list[Arrival], word: str
) -> None:
    workload = sorted_workload("trip", rows)
    path = tmp_path / "trip"
    write_trace(workload, path, format=word)
    assert read_trace(path) == workload
    assert read_trace(path, format=word) == workload


def test_prefix_columns_are_written_only_where_something_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    write_trace(Workload("w", OWN), path)
    assert path.read_text() == OWN_CSV


def test_writing_refuses_what_could_not_be_read(tmp_path: Path) -> None:
    workload = Workload("w", OWN)
    with pytest.raises(ValueError, match="path must end in"):
        write_trace(workload, tmp_path / "w.txt")
    with pytest.raises(ValueError, match="format must be csv or jsonl"):
        write_trace(workload, tmp_path / "w.csv", format="azure")
    with pytest.raises(ValueError, match="holds no request"):
        write_trace(Workload("w", ()), tmp_path / "w.csv")
    assert list(tmp_path.iterdir()) == []


def test_formats_are_named(tmp_path: Path) -> None:
    path = put(tmp_path, "x.csv", AZURE)
    assert read_trace(path, format=TraceFormat.AZURE) == read_trace(path)
    with pytest.raises(ValueError, match="format must be one of auto, azure, mooncake, csv, jsonl"):
        read_trace(path, format="parquet")
