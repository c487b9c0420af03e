"""Streams that end before they have said anything are seen to, however they are cut."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from router.fleet.engine_spec import DECODE
from router.http_client.deadlines import Deadlines, now
from router.http_client.engine_answer import HIGH_WATER, EngineAnswer
from router.proxy.answer_check import StreamValidator, failure_of, first_word
from tests.unit.router.mock_engine import event
from tests.unit.router.proxy.test_stopped_engines import CHAT_END, ROLE, TEXT_END, said

SECOND_ROLE = said(index=1, delta={"role": "assistant", "content": ""}, finish_reason=None)
TEXT = said(delta={"content": "a"}, finish_reason=None)


class Wire:
    """Of a stream that is fed by hand."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def abort(self) -> None: ...
    def half_close(self) -> None: ...


async def verdict(blocks: Iterable[bytes]) -> tuple[bool, bytes]:
    """Whether the stream begins with a failure, and what had come when that was known. Each block
    is looked at before the next one comes."""
    answer = EngineAnswer(Wire(), Deadlines(), now() + 60)
    answer.status, answer.is_event_stream = 200, True
    first, *others = blocks
    answer.feed(first, False)
    judging = asyncio.create_task(first_word(answer))
    for block in others:
        await asyncio.sleep(0)
        if judging.done():
            break
        answer.feed(block, False)
    word = await asyncio.wait_for(judging, 5)
    return word is not None and failure_of(word, DECODE) is not None, answer.peek()


def in_bytes(stream: bytes) -> list[bytes]:
    return [stream[at : at + 1] for at in range(len(stream))]


def with_crlf(stream: bytes) -> bytes:
    return stream.replace(b"\n", b"\r\n")


@pytest.mark.parametrize(
    "blocks",
    [
        [ROLE, CHAT_END],
        [ROLE + SECOND_ROLE, CHAT_END],
        [ROLE, SECOND_ROLE, CHAT_END],
        [ROLE[:9], ROLE[9:] + CHAT_END],
        in_bytes(ROLE + SECOND_ROLE + CHAT_END),
        in_bytes(TEXT_END),
        in_bytes(with_crlf(ROLE + CHAT_END)),
    ],
)
async def test_an_abort_is_seen_however_the_stream_is_cut(blocks: list[bytes]) -> None:
    assert (await verdict(blocks))[0]


@pytest.mark.parametrize("start", [ROLE, ROLE + SECOND_ROLE, with_crlf(ROLE), b""])
async def test_the_first_text_holds_nothing_up(start: bytes) -> None:
    assert await verdict([*in_bytes(start + TEXT), CHAT_END]) == (False, start + TEXT)


@pytest.mark.parametrize("first", [event("a"), with_crlf(TEXT), said(text="", token_ids=[1])])
async def test_what_is_part_of_an_answer_is_passed_at_once(first: bytes) -> None:
    assert await verdict([first, CHAT_END]) == (False, first)


@pytest.mark.parametrize("first", [b": waiting\n\n", b": waiting\r\n\r\n", ROLE * 1000])
async def test_what_is_none_is_not(first: bytes) -> None:
    assert await verdict([first, CHAT_END]) == (True, first + CHAT_END)


async def test_roles_without_end_are_not_held_without_end() -> None:
    found, held = await verdict([ROLE * 1000] * 1000)
    assert not found
    assert len(held) < HIGH_WATER + 1001 * len(ROLE)


async def test_a_failure_that_comes_with_the_first_text_is_seen() -> None:
    assert (await verdict([TEXT + CHAT_END]))[0]


FAILED_LATER = [
    TEXT_END,
    said(text="b", finish_reason="error"),
    said(text="", finish_reason="cache_threshold"),
    b'data: {"error": {"message": "CUDA died", "code": 500}}\n\n',
    b'event: error\ndata: {"object": "error", "message": "CUDA died", "code": 500}\n\n',
]


@pytest.mark.parametrize("failed", FAILED_LATER)
@pytest.mark.parametrize("boundary", [b"\n", b"\r\n", b"\r"])
def test_nothing_passes_from_a_failure_on(failed: bytes, boundary: bytes) -> None:
    """However the blocks are cut between the events, and whatever ends their lines."""
    whole = TEXT + event("and") + failed + event("more") + b"data: [DONE]\n\n"
    events = [one + b"\n\n" for one in whole.split(b"\n\n")[:-1]]
    for cut in range(len(events)):
        ending = StreamValidator(DECODE, None, is_generation=True)
        blocks = [b"".join(events[:cut]), b"".join(events[cut:])]
        blocks = [block.replace(b"\n", boundary) for block in blocks]
        passed = b"".join(
            ending.passing(block, last) for block, last in zip(blocks, (False, True), strict=True)
        )
        assert passed == (TEXT + event("and")).replace(b"\n", boundary)
        assert ending.failure is not None
        assert ending.last == b""


@pytest.mark.parametrize(
    ("events", "is_whole"),
    [
        (TEXT, False),
        (TEXT + b"data: {", False),
        (TEXT + b'data: {"choices": [{"text": "\\"finish_reason\\": \\"stop\\""', False),
        (TEXT + b"data: [DONE]\n\n", True),
        (TEXT + b"data: [DONE]", True),
        (TEXT + b"data:[DONE]", True),
        (TEXT + event("data: [DONE]")[:-9], False),
        (TEXT + said(text="", finish_reason="stop"), True),
        (TEXT + said(text="", finish_reason="a reason of next year"), True),
    ],
)
def test_a_stream_has_an_end(events: bytes, is_whole: bool) -> None:
    ending = StreamValidator(DECODE, None, is_generation=True)
    passed = ending.passing(events, True)
    assert (ending.failure is None) == is_whole
    assert (ending.last if is_whole else passed) == (events if is_whole else TEXT)


STOP = said(text="", finish_reason="stop")
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 1}}'


@pytest.mark.parametrize(
    ("end", "is_several", "passes"),
    [
        (USAGE[:30], False, b""),
        (b"event: usa", False, b""),
        (USAGE, False, USAGE),
        (b": ping\n", False, b": ping\n"),
        (b"data: [DONE]\n", True, b"data: [DONE]\n"),
        (b"data:[DONE]\n\n???", True, b"data:[DONE]\n\n???"),
        (USAGE + b"\n\n", True, USAGE + b"\n\n"),
    ],
)
def test_nothing_that_is_cut_passes_behind_a_finish(
    end: bytes, is_several: bool, passes: bytes
) -> None:
    """And of several answers one may have its finish long before the others."""
    ending = StreamValidator(DECODE, None, True, is_several)
    passed = ending.passing(TEXT + STOP, False) + ending.passing(end, True) + ending.last
    assert passed == TEXT + STOP + passes
    assert (ending.failure is None) == (passes == end and (not is_several or b"DONE" in end))
