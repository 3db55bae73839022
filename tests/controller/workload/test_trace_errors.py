"""Broken traces: every refusal names the file, the line and the column."""

from __future__ import annotations

import contextlib
import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.workload import trace_text
from controller.workload.traces import TraceError, read_trace

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_ROW = "2023-11-16 18:17:03.9799600,4808,10\n"
OWN_HEADER = "at_s,num_prompt_tokens,num_output_tokens,slo_class\n"
MOONCAKE_ROW = '{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [0]}\n'
OWN_ROW = '{"at_s": 0, "num_prompt_tokens": 1, "num_output_tokens": 1}\n'


def refusal(tmp_path: Path, data: str | bytes, **options: bool | str) -> TraceError:
    path = tmp_path / "broken.trace"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(TraceError) as caught:
        read_trace(path, **options)  # type: ignore[arg-type]
    assert str(path) in str(caught.value)
    if caught.value.line is not None:
        assert f", line {caught.value.line}" in str(caught.value)
    if caught.value.column is not None:
        assert f", column {caught.value.column}" in str(caught.value)
    return caught.value


def azure(cells: str) -> str:
    return AZURE_HEADER + AZURE_ROW + cells + "\n"


def own(cells: str) -> str:
    return OWN_HEADER + "0,1,1,\n" + cells + "\n"


@pytest.mark.parametrize(
    ("text", "line", "column", "problem"),
    [
        (azure("2023-11-16 18:17:04,0,10"), 3, "ContextTokens", "must be an integer in"),
        (azure("2023-11-16 18:17:04,-5,10"), 3, "ContextTokens", "got '-5'"),
        (azure("2023-11-16 18:17:04,5.5,10"), 3, "ContextTokens", "got '5.5'"),
        (azure("2023-11-16 18:17:04,1_0,10"), 3, "ContextTokens", "got '1_0'"),
        (azure("2023-11-16 18:17:04,٣,10"), 3, "ContextTokens", "integer"),
        (azure("2023-11-16 18:17:04,5,"), 3, "GeneratedTokens", "got ''"),
        (azure("2023-11-16 18:17:04,5,ten"), 3, "GeneratedTokens", "got 'ten'"),
        (azure("2023-11-16 18:17:04,5,nan"), 3, "GeneratedTokens", "got 'nan'"),
        (azure("2023-11-16 18:17:04,5," + "9" * 5000), 3, "GeneratedTokens", "integer"),
        (azure("2023-11-16 18:17:04,5,1000000001"), 3, "GeneratedTokens", "1000000001"),
        (azure("yesterday,5,6"), 3, "TIMESTAMP", "got 'yesterday'"),
        (azure("2023-11-16 18:17:61,5,6"), 3, "TIMESTAMP", "no instant of the calendar"),
        (azure("2023-02-30 18:17:01,5,6"), 3, "TIMESTAMP", "no instant of the calendar"),
        (azure("2023-11-16 18:17:03.9799599,5,6"), 3, "TIMESTAMP", "before it: sort the file by"),
        (azure("2023-11-16 18:17:04,5"), 3, None, "has 2 cells, but the header has 3"),
        (azure("2023-11-16 18:17:04,5,6,7"), 3, None, "has 4 cells, but the header has 3"),
        (azure('2023-11-16 18:17:04,5,"6'), 3, None, "no CSV: unexpected end of data"),
        (AZURE_HEADER.replace("\n", "\r") + AZURE_ROW, 1, None, "a carriage return ends no line"),
        ('"TIMESTAMP","ContextTokens"', 1, "GeneratedTokens", "is missing"),
        (azure("\n\n2023-11-16 18:17:04,5,x"), 5, "GeneratedTokens", "got 'x'"),
        (AZURE_HEADER, None, None, "holds no request"),
        ("TIMESTAMP,ContextTokens\n" + AZURE_ROW, 1, "GeneratedTokens", "is missing"),
        ("TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\n", 1, "ContextTokens", "twice"),
        ("\n\nTIMESTAMP\n", 3, "ContextTokens", "is missing"),
        (own("-0.1,1,1,"), 3, "at_s", "must be a number in"),
        (own("nan,1,1,"), 3, "at_s", "finite"),
        (own("-inf,1,1,"), 3, "at_s", "finite"),
        (own("1e400,1,1,"), 3, "at_s", "finite"),
        (own("1_0,1,1,"), 3, "at_s", "finite"),
        (own(",1,1,"), 3, "at_s", "finite"),
        (own("soon,1,1,"), 3, "at_s", "got 'soon'"),
        (own("1,0,1,"), 3, "num_prompt_tokens", "integer"),
        (own("1,1,0,"), 3, "num_output_tokens", "integer"),
        (OWN_HEADER.replace("slo_class", "slo_clas"), 1, "slo_clas", "is unknown"),
        (OWN_HEADER.replace("slo_class", ""), 1, "without a name", "is unknown"),
        (
            OWN_HEADER.replace("slo_class", "prefix_ids") + "0,1,1,1 x\n",
            2, "prefix_ids", "block ids with spaces",
        ),
        (OWN_HEADER.replace("slo_class", "prefix_ids") + "0,1,1,1 2\n", 2, None, "names 2 blocks"),
        ("when,what\n1,2\n", None, None, "no known format: it begins with 'when,what'"),
    ],
)  # fmt: skip
def test_broken_tables(
    tmp_path: Path, text: str, line: int | None, column: str | None, problem: str
) -> None:
    error = refusal(tmp_path, text)
    assert (error.line, error.column) == (line, column)
    assert problem in str(error)


