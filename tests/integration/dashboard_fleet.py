"""A fleet of scripted engines that report what the dashboard shows, with a load of chats on it.

The engines take their time for prefill, transfer and tokens, and report KV use, leases and
transfers as our engines do. Their streams can be resumed at another decode engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from time import monotonic as now
from typing import Any

import httpx

from engine_ext.common.resume_payload import token_id_comment
from engine_ext.http.leases import found_by
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk

MODEL = "Qwen3-32B"
BLOCK_TOKENS = 16
BYTES_PER_BLOCK = 2_000_000
NUM_BLOCKS = 1500
MAX_TRANSFERS = 128
PREFILL_S_PER_TOKEN = 0.0002
TRANSFER_S_PER_BLOCK = 0.0004
TOKEN_S = 0.012
TEXT = (
    "The prefill engine has computed the prompt, and the decode engine has read its KV blocks. "
    "The next turn computes only what is new."
)
WORDS = TEXT.split()
CAPABILITIES = ["prefix_proof", "turns", "begun", "tell_token_ids"]
# A prompt that no client would send: a scripted engine decodes by it for a minute.
LONG = "Write a long story."


@dataclass
class FleetEngine:
    """One scripted engine with its books about KV."""

    engine: MockEngine
    name: str
    identity: dict[str, Any]
    busy_blocks: int = 0
    leases: int = 0
    moved: Counter[str] = field(default_factory=Counter)
    transfers: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_TRANSFERS))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.engine.port}"

    def publish(self) -> None:
        """Renew the pages that the router reads."""
        free = max(0, NUM_BLOCKS - self.busy_blocks)
        gauges = f"disagg_engine_blocks {NUM_BLOCKS}\ndisagg_engine_blocks_free {free}\n"
        ended = [
            {name: value for name, value in one.items() if name != "at"}
            | {"age_seconds": max(0.0, now() - one["at"])}
            for one in self.transfers
        ]
        moved = [
            {"what": "READ", "engine_id": peer, "bytes": count}
            for peer, count in self.moved.items()
        ]
        rank = {
            "engine_id": self.name,
            "num_leases": self.leases,
            "num_quarantined": 0,
            "moved": moved,
            "transfers": ended,
        }
        self.engine.pages = {
            "/metrics": gauges.encode(),
            "/disagg/leases": json.dumps({"ranks": [rank]}).encode(),
        }

    async def read(self, source: str, request_id: str, blocks: int) -> None:
        """Read KV from another engine."""
        seconds = blocks * TRANSFER_S_PER_BLOCK
        await asyncio.sleep(seconds)
        self.moved[source] += blocks * BYTES_PER_BLOCK
        self.transfers.append(
            {
                "what": "READ",
                "engine_id": source,
                "found_by": found_by(request_id),
                "blocks": blocks,
                "bytes": blocks * BYTES_PER_BLOCK,
                "seconds": seconds,
                "at": now(),
            }
        )


@dataclass
class ScriptedFleet:
    """Prefill and decode engines of one model."""

    prefillers: list[FleetEngine]
    decoders: list[FleetEngine]

    @property
    def engines(self) -> list[FleetEngine]:
        return [*self.prefillers, *self.decoders]

    @property
    def flags(self) -> list[str]:
        return [
            "--prefill",
            *(one.url for one in self.prefillers),
            "--decode",
            *(one.url for one in self.decoders),
        ]

    async def publish(self) -> None:
        while True:
            for one in self.engines:
                one.publish()
            await asyncio.sleep(0.2)


def _identity(name: str) -> dict[str, Any]:
    rank = {"engine_id": name, "compatibility_hash": "c0ffee", "block_size": BLOCK_TOKENS}
    return {
        "capabilities": CAPABILITIES,
        "renders": {"model": MODEL},
        "transfer_modes": ["pull"],
        "side_channel_secret": "required",
        "lease_seconds": 30.0,
        "ranks": [rank],
    }


def _params(engine: FleetEngine, request_id: str, tokens: int, remote: str) -> dict[str, Any]:
    return {
        "do_remote_prefill": remote == "prefill",
        "do_remote_decode": remote == "decode",
        "remote_block_ids": [list(range(tokens // BLOCK_TOKENS))],
        "remote_engine_id": engine.name,
        "remote_request_id": request_id,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "prefix_proof": {"v": 1, "block": BLOCK_TOKENS, "n": tokens, "h": "AAAA"},
    }


def _num_tokens(body: dict[str, Any]) -> int:
    return 12 + sum(len(str(one.get("content") or "")) for one in body.get("messages", [])) // 4


class Prefilling:
    """The script of a prefill engine."""

    def __init__(self, owner: FleetEngine) -> None:
        self._owner = owner
        self._free = asyncio.Lock()

    async def __call__(self, request: Received, peer: Peer) -> None:
        body, one = request.json, self._owner
        tokens, cached = _num_tokens(body), 0
        params = body.get("kv_transfer_params") or {}
        request_id = request.header("x-request-id") or ""
        if source := params.get("remote_engine_id"):
            cached = min(tokens - 1, params["remote_num_tokens"])
            await one.read(source, request_id, cached // BLOCK_TOKENS)
        one.busy_blocks += tokens // BLOCK_TOKENS
        async with self._free:
            await asyncio.sleep(0.005 + (tokens - cached) * PREFILL_S_PER_TOKEN)
        one.leases += 1
        asyncio.get_running_loop().call_later(1.5, self._expire, tokens // BLOCK_TOKENS)
        params = _params(one, request_id, tokens, "prefill") | {"cached_tokens": cached}
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}}
        answer = {"id": "1", "choices": [choice], "usage": _usage(tokens, 1, cached)}
        await peer.answer(answer | {"kv_transfer_params": params})

    def _expire(self, blocks: int) -> None:
        self._owner.leases -= 1
        self._owner.busy_blocks -= blocks


class Decoding:
    """The script of a decode engine."""

    def __init__(self, owner: FleetEngine) -> None:
        self._owner = owner

    async def __call__(self, request: Received, peer: Peer) -> None:
        body, one = request.json, self._owner
        tokens = _num_tokens(body)
        params = body.get("kv_transfer_params") or {}
        request_id = request.header("x-request-id") or ""
        if source := params.get("remote_engine_id"):
            await one.read(source, request_id, tokens // BLOCK_TOKENS)
        wanted = int(body.get("max_tokens") or 16)
        spoken = int(params.get("begun", {}).get("spoken", 0))
        blocks = (tokens + wanted) // BLOCK_TOKENS
        one.busy_blocks += blocks
        try:
            await peer.send(STREAM_HEAD)
            for number in range(spoken, wanted):
                await asyncio.sleep(TOKEN_S)
                delta = {"content": f"{' ' * bool(number)}{WORDS[number % len(WORDS)]}"}
                head = ""
                if "tell_token_ids" in params:
                    head = token_id_comment([number + 5], () if number else [1])
                finish = "length" if number == wanted - 1 else None
                choice = {"index": 0, "delta": delta, "finish_reason": finish}
                await peer.send(chunk(head.encode() + _event([choice])))
            kept = _params(one, request_id, tokens + wanted, "decode")
            usage = _usage(tokens, wanted, int(params.get("cached_tokens", 0)))
            await peer.send(chunk(_event([], usage=usage, kv_transfer_params=kept)))
            await peer.send(chunk(DONE) + b"0\r\n\r\n")
        finally:
            one.busy_blocks -= blocks


def _event(choices: list[dict[str, Any]], **rest: Any) -> bytes:
    head = {"id": "1", "object": "chat.completion.chunk", "created": 5, "model": MODEL}
    return b"data: " + json.dumps({**head, "choices": choices, **rest}).encode() + b"\n\n"


def _usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@contextlib.asynccontextmanager
async def running_fleet(prefillers: int, decoders: int) -> AsyncIterator[ScriptedFleet]:
    """Serve such a fleet until the block ends."""
    made: list[FleetEngine] = []
    for role, count in (("prefill", prefillers), ("decode", decoders)):
        for number in range(count):
            name = f"{role}-{number}"
            page = _identity(name)
            one = FleetEngine(MockEngine(_unset, models=[MODEL], identity=page), name, page)
            one.engine.usual = Prefilling(one) if role == "prefill" else Decoding(one)
            one.publish()
            await one.engine.start()
            made.append(one)
    fleet = ScriptedFleet(made[:prefillers], made[prefillers:])
    publishing = asyncio.create_task(fleet.publish())
    try:
        yield fleet
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        for one in made:
            await one.engine.stop()


async def _unset(request: Received, peer: Peer) -> None:
    raise AssertionError("an engine without a script")


class Load:
    """Chats of several turns, `concurrency` of them at a time, until the block ends."""

    def __init__(self, url: str, concurrency: int, seed: int = 1, max_tokens: int = 60) -> None:
        self._url = url
        self._concurrency = concurrency
        self._random = Random(seed)
        self._max_tokens = max_tokens
        self.statuses: Counter[int] = Counter()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        async with httpx.AsyncClient(base_url=self._url, timeout=60, trust_env=False) as client:
            chats = [
                asyncio.create_task(self._chat_repeatedly(client, number))
                for number in range(self._concurrency)
            ]
            try:
                yield self
            finally:
                for one in chats:
                    one.cancel()
                await asyncio.gather(*chats, return_exceptions=True)

    async def _chat_repeatedly(self, client: httpx.AsyncClient, number: int) -> None:
        chat = 0
        while True:
            chat += 1
            name, messages = f"load-{number}-{chat}", []
            for _ in range(self._random.randint(1, 4)):
                words = self._random.choice((40, 120, 300, 900))
                messages.append({"role": "user", "content": "word " * words})
                status, text = await self._ask(client, name, messages)
                self.statuses[status] += 1
                if status != 200:
                    await asyncio.sleep(0.2)
                    break
                messages.append({"role": "assistant", "content": text})
                await asyncio.sleep(self._random.uniform(0.05, 0.6))

    async def _ask(
        self, client: httpx.AsyncClient, name: str, messages: list[dict[str, str]]
    ) -> tuple[int, str]:
        """Return the status, 0 without one, and the text of the answer."""
        body = {
            "model": MODEL,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self._random.randint(8, self._max_tokens),
            "conversation_id": name,
        }
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                events = [line[6:] async for line in answer.aiter_lines() if line[:5] == "data:"]
                contents = [json.loads(one) for one in events if one != "[DONE]"]
                deltas = [choice["delta"] for one in contents for choice in one.get("choices", ())]
                return answer.status_code, "".join(delta.get("content", "") for delta in deltas)
        except httpx.HTTPError:
            return 0, ""
