"""A scripted engine, and the real HTTP server in front of it."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
import uvicorn

from engine_ext.common.inspection import Inspection
from engine_ext.common.types import ConnectorStats
from engine_ext.reference.answer import ResumedAnswer, StopRules
from engine_ext.reference.engine import ReferenceEngine
from engine_ext.reference.grammar import GrammarCompiler
from engine_ext.reference.messages import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    RequestOutput,
    TokenLogprob,
)
from engine_ext.reference.server.app import build_app
from engine_ext.reference.server.job import ServedModel
from engine_ext.reference.server.serving import ReferenceServer
from engine_ext.reference.tokenizer import ChatTemplate, Tokenizer

STATS = EngineStats(
    num_running=1,
    num_waiting=2,
    num_waiting_for_remote_kv=3,
    num_blocks_total=100,
    num_blocks_free=90,
    num_blocks_delayed=4,
    prompt_tokens=1000,
    prompt_tokens_computed=500,
    prompt_tokens_cached=200,
    prompt_tokens_fetched=300,
    generation_tokens=77,
    requests_finished={"stop": 5, "length": 6},
    preemptions=7,
)

Script = Callable[[GenerateRequest], Iterable[RequestOutput]]


def saying(*pieces: str) -> Script:
    """An engine whose every answer is these pieces, a token a byte, cut at `max_tokens`."""

    def script(request: GenerateRequest) -> Iterable[RequestOutput]:
        left = request.sampling.max_tokens
        for place, piece in enumerate(pieces):
            ids = tuple(piece.encode())[:left]
            left -= len(ids)
            ended = place == len(pieces) - 1 or not left
            output = RequestOutput(
                request_id=request.request_id,
                text=bytes(ids).decode(errors="ignore"),
                token_ids=ids,
                logprobs=tuple(_logprobs(ids, request)),
                num_cached_tokens=3,
            )
            if not ended:
                yield output
                continue
            finish: FinishReason = "stop" if left else "length"
            params = request.kv_transfer_params
            answered = {"answer_to": params} if params is not None else None
            yield replace(output, finish_reason=finish, kv_transfer_params=answered)
            return

    return script


def _logprobs(ids: tuple[int, ...], request: GenerateRequest) -> Iterable[TokenLogprob]:
    wanted = request.sampling.logprobs
    if wanted is None:
        return
    for token in ids:
        alternatives = [(token, -0.5), (0x78, -1.0), (0xC3, float("-inf")), (0x79, -2.0)]
        yield TokenLogprob(token, -0.5, tuple(alternatives[:wanted]))


HELD = ("me", "held")
"""Engine and request whose KV waits for a reader."""


class FakeEngine(ReferenceEngine):
    is_healthy = True
    step_model = None

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.closed: list[str] = []
        """Ids of the requests whose iterator was closed or exhausted."""
        self.finished: list[str] = []
        self.started = asyncio.Event()
        self.gate = asyncio.Event()
        """Nothing is said beyond the first `open_until` outputs while it is not set."""
        self.gate.set()
        self.open_until = 0
        self.released: list[tuple[str, str]] = []
        self.aborted: list[str] = []
        self.declined: list[dict[str, Any]] = []
        self.counted = ConnectorStats(blocks_received=12, leases_active=2)
        self.inspection: Inspection | None = None

    async def generate(
        self, request: GenerateRequest, begun: ResumedAnswer | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        self.started.set()
        try:
            for place, output in enumerate(self.script(request)):
                if place >= self.open_until:
                    await self.gate.wait()
                await asyncio.sleep(0)
                yield output
            self.finished.append(request.request_id)
        finally:
            self.closed.append(request.request_id)

    def decline(self, params: dict[str, Any]) -> None:
        self.declined.append(params)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stats(self) -> EngineStats:
        return STATS

    async def release(self, engine_id: str, request_id: str) -> bool:
        self.released.append((engine_id, request_id))
        return (engine_id, request_id) == HELD

    def inspect(self, asked: str | None = None) -> Inspection | None:
        return self.inspection

    def connector_stats(self) -> ConnectorStats:
        return self.counted


def served_model(directory: Path, max_model_len: int = 256) -> ServedModel:
    tokenizer = Tokenizer.load(directory)
    return ServedModel(
        names=("tiny", "alias"),
        vocab_size=259,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(directory, tokenizer),
        rules=StopRules(frozenset({256, 258}), max_model_len),
        grammars=GrammarCompiler(
            tokenizer.backend.to_str(), vocab_size=259, eos_token_ids={256, 258}
        ),
        created=1,
    )


def in_process(model: ServedModel, engine: ReferenceEngine) -> httpx.AsyncClient:
    """The application without a socket."""
    transport = httpx.ASGITransport(build_app(model, engine))
    return httpx.AsyncClient(transport=transport, base_url="http://engine")


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE] and nothing after it."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


E = TypeVar("E", bound=ReferenceEngine)


class ServerOf(Generic[E]):
    def __init__(self, engine: E, port: int, client: httpx.AsyncClient) -> None:
        self.engine = engine
        self.port = port
        self.client = client
        self.url = f"http://127.0.0.1:{port}"

    async def post(self, path: str, **body: object) -> httpx.Response:
        return await self.client.post(path, json=body)


RunningServer = ServerOf[FakeEngine]


@asynccontextmanager
async def serving(model: ServedModel, engine: E) -> AsyncIterator[ServerOf[E]]:
    config = uvicorn.Config(
        build_app(model, engine),
        host="127.0.0.1",
        port=0,
        log_level="warning",
        timeout_graceful_shutdown=2,
    )
    server = ReferenceServer(config)
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield ServerOf(engine, port, client)
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Waits for a condition, not for a time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (any condition, no event to wait for)
            await asyncio.sleep(0.005)
