"""Framing of server-sent events, wherever the network cuts them."""

from __future__ import annotations

import pytest

from controller.bench.sse import SseParser

STREAM = (
    b'data: {"a": 1}\r\n\r\n: keep-alive\n\ndata: \xc3\xa9\ndata: two\n\nevent: x\ndata:[DONE]\n\n'
)
EVENTS = ['{"a": 1}', "é\ntwo", "[DONE]"]


def test_several_events_in_one_read() -> None:
    assert SseParser().feed(STREAM) == EVENTS


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_one_cut_anywhere_changes_nothing(cut: int) -> None:
    parser = SseParser()
    assert parser.feed(STREAM[:cut]) + parser.feed(STREAM[cut:]) == EVENTS


def test_byte_by_byte_an_event_comes_with_its_last_byte() -> None:
    parser = SseParser()
    seen = [(i, e) for i in range(len(STREAM)) for e in parser.feed(STREAM[i : i + 1])]
    assert [event for _, event in seen] == EVENTS
    assert seen[0][0] == STREAM.index(b"\r\n\r\n") + 3


def test_an_unfinished_event_is_not_delivered() -> None:
    assert SseParser().feed(b"data: half\n") == []
