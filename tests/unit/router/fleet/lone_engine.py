"""A decoder in a process of its own, which can be stopped: says its port, and streams slowly."""

import asyncio

from scripts.mock_engine import STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.unit.router.engine_scripts import usual_decode
from tests.unit.router.mock_engine import event


async def slow(request: Received, peer: Peer) -> None:
    if not request.json.get("stream"):
        await asyncio.sleep(1.5)
        return await usual_decode(request, peer)
    await peer.send(STREAM_HEAD)
    while True:
        await peer.send(chunk(event("a")))
        await asyncio.sleep(0.05)


async def main() -> None:
    engine = MockEngine(slow)
    await engine.start()
    print(engine.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
