"""Streams that end before they have said anything are seen to, however they are cut."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from router.flows.screen import ends_at_once, opening, tells_nothing, tells_something
from router.upstream.answer import Answer
from router.upstream.deadlines import Deadlines, now
from tests.unit.router.flows.test_stopped_engines import CHAT_END, ROLE, TEXT_END, said
from tests.unit.router.mock_engine import event

SECOND_ROLE = said(index=1, delta={"role": "assistant", "content": ""}, finish_reason=None)
TEXT = said(delta={"content": "a"}, finish_reason=None)


class Wire:
    """Of a stream that is fed by hand."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def abort(self) -> None: ...
    def hang_up(self) -> None: ...


async def judge(answer: Answer) -> bool:
    """As a decode leg does it."""
    if tells_nothing(opening(answer.held())):
        await tells_something(answer)
    return ends_at_once(opening(answer.held()))


async def verdict(blocks: Iterable[bytes]) -> tuple[bool, bytes]:
    """And what had come by then. Each block is looked at before the next one comes."""
    answer = Answer(Wire(), Deadlines(), now() + 60)
    answer.status, answer.is_event_stream = 200, True
    first, *others = blocks
    answer.feed(first, False)
    judging = asyncio.create_task(judge(answer))
    for block in others:
        await asyncio.sleep(0)
        if judging.done():
            break
        answer.feed(block, False)
    found = await asyncio.wait_for(judging, 5)
    return found, answer.held()


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


@pytest.mark.parametrize("first", [b": waiting\n\n", event("a"), with_crlf(TEXT), b"x\r\r"])
async def test_what_is_no_role_is_passed_at_once(first: bytes) -> None:
    assert await verdict([first, CHAT_END]) == (False, first)


async def test_roles_without_end_are_not_held_without_end() -> None:
    found, held = await verdict([ROLE] * 1000)
    assert not found
    assert len(held) == 129 * len(ROLE)
