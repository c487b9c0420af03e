"""The parts of a stream that a resume buffer keeps, and those that it passes on."""

import pytest

from router.http_client.answer_limits import MemoryBudget
from router.proxy.resume_buffer import ResumeBuffer

FIRST = b': prompt_token_ids AAAA\n: token_ids BBBB\ndata: {"id":"a","created":1,"x":"Hel"}\n\n'
NEXT = b': token_ids CCCC\ndata: {"id":"a","created":1,"x":"lo"}\n\n'
PLAIN = b'data: {"id":"a","created":1,"x":"lo"}\n\n'


def after_first() -> ResumeBuffer:
    buffer = ResumeBuffer(MemoryBudget(0), {}, 2)
    buffer.start_leg(None)
    assert buffer.passing(FIRST, False) == b'data: {"id":"a","created":1,"x":"Hel"}\n\n'
    return buffer


def output_of(buffer: ResumeBuffer) -> bytes:
    return buffer.begun().partition(b'"output_token_ids":"')[2].partition(b'"')[0]


@pytest.mark.parametrize(
    ("block", "passes", "output"),
    [
        (NEXT, PLAIN, b"BBBBCCCC"),
        (NEXT.replace(b"\n", b"\r\n"), PLAIN.replace(b"\n", b"\r\n"), b"BBBBCCCC"),
        (NEXT.replace(b"\n", b"\r"), PLAIN.replace(b"\n", b"\r"), b"BBBBCCCC"),
        (NEXT + NEXT, PLAIN + PLAIN, b"BBBBCCCCCCCC"),
        (PLAIN + NEXT, PLAIN + PLAIN, b"BBBBCCCC"),
        (b": heartbeat\n\n" + NEXT, b": heartbeat\n\n" + PLAIN, b"BBBBCCCC"),
        (b": token_ids CCCC\n" + NEXT, PLAIN, b"BBBBCCCCCCCC"),
        (b": token_ids \n" + PLAIN, PLAIN, b"BBBB"),
    ],
)  # fmt: skip
def test_ids_are_kept_and_not_passed_on(block: bytes, passes: bytes, output: bytes) -> None:
    buffer = after_first()
    assert buffer.passing(block, False) == passes
    assert output_of(buffer) == output
    assert buffer.can_resume


@pytest.mark.parametrize("ids", [b"CCC", b"CCCCC", b"CC=C", b"CC C"])
def test_who_tells_nonsense_is_not_followed(ids: bytes) -> None:
    buffer = after_first()
    assert buffer.passing(NEXT.replace(b"CCCC", ids), False) == PLAIN
    assert buffer.is_full
    assert not buffer.can_resume


@pytest.mark.parametrize(
    "end",
    [
        b': token_ids CCCC\ndata: {"id":"a","created":1,"finish_reason":"stop"}\n\n',
        b': token_ids CCCC\ndata: {"id":"a","created":1,"finish_reason" : "abort"}\n\n',
        b": token_ids CCCC\ndata: [DONE]\n\n",
    ],
)
def test_from_its_end_on_a_stream_waits(end: bytes) -> None:
    buffer = after_first()
    assert buffer.passing(NEXT + end, False) == PLAIN
    assert output_of(buffer) == b"BBBBCCCC"
    assert buffer.passing(end, False) == b""


@pytest.mark.parametrize(
    "end",
    [
        b'data: {"id":"a","created":1,"finish_reason":"abort","stop_reason":"cache_threshold"}\n\n'
        b"data: [DONE]\n\n",
        b'data: {"id":"a","created":1,"finish_reason":"stop"}\n\ndata: {"usa',
        b'data: {"id":"a","created":1,"finish_reason":"stop"}\n\ndata: {"error": {}}\n\n',
    ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_nothing_of_an_end_that_is_none_passes(end: bytes, is_last: bool) -> None:
    """The engine that resumes the answer sends another end."""
    buffer = after_first()
    passed = buffer.passing(PLAIN + end, is_last)
    if not is_last:
        passed += buffer.passing(b"", True)
    assert passed == PLAIN
    assert buffer.is_cut


@pytest.mark.parametrize("before", [b"", b": token_ids CCCC\n", NEXT])
@pytest.mark.parametrize(
    "error",
    [
        b'data: {"error": {"message": "x"}}\n\n',
        b'data: {\ndata: "error": {"message": "x"}\ndata: }\n\n',
        b'data: {"id": "a", "error": {"message": "x"}}\n\n',
        b'event: error\ndata: {"type": "error", "message": "x"}\n\n',
    ],
)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_an_error_cuts_the_stream(before: bytes, error: bytes, line_end: bytes) -> None:
    buffer = after_first()
    passes = PLAIN.replace(b"\n", line_end) if before == NEXT else b""
    assert buffer.passing((before + error).replace(b"\n", line_end), False) == passes
    assert buffer.is_cut
