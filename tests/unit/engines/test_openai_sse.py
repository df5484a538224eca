"""Server-sent events come out the same, however the network cut the bytes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.engines.openai.sse import EventTooLarge, SseParser


def parse(*pieces):
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        (b"data: one\n\ndata: two\n\n", [b"one", b"two"]),
        (b"data: one\r\n\r\ndata: two\r\n\r\n", [b"one", b"two"]),
        (b"data: one\r\rdata: two\r\r", [b"one", b"two"]),
        (b"data:tight\n\n", [b"tight"]),
        (b"data:  two spaces\n\n", [b" two spaces"]),
        (b": ping\n\n: ping\ndata: one\n\n", [b"one"]),
        (b"event: delta\nid: 7\nretry: 10\ndata: one\n\n", [b"one"]),
        (b"data: first\ndata: second\n\n", [b"first\nsecond"]),
        (b"data\n\n", [b""]),
        (b"\n\n\ndata: one\n\n", [b"one"]),
        (b"\xef\xbb\xbfdata: one\n\n", [b"one"]),
        (b"data: never finished\n", []),
        ("data: \u2028 \u0085\n\n".encode(), ["\u2028 \u0085".encode()]),
    ],
)
def test_events(raw, events):
    assert parse(raw) == events
    assert parse(*(raw[at : at + 1] for at in range(len(raw)))) == events


lines = st.sampled_from(
    [
        b"data: a",
        b"data:b",
        b"data",
        b'data: {"x": 1}',
        b": comment",
        b"event: e",
        b"",
        b"",
        b"id",
        b"\xff\xfe",
    ]
)
streams = st.lists(st.tuples(lines, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=30).map(
    lambda pairs: b"".join(line + end for line, end in pairs)
)


@given(streams | st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=12))
def test_any_split_of_the_bytes_gives_the_same_events(raw, cuts):
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    pieces = [raw[start:stop] for start, stop in pairwise(edges)]
    assert parse(*pieces) == parse(raw)


@given(st.lists(st.text(alphabet=st.characters(exclude_characters="\r\n"), min_size=1), max_size=8))
def test_what_is_written_is_read(texts):
    raw = b"".join(b"data: %b\n\n" % text.encode("utf-8", "replace") for text in texts)
    assert parse(raw) == [text.encode("utf-8", "replace") for text in texts]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_an_event_without_end_is_refused_before_it_fills_the_memory(end):
    parser = SseParser(max_event_bytes=1000)
    for _ in range(9):
        assert parser.feed(b"data: " + b"x" * 100 + end) == []
    with pytest.raises(EventTooLarge):
        parser.feed(b"data: " + b"x" * 200 + end)
