"""Scripts of mock engines for the tests of the router."""

import asyncio

from scripts.mock_engine import DONE, LAST_CHUNK, STREAM_HEAD, Peer, Received, Script, chunk
from tests.unit.router.mock_engine import PARAMS, USUAL, event


async def usual_prefill(request: Received, peer: Peer) -> None:
    await peer.answer(USUAL | {"kv_transfer_params": PARAMS})


async def usual_decode(request: Received, peer: Peer) -> None:
    if request.json.get("stream"):
        await peer.stream(event("a"), event("b"), DONE)
    else:
        await peer.answer(USUAL)


def answer_after(released: asyncio.Event | asyncio.Barrier, script: Script) -> Script:
    """Return a script that answers as `script` does once `released` lets it."""

    async def answer(request: Received, peer: Peer) -> None:
        await released.wait()
        await script(request, peer)

    return answer


def raw(data: bytes) -> Script:
    """Return a script that sends these bytes and closes the connection."""

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(data)
        peer.close()

    return script


def answering(status: int, content: object, **headers: str) -> Script:
    """Return a script that always gives this answer."""

    async def script(request: Received, peer: Peer) -> None:
        await peer.answer(content, status, {k.replace("_", "-"): v for k, v in headers.items()})

    return script


def streaming(*events: bytes) -> Script:
    """Return a script that always gives this stream."""

    async def script(request: Received, peer: Peer) -> None:
        await peer.stream(*events)

    return script


def streaming_until(released: asyncio.Event, first: bytes, *rest: bytes) -> Script:
    """Return a script that streams one event, and the rest once `released` is set."""

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(first))
        await released.wait()
        await peer.send(b"".join(map(chunk, rest)) + LAST_CHUNK)

    return script


def hanging(*, asked: asyncio.Event | None = None, left: asyncio.Event | None = None) -> Script:
    """Return a script that answers nothing, and notes a request and the end of its connection."""

    async def script(request: Received, peer: Peer) -> None:
        if asked:
            asked.set()
        await peer.wait_left()
        if left:
            left.set()

    return script


async def reset(request: Received, peer: Peer) -> None:
    peer.reset()


def answer_late(seconds: float, script: Script) -> Script:
    """Return a script that answers as `script` does after some time."""

    async def answer(request: Received, peer: Peer) -> None:
        await asyncio.sleep(seconds)
        await script(request, peer)

    return answer


hang = hanging()
fails = answering(500, {"error": {"message": "no"}})
refuses = answering(400, {"error": {"message": "no"}})
