"""Strange decoders whose streams are to go on, and what a client must not see of it."""

import pytest

from engine_ext.common.resume_payload import encode_token_ids
from router.http_client.answer_limits import MemoryBudget
from router.proxy.resume_buffer import ResumeBuffer
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, Script, chunk
from tests.unit.router import test_resume
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering, reset
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import USUAL, running_engine
from tests.unit.router.test_resume import (
    OURS,
    RENDERS,
    WORDS,
    dies_after,
    error_in,
    event,
    from_the_beginning_to,
    legs,
    texts_of,
    to_the_end,
    word_event,
)

d2, start_router = test_resume.d2, test_resume.start_router


def ends_cleanly(number: int, how: str) -> Script:
    async def script(request: Received, peer: Peer) -> None:
        await from_the_beginning_to(number, request, peer)
        tail = DONE if how == "done" else word_event(request, number)[:-9]
        await peer.send(chunk(tail) + b"0\r\n\r\n")

    return script


@pytest.mark.parametrize("how", ["done", "half"])
async def test_an_early_end_is_not_passed_on(
    router: Router, d: MockEngine, d2: MockEngine, how: str
) -> None:
    d.scripts = d2.scripts = [ends_cleanly(2, how)]
    answer = await router.stream()
    assert texts_of(answer.text) == WORDS
    assert answer.text.count("[DONE]") == 1


@pytest.mark.parametrize("heartbeat", [0, 60])
@pytest.mark.parametrize("size", [1, 300_000])
async def test_who_goes_on_goes_on_with_a_stream(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, size: int, heartbeat: float
) -> None:
    """Another answer, whole, is no part of the one that the client has begun to read."""
    router = await start_router(stream_heartbeat=heartbeat)
    answers_whole = answering(200, {**USUAL, "choices": [{"index": 0, "text": "x" * size}]})
    d.scripts = d2.scripts = [dies_after(2), answers_whole]
    answer = await router.stream()
    assert "xx" not in answer.text
    assert error_in(answer.text)["message"] == "the decode engine sent a broken answer"
    await router.settled()
    assert sum(router.engine(engine).breaker.failures for engine in (d, d2)) == 2


async def test_who_goes_on_reads_ids_as_who_told_them(
    start_router: StartRouter, d: MockEngine
) -> None:
    """The first one failed before it said anything, and reads ids in another way."""
    others = OURS | {"renders": RENDERS | {"tokenizer": "9"}}
    says_nothing = reset
    async with running_engine(to_the_end) as d2, running_engine(to_the_end) as d3:
        d2.identity, d3.identity = others, OURS
        router = await start_router(ds=[d, d2, d3])
        d.scripts = [says_nothing, says_nothing]  # on a kept connection, and on a new one
        d2.scripts = [dies_after(2)]
        answer = await router.stream()
        assert len(legs(d2)) == 1
        assert '"error"' in answer.text
        assert router.gateway.memory.resume_buffers.size == 0
        for one in (d, d3):
            assert all(b'"spoken"' not in leg.body for leg in legs(one))


def test_what_came_with_an_early_end_is_seen_by_the_next_tap() -> None:
    class Seen:
        text = b""

        def passing(self, block: bytes, last: bool) -> bytes:
            assert not last
            self.text += block
            return block

    seen, buffer = Seen(), ResumeBuffer(MemoryBudget(0), {}, 2)
    buffer.start_leg(seen)
    error = b'data: {"error": {"message": "no"}}\n\n'
    assert buffer.passing(event(b"x", "AQAA") + error, False) == event(b"x")
    assert buffer.is_cut
    assert seen.text == event(b"x")


async def test_a_long_prompt_is_told(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    """Of more bytes than an event may be held for."""
    router = await start_router(min_remote_prefill_tokens=1000)
    ids = encode_token_ids(list(range(90_000)))

    async def long_one(request: Received, peer: Peer) -> None:
        head, tail = word_event(request, 0).split(b"\n", 1)
        assert head.startswith(b": prompt_token_ids")
        await peer.send(STREAM_HEAD + chunk(b": prompt_token_ids %s\n" % ids.encode() + tail))
        await peer.send(chunk(word_event(request, 1)))
        for number in range(2, len(WORDS)):
            finish = "stop" if number == len(WORDS) - 1 else None
            await peer.send(chunk(word_event(request, number, finish)))
        await peer.send(chunk(DONE) + b"0\r\n\r\n")

    d.scripts = d2.scripts = [long_one]
    answer = await router.stream()
    assert "token_ids" not in answer.text
