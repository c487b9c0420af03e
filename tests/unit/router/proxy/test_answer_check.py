"""Streams that end before any output are detected, however their bytes are cut."""

import asyncio
from collections.abc import Callable, Iterable
from itertools import pairwise
from time import monotonic as now

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.common.deadlines import Deadlines
from router.fleet.engine import DECODE
from router.http_client.answer_limits import MemoryBudget
from router.http_client.engine_answer import HIGH_WATER, EngineAnswer
from router.http_client.sse import SseReader
from router.proxy.answer_check import StreamValidator, failure_of
from router.proxy.resume_buffer import ResumeBuffer
from scripts.mock_engine import DONE, MockEngine
from tests.unit.router.engine_scripts import answering
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import event
from tests.unit.router.proxy.test_stopped_engines import choice_of

ROLE = choice_of(delta={"role": "assistant", "content": ""}, finish_reason=None)
CHAT_END = choice_of(delta={}, finish_reason="abort") + DONE
TEXT_END = choice_of(text="", finish_reason="abort") + DONE
SECOND_ROLE = choice_of(index=1, delta={"role": "assistant", "content": ""}, finish_reason=None)
TEXT = choice_of(delta={"content": "a"}, finish_reason=None)


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
    judging = asyncio.create_task(StreamValidator(DECODE, None, True).first_output(answer))
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


@pytest.mark.parametrize("first", [event("a"), with_crlf(TEXT), choice_of(text="", token_ids=[1])])
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


IN_LINES = (
    b'event: error\ndata: {\ndata: "error":\n: note\ndata: {"message": "CUDA died",\n'
    b'data: "code": 500}\nid: 7\ndata: }\n\n'
)
ABORT_IN_LINES = (
    b'data: {"choices": [{"index": 0, "text": "", "finish_reason":\ndata: "abort"}]}\n\n'
)
FAILED_LATER = [
    IN_LINES,
    ABORT_IN_LINES,
    TEXT_END,
    choice_of(text="b", finish_reason="error"),
    choice_of(text="", finish_reason="cache_threshold"),
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


@pytest.mark.parametrize("failed", FAILED_LATER)
@pytest.mark.parametrize("boundary", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("count", [0, 1, 100])
def test_a_failure_at_the_end_of_a_long_block_is_found(
    failed: bytes, boundary: bytes, count: int
) -> None:
    after = b"data: [DONE]\n\n: ping\n\n"
    passes, rest = TEXT + event("and " * 999) + event("and") * count, failed + after
    passes, rest = passes.replace(b"\n", boundary), rest.replace(b"\n", boundary)
    ending = StreamValidator(DECODE, None, is_generation=True)
    assert ending.passing(passes + rest, True) == passes
    assert ending.failure is not None


@given(
    st.sampled_from(FAILED_LATER),
    st.sampled_from((b"\n", b"\r\n", b"\r")),
    st.lists(st.integers(0, 1000), max_size=9),
)
def test_a_failure_is_found_however_its_stream_is_cut(
    failed: bytes, line_end: bytes, cuts: list[int]
) -> None:
    """Both for a stream that can be resumed and for one that cannot."""
    passes, rest = TEXT + event("and"), failed + event("more") + b"data: [DONE]\n\n"
    stream, passes = (part.replace(b"\n", line_end) for part in (passes + rest, passes))
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader, validator, buffer = SseReader(), StreamValidator(DECODE, None, True), resumable()
    passed, recorded = b"", b""
    for at, end in pairwise(places):
        block = reader.whole_events(stream[at:end])
        passed += validator.passing(block, False)
        recorded += buffer.passing(block, False)
    passed += validator.passing(reader.rest(), True)
    recorded += buffer.passing(b"", True)
    assert passed == passes
    assert recorded == passes
    assert validator.failure is not None
    assert buffer.is_cut or buffer.is_preempted


def resumable() -> ResumeBuffer:
    buffer = ResumeBuffer(MemoryBudget(0), {}, 2)
    buffer.start_leg(None)
    buffer.passing(b": prompt_token_ids AAAA\n: token_ids BBBB\n\n", False)
    return buffer


@pytest.mark.parametrize("failed", [IN_LINES, ABORT_IN_LINES])
@pytest.mark.parametrize("blocks", [lambda stream: [stream], lambda stream: in_bytes(stream)])
@pytest.mark.parametrize("start", [ROLE, b"\xef\xbb\xbf" + ROLE, b": waiting\n\n", b""])
async def test_a_first_failure_in_several_lines_of_data_is_seen(
    failed: bytes, blocks: Callable[[bytes], list[bytes]], start: bytes
) -> None:
    assert (await verdict(blocks(start + failed)))[0]
    assert (await verdict(blocks(with_crlf(start + failed))))[0]


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
        (TEXT + choice_of(text="", finish_reason="stop"), True),
        (TEXT + choice_of(text="", finish_reason="a reason of next year"), True),
    ],
)
def test_a_stream_has_an_end(events: bytes, is_whole: bool) -> None:
    ending = StreamValidator(DECODE, None, is_generation=True)
    passed = ending.passing(events, True)
    assert (ending.failure is None) == is_whole
    assert (ending.last if is_whole else passed) == (events if is_whole else TEXT)


STOP = choice_of(text="", finish_reason="stop")
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 1}}'


@pytest.mark.parametrize(
    ("end", "is_several", "passes"),
    [
        (USAGE[:30], False, b""),
        (b"event: usa", False, b""),
        (USAGE, False, USAGE),
        (b'data: {\ndata: "usage": {}}', False, b'data: {\ndata: "usage": {}}'),
        (b'data: {\ndata: "usage": {}', False, b""),
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


WHOLE = (
    b'{"id":"x","object":"text_completion","choices":[{"index":0,"text":"a {b} [c]","logprobs":'
    b'{"tokens":["a"]},"finish_reason":"stop","stop_reason":null}],"usage":{"prompt_tokens":3}}'
)
CUT_OFF = [WHOLE[:end] for end in range(1, len(WHOLE)) if WHOLE[end - 1 : end] == b"}"]
AN_ERROR = WHOLE.replace(b"text_completion", b"error")


@pytest.mark.parametrize("body", [*CUT_OFF, AN_ERROR])
async def test_body_that_is_cut_off_or_is_an_error_is_no_answer(
    router: Router, d: MockEngine, body: bytes
) -> None:
    d.scripts = [answering(200, body)] * 4
    assert (await router.complete()).status_code >= 500
    d.scripts = [answering(200, WHOLE)]
    assert (await router.complete()).json()["choices"][0]["finish_reason"] == "stop"
