"""What is asked of a router, case by case."""

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from scripts.router_bench.load import Requests

PATH = "/v1/chat/completions"
STREAMED_CHUNKS = 64
PACE = 5000
"""Microseconds between two chunks of a paced stream."""
TURNS = 4
KB, MB = 1024, 1024 * 1024
IDLE_STREAMS = 1000
FOREVER = 3_600_000_000
"""Microseconds: a stream that says nothing any more."""


@dataclass(frozen=True, slots=True)
class Case:
    """`total` requests over `connections`; `chunks` of each answer that come one by one.

    `goal` is the most that the router may cost, as a share of vllm-router's cost.
    """

    name: str
    requests: Requests
    connections: int = 32
    total: int = 4000
    chunks: int = 1
    goal: float | None = None


def cases() -> Mapping[str, Case]:
    burst = {"stream": True, "max_tokens": STREAMED_CHUNKS}
    paced = {**burst, "seed": PACE}
    made = [
        Case("latency", _same(KB), connections=1, total=600),
        Case("unary", _same(KB), goal=0.4),
        Case("unary-1000", _same(KB), connections=1000, goal=0.4),
        Case("32k", _same(32 * KB), total=2000, goal=0.5),
        Case("1m", _same(MB), connections=4, total=60),
        Case("burst", _same(KB, burst), total=3000, chunks=STREAMED_CHUNKS, goal=0.2),
        Case("paced", _same(KB, paced), total=256, chunks=STREAMED_CHUNKS, goal=0.75),
        Case("paced-1000", _same(KB, paced), 1000, 1000, STREAMED_CHUNKS, goal=0.75),
        Case("turn", _turns(b"x-session-id")),
        Case("turn-alone", _turns(b"x-no-session")),
    ]
    return {case.name: case for case in made}


def silent_stream() -> bytes:
    """A request whose answer begins, and then says nothing."""
    wanted = {"stream": True, "max_tokens": STREAMED_CHUNKS, "seed": FOREVER}
    return _same(KB, wanted)(0, 0)


def _same(size: int, fields: Mapping[str, object] | None = None) -> Requests:
    """One user message that makes the body about `size` bytes."""
    request = _post({"messages": [_said("user", "a" * (size - 100))], **(fields or {})})
    return lambda connection, number: request


def _turns(names: bytes) -> Requests:
    """Conversations of TURNS turns; each one repeats what was said before. `names`: the header that
    names one, or that nobody reads: then they are requests of the same bytes, each by itself."""
    bodies = [_post_turn(turn) for turn in range(TURNS)]

    def request(connection: int, number: int) -> bytes:
        head, body = bodies[number % TURNS]
        return head % (names, connection, number // TURNS) + body

    return request


def _post_turn(turn: int) -> tuple[bytes, bytes]:
    asked = _said("user", "a" * KB)
    messages = [asked, *[_said("assistant", "x"), asked] * turn]
    body = orjson.dumps({"model": "m", "messages": messages})
    return _head(len(body)) + b"%b: bench-%d-%d\r\n\r\n", body


def _post(fields: Mapping[str, object]) -> bytes:
    body = orjson.dumps({"model": "m", "max_tokens": 16, **fields})
    return _head(len(body)) + b"\r\n" + body


def _head(length: int) -> bytes:
    return (
        f"POST {PATH} HTTP/1.1\r\nhost: router\r\nuser-agent: bench\r\naccept: */*\r\n"
        f"authorization: Bearer key\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n"
    ).encode("ascii")


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