def mooncake(old: str, new: str) -> str:
    assert old in MOONCAKE_ROW
    return MOONCAKE_ROW + MOONCAKE_ROW.replace(old, new)


@pytest.mark.parametrize(
    ("text", "line", "column", "problem"),
    [
        (mooncake(": 0,", ": -1,"), 2, "timestamp", "number in"),
        (mooncake(": 0,", ": NaN,"), 2, "timestamp", "got nan"),
        (mooncake(": 0,", ": Infinity,"), 2, "timestamp", "got inf"),
        (mooncake(": 0,", ": 1e999,"), 2, "timestamp", "got inf"),
        (mooncake(": 0,", ': "0",'), 2, "timestamp", "got '0'"),
        (mooncake(": 0,", ": true,"), 2, "timestamp", "got True"),
        (mooncake(": 0,", ": null,"), 2, "timestamp", "got None"),
        (mooncake(": 6", ": 0"), 2, "input_length", "integer"),
        (mooncake(": 6", ": 6.0"), 2, "input_length", "got 6.0"),
        (mooncake(": 5", ': "5"'), 2, "output_length", "got '5'"),
        (mooncake("input_length", "inputs"), 2, "input_length", "is missing"),
        (mooncake("[0]", "[0.5]"), 2, "hash_ids", "list of integers"),
        (mooncake("[0]", "[-1]"), 2, "hash_ids", "list of integers"),
        (mooncake("[0]", "7"), 2, "hash_ids", "list of integers"),
        (mooncake("[0]", "[0, 1]"), 2, None, "names 2 blocks of 512 tokens"),
        (mooncake("[0]", f"[{2**63}]"), 2, None, "prefix_ids"),
        (mooncake("}", ""), 2, "72 (character)", "no JSON"),
        (MOONCAKE_ROW + "[1]\n", 2, None, "must be an object, got a list"),
        (MOONCAKE_ROW + "[" * 100_000 + "\n", 2, None, "JSON"),
        (mooncake(": 6", ": " + "9" * 5000), 2, None, "no usable JSON"),
        (mooncake(": 0,", ": 9,") + MOONCAKE_ROW, 3, "timestamp", "earlier than the row before"),
        (OWN_ROW.replace("1}", '1, "slo": "chat"}'), 1, "slo", "is unknown"),
        (OWN_ROW.replace("1}", '1, "slo_class": 3}'), 1, "slo_class", "name of a class"),
        ('{"at_s": 0', 1, "11 (character)", "no JSON"),
        ('{"a": 1}', None, None, "no known format"),
    ],
)
def test_broken_json_lines(
    tmp_path: Path, text: str, line: int | None, column: str | None, problem: str
) -> None:
    error = refusal(tmp_path, text)
    assert (error.line, error.column) == (line, column)
    assert problem in str(error)


