"""The reader of event streams: any split into blocks and any line ends give the same events."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http_client.errors import EventTooLargeError
from router.http_client.sse import (
    SseEvent,
    SseReader,
    comment_lines,
    data_in,
    end_of_last_event,
    events_in,
    is_between_events,
    says_done,
    with_data,
)

BOM = b"\xef\xbb\xbf"
LINE_ENDS = (b"\n", b"\r\n", b"\r")
LINES = st.sampled_from(
    [
        b"data: {",
        b'data: "error": 1',
        b"data:}",
        b"data:  two spaces",
        b"data",
        b"data:",
        b"data: [DONE]",
        b"database: no data",
        b": a comment",
        b":",
        b"event: error",
        b"id: 1",
        "data: é".encode(),
    ]
)


def events_by_the_standard(stream: bytes) -> list[bytes]:
    """The events that a client dispatches, read line by line as in the standard. The event that the
    stream breaks off is the last one."""
    events: list[bytes] = []
    data: list[bytes] = []
    for line in [*re.split(rb"\r\n|\n|\r", stream.removeprefix(BOM)), b""]:
        if not line:
            if data:
                events.append(b"\n".join(data))
            data = []
            continue
        name, colon, value = line.partition(b":")
        if name == b"data" and not line.startswith(b":"):
            data.append(value[1:] if colon and value.startswith(b" ") else value)
    return events


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Events with line ends of one kind or of several, perhaps with more empty lines than needed,
    and perhaps broken off."""
    ends = st.sampled_from(draw(st.sampled_from([(end,) for end in LINE_ENDS] + [LINE_ENDS])))
    blocks = draw(st.lists(st.lists(LINES, min_size=1, max_size=4), max_size=5))
    parts = [BOM] if draw(st.booleans()) else []
    for lines in blocks:
        for line in [*lines, *[b""] * draw(st.integers(1, 3))]:
            parts += (line, draw(ends))
    return b"".join(parts[: draw(st.integers(0, len(parts)))] if draw(st.booleans()) else parts)


@st.composite
def cut_streams(draw: st.DrawFn) -> list[bytes]:
    stream = draw(streams())
    cuts = draw(st.lists(st.integers(0, len(stream)), max_size=12))
    if draw(st.booleans()):
        cuts = list(range(len(stream)))
    return [stream[at:end] for at, end in pairwise([0, *sorted(cuts), len(stream)])]


def read_in_blocks(blocks: list[bytes]) -> list[SseEvent]:
    reader = SseReader()
    return [
        event
        for number, block in enumerate(blocks)
        for event in reader.read(block, number == len(blocks) - 1)
    ]


@given(cut_streams())
def test_events_are_those_of_the_standard_however_a_stream_is_cut(blocks: list[bytes]) -> None:
    stream = b"".join(blocks)
    events = read_in_blocks(blocks)
    assert [e.data for e in events if e.data is not None] == events_by_the_standard(stream)
    whole = list(events_in(stream, at_end=True))
    assert [(e.start, e.data) for e in events] == [(e.start, e.data) for e in whole]
    for one, other in zip(events, whole, strict=True):
        assert not stream[one.end : other.end].strip(b"\r\n")


@given(cut_streams())
def test_a_block_of_whole_events_has_the_events_of_the_reader(blocks: list[bytes]) -> None:
    """Subscribers see the blocks that a reader returns, and agree with it about what is in them."""
    reader, passed, events = SseReader(), b"", list[bytes | None]()
    for block in blocks:
        whole = reader.whole_events(block)
        assert not whole or end_of_last_event(whole + b"d") == len(whole)
        events += [event.data for event in events_in(whole)]
        passed += whole
    rest = reader.rest()
    events += [event.data for event in events_in(rest, at_end=True)]
    assert data_in(passed + rest) == [data for data in events if data is not None]
    assert passed + rest == b"".join(blocks)
    assert events == [event.data for event in read_in_blocks(blocks)]


@pytest.mark.parametrize("end", LINE_ENDS)
def test_an_event_passes_as_soon_as_it_has_ended(end: bytes) -> None:
    event = b"data: 1" + end + end
    reader = SseReader()
    for at in range(len(event) - 1):
        assert reader.whole_events(event[at : at + 1]) == b""
    assert reader.whole_events(event[-1:]) == event
    assert reader.whole_events(event) == event
    assert is_between_events(event)
    assert not is_between_events(event[:-1])


def test_an_event_that_has_not_ended_is_discarded_unless_the_stream_is_over() -> None:
    block = b"data: 1\n\ndata: 2\n"
    assert [event.data for event in events_in(block)] == [b"1"]
    assert list(events_in(block, at_end=True)) == [SseEvent(0, 9, b"1"), SseEvent(9, 17, b"2")]


@given(
    st.lists(st.sampled_from([b"data: a\n\n", b"data: b\r\n\r\n", b": c\n", b"data:", b"x\r\r"])),
    st.lists(st.integers(0, 100)),
)
def test_a_reader_loses_nothing_and_cuts_between_events(
    events: list[bytes], cuts: list[int]
) -> None:
    reader, stream = SseReader(), b"".join(events)
    places = sorted({0, len(stream), *(at for at in cuts if at < len(stream))})
    passed = b""
    for start, end in pairwise(places):
        passed += reader.whole_events(stream[start:end])
        assert passed == stream[: end_of_last_event(stream[:end])]
    assert passed + reader.rest() == stream


@pytest.mark.parametrize("size", [1, 7, 999])
@pytest.mark.parametrize("ending", [b"\n\n", b"\r\n\r\n", b"\r\r", b""])
def test_a_reader_refuses_an_event_above_its_limit(size: int, ending: bytes) -> None:
    def passed(length: int) -> bytes:
        reader, event = SseReader(1000), b"x" * (length - len(ending)) + ending
        stream = event + b"data: y\n\n"
        return b"".join(reader.whole_events(stream[at : at + size]) for at in range(0, 2000, size))

    if ending:
        assert len(passed(1000)) == 1009
    with pytest.raises(EventTooLargeError):
        passed(1001)


@pytest.mark.parametrize("end", LINE_ENDS)
def test_data_is_replaced_and_other_lines_stay(end: bytes) -> None:
    event = end.join([b": note", b"event: error", b"data: {", b"id: 1", b"data: }", b"", b""])
    replaced = end.join([b": note", b"event: error", b"data: {}", b"id: 1", b"", b""])
    assert with_data(event, b"{}") == replaced


@pytest.mark.parametrize("end", LINE_ENDS)
def test_comment_lines_are_found_at_the_start_of_a_line_only(end: bytes) -> None:
    event = end.join([b": ids AAA", b"data: text : ids BBB", b": ids CC", b"", b""])
    kept = end.join([b"data: text : ids BBB", b"", b""])
    assert comment_lines(b"ids").sub(b"", event) == kept
    assert comment_lines(b"ids").findall(event) == [b"AAA", b"CC"]


@pytest.mark.parametrize(
    ("block", "is_done"),
    [
        (b"data: [DONE]\n\n", True),
        (b"data:[DONE]\r\n\r\n", True),
        (b"event: end\rdata:[DONE]\r\r", True),
        (b'data: {"text": "data: [DONE]"}\n\n', False),
        (b": [DONE]\n\n", False),
        (b"data: a\ndata: [DONE]\n\n", False),
    ],
)
def test_done_is_an_event_of_its_own(block: bytes, is_done: bool) -> None:
    assert says_done(block) is is_done
