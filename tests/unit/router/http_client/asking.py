"""What tests ask an engine, and what it says to that."""

from time import monotonic as now

from router.http_client.engine_answer import EngineAnswer
from router.http_client.pool import EnginePool
from scripts.mock_engine import Peer, Received, Script
from tests.unit.router.engine_scripts import raw
from tests.unit.router.harness import post

REQUEST = post(b"{}")
LIMIT = 10 * 1024 * 1024
OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"content-length: 2\r\n\r\n{}"


def soon() -> float:
    """A deadline that is not to come."""
    return now() + 10


async def ask(pool: EnginePool, fresh: bool = False) -> EngineAnswer:
    return await pool.request(REQUEST, soon(), fresh)


async def body_of(pool: EnginePool, fresh: bool = False) -> bytes:
    """A whole answer; what it leaves is its connection, kept or not."""
    answer = await ask(pool, fresh)
    try:
        return await answer.read(LIMIT)
    finally:
        answer.close()


def saying(data: bytes) -> Script:
    """Sends this, and closes."""
    return raw(data)


def saying_and_waiting(data: bytes) -> Script:
    """Sends this, and keeps the connection open until it is left."""

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(data)
        await peer.wait_left()

    return script
