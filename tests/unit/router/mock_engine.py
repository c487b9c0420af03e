"""The scripted mock engine of the router's tests, with the answers that most of them want."""

import contextlib
import json
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from itertools import takewhile
from typing import Any

import pytest

from scripts.mock_engine import DONE, MockEngine, Peer, Received, Script

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 2, 1]],
    "remote_engine_id": "85654aea-3ebd-49ac-a237-52c3397970a4_dp0",
    "remote_request_id": "chatcmpl-1",
    "remote_host": "10.9.8.7",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 33,
    "remote_blocks_expiry_time": 12345.678901234567,
    "a_key_of_next_year": {"nested": [1, None, "é"]},
}
USUAL = {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": "x"}]}


class LendingEngines:
    """Engines that compute nothing, but have prefix caches and borrow from those of the others.

    Each answers with the tokens (four characters each) that it really had: `cached_tokens` with
    what it has borrowed, and `borrowed_tokens`, unless the holders have refused.
    """

    def __init__(self) -> None:
        self.rank: dict[str, object] = {
            "lends": True,
            "borrows": True,
            "num_blocks": 10_000,
            "block_size": 16,
        }
        """Fields of a rank on each identity page."""
        self.prompts: dict[str, list[str]] = {}
        """The prompts in each engine's cache, by engine id."""
        self.text = ""
        """The text of answers that are not streamed, instead of the usual one."""
        self.silent = False
        """No holder answers in time."""
        self.most = sys.maxsize
        """The most tokens that a holder lends."""

    def add(self, engine: MockEngine, name: str) -> None:
        """Make it one of the engines, under this engine id."""
        rank = {"remote_engine_id": name, "remote_host": "10.9.8.7", "remote_port": 5600}
        engine.identity = {"capabilities": [], "ranks": [rank | {"tp_size": 1} | self.rank]}
        self.prompts[name] = []

        async def answer(request: Received, peer: Peer) -> None:
            body = request.json
            params, prompt = body.get("kv_transfer_params") or {}, body["prompt"]
            loaded = params.get("remote_engine_id") is not None
            own = len(prompt) // 4 if loaded else self._held(name, prompt)
            named = () if self.silent else params.get("holders", ())
            holders = [one["remote_engine_id"] for one in named]
            lent = [min(self.most, self._held(one, prompt)) for one in holders]
            borrowed = max(0, max(lent, default=0) - own)
            self.prompts[name].append(prompt)
            details = {"cached_tokens": own + borrowed}
            usage = {"prompt_tokens": len(prompt) // 4, "prompt_tokens_details": details}
            given = PARAMS | {"remote_engine_id": name}
            if borrowed or self.silent:
                given["borrowed_tokens"] = borrowed
            if borrowed:
                given["lender"] = lent.index(max(lent))
            end = {"usage": usage, "kv_transfer_params": given}
            if body.get("stream"):
                last = json.dumps({"choices": []} | end).encode()
                await peer.stream(event("a"), b"data: %b\n\n" % last, DONE)
            else:
                choice = {"index": 0, "text": self.text, "finish_reason": "stop"}
                await peer.answer(USUAL | ({"choices": [choice]} if self.text else {}) | end)

        engine.usual = answer

    def _held(self, name: str, prompt: str) -> int:
        pairs = [zip(one, prompt, strict=False) for one in self.prompts[name]]
        equal = [takewhile(lambda pair: pair[0] == pair[1], one) for one in pairs]
        return max([len([*one]) // 4 for one in equal], default=0)


def event(text: str) -> bytes:
    content = {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": text, "finish_reason": None}],
    }
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def running_engine(
    usual: Script, tls: ssl.SSLContext | None = None
) -> AsyncIterator[MockEngine]:
    engine = MockEngine(usual, tls=tls)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        assert not engine.failures, engine.failures


def engine_fixture(make_script: Callable[[], Script]) -> Any:
    """Return a fixture: a mock engine that runs during a test, with a script of its own."""

    @pytest.fixture
    async def engine() -> AsyncIterator[MockEngine]:
        async with running_engine(make_script()) as running:
            yield running

    return engine


@contextlib.asynccontextmanager
async def running_engines(usual: Script, count: int) -> AsyncIterator[list[MockEngine]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running_engine(usual)) for _ in range(count)]