@pytest.mark.parametrize("data", [b"", b"\n \r\n\n", b"\xef\xbb\xbf", gzip.compress(b"")])
def test_an_empty_file(tmp_path: Path, data: bytes) -> None:
    assert refusal(tmp_path, data).problem == "is empty"


def test_a_format_that_is_not_the_files(tmp_path: Path) -> None:
    text = azure("2023-11-16 18:17:04,5,6")
    assert refusal(tmp_path, text, format="csv").column == "at_s"
    assert refusal(tmp_path, text, format="mooncake").problem.startswith("is no JSON")
    assert refusal(tmp_path, MOONCAKE_ROW, format="jsonl").column == "at_s"
    assert refusal(tmp_path, MOONCAKE_ROW, format="azure").column == "TIMESTAMP"


def test_sorting_cures_the_order_and_nothing_else(tmp_path: Path) -> None:
    text = azure("2023-11-16 18:17:03,5,6")
    assert refusal(tmp_path, text).line == 3
    assert read_trace(tmp_path / "broken.trace", sort=True).num_requests == 2
    assert refusal(tmp_path, azure("2023-11-16 18:17:03,5,x"), sort=True).line == 3


WHOLE = [
    (AZURE_HEADER + AZURE_ROW * 3).encode(),
    (OWN_HEADER + "0,1,1,chat\n0.5,2,2,\n").encode(),
    (MOONCAKE_ROW * 3).encode(),
    (OWN_ROW * 3).encode(),
    gzip.compress((OWN_ROW * 3).encode(), mtime=0),
]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    whole=st.sampled_from(WHOLE),
    cut=st.tuples(st.integers(0, 300), st.integers(0, 4)),
    put=st.binary(max_size=4) | st.sampled_from([b'"', b"\n", b",", b"{", b"1e", b"\x00", b"\r"]),
)
def test_damage_anywhere_is_a_trace_or_a_refusal_never_another_error(
    tmp_path: Path, whole: bytes, cut: tuple[int, int], put: bytes
) -> None:
    start, length = cut
    path = tmp_path / "damaged"
    path.write_bytes(whole[:start] + put + whole[start + length :])
    with contextlib.suppress(TraceError):
        assert read_trace(path).num_requests > 0


def test_a_file_that_is_not_there_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.csv: cannot be read: No such file"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    error = refusal(tmp_path, own("1,1,1,").encode() + b"2,1,1,\xff\n")
    assert (error.line, error.problem) == (4, "is not UTF-8: byte 7 of the line is no text")
    assert "UTF-16" in refusal(tmp_path, OWN_HEADER.encode("utf-16")).problem


def test_a_damaged_archive_names_the_line_it_got_to(tmp_path: Path) -> None:
    whole = gzip.compress((OWN_HEADER + "0,1,1,\n" * 5).encode())
    error = refusal(tmp_path, whole[:-6])
    assert "damaged" in error.problem
    flipped = bytearray(whole)
    flipped[-5] ^= 0xFF
    assert "damaged" in refusal(tmp_path, bytes(flipped)).problem
    assert "damaged" in refusal(tmp_path, b"\x1f\x8bnonsense").problem


def test_a_line_without_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_text, "MAX_LINE_BYTES", 100)
    error = refusal(tmp_path, OWN_HEADER + "1" * 101)
    assert (error.line, error.problem) == (2, "is longer than 100 bytes: is this a trace?")


def test_bad_options_are_named(tmp_path: Path) -> None:
    path = tmp_path / "fine.csv"
    path.write_text(OWN_HEADER + "0,1,1,\n")
    for jitter_s in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="jitter_s"):
            read_trace(path, jitter_s=jitter_s)
    with pytest.raises(ValueError, match="seed"):
        read_trace(path, jitter_s=1.0, seed=-1)
