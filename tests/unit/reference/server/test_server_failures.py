"""Clients that leave, and engines that fail."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from engine_ext.reference.messages import FinishReason, GenerateRequest, RequestOutput
from engine_ext.reference.server.job import ServedModel
from tests.unit.reference.server.fake_engine import (
    FakeEngine,
    RunningServer,
    Script,
    saying,
    serving,
    until,
)

PATHS = ("/v1/completions", "/v1/chat/completions")
BODY = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}


async def send(server: RunningServer, path: str, **body: object) -> asyncio.StreamWriter:
    """Sends a request on a socket of its own, which the caller can simply close."""
    content = json.dumps({**BODY, **body}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    return writer


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("stream", "said"), [(False, 0), (False, 1), (True, 0), (True, 1)])
async def test_a_client_that_leaves_ends_its_requests_at_once(
    stream: bool, said: int, path: str, model: ServedModel, engine: FakeEngine
) -> None:
    engine.gate.clear()
    engine.open_until = said
    async with serving(model, engine) as server:
        writer = await send(server, path, stream=stream)
        await until(lambda: len(engine.requests) == 1)
        assert engine.closed == []
        writer.close()
        await until(lambda: len(engine.closed) == 1)
    assert engine.finished == []
    assert sorted(engine.aborted) == ([] if stream and said else sorted(engine.closed))


async def test_a_client_that_leaves_disturbs_nobody_else(
    model: ServedModel, engine: FakeEngine
) -> None:
    engine.gate.clear()
    async with serving(model, engine) as server:
        leaver = await send(server, PATHS[0], stream=True)
        await until(lambda: len(engine.requests) == 1)
        stayer = asyncio.create_task(server.post(PATHS[0], **BODY))
        await until(lambda: len(engine.requests) == 2)
        leaver.close()
        await until(lambda: len(engine.closed) == 1)
        engine.gate.set()
        assert (await stayer).json()["choices"][0]["text"] == "Héllo"
    assert engine.finished == [engine.requests[1].request_id]


def failing(reason: FinishReason, after: int, message: str | None = "no blocks") -> Script:
    def script(request: GenerateRequest) -> Iterable[RequestOutput]:
        for _ in range(after):
            yield RequestOutput(request_id=request.request_id, text="a", token_ids=(97,))
        yield RequestOutput(request_id=request.request_id, finish_reason=reason, error=message)

    return script


def breaking(after: int) -> Script:
    def script(request: GenerateRequest) -> Iterable[RequestOutput]:
        for _ in range(after):
            yield RequestOutput(request_id=request.request_id, text="a", token_ids=(97,))
        raise LookupError("a defect of the engine")

    return script


async def test_a_defect_of_the_engine_shows_the_client_no_inside(model: ServedModel) -> None:
    async with serving(model, FakeEngine(breaking(after=1))) as server:
        whole = await server.post(PATHS[0], **BODY)
        streamed = await server.post(PATHS[0], **BODY, stream=True)
    assert whole.status_code == 500
    assert whole.json()["error"]["type"] == "InternalServerError"
    assert "defect" not in whole.text + streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")


LOST = {
    "remote_engine_id": "p-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "scope": "pair",
    "reason": "no handshake within 10 s",
}


def having_lost_its_kv(script: Script) -> Script:
    return lambda request: (replace(each, load_failure=LOST) for each in script(request))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_an_error_names_the_engine_whose_kv_was_not_loaded(
    path: str, stream: bool, model: ServedModel
) -> None:
    engine = FakeEngine(having_lost_its_kv(failing("error", 0)))
    async with serving(model, engine) as server:
        response = await server.post(path, **BODY, stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["kv_load_failure"] == LOST
    assert "10.0.0.1" not in response.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_that_was_computed_instead_names_the_engine_whose_kv_was_not_loaded(
    path: str, model: ServedModel
) -> None:
    async with serving(model, FakeEngine(having_lost_its_kv(saying(*"ab")))) as server:
        whole = await server.post(path, **BODY)
        streamed = await server.post(path, **BODY, stream=True)
    assert whole.json()["kv_transfer_params"] == {"kv_load_failure": LOST}
    assert streamed.text.startswith(": kv_load_failure {")
    comment, _, rest = streamed.text.partition("\n")
    assert json.loads(comment.removeprefix(": kv_load_failure ")) == LOST
    assert "kv_load_failure" not in rest
    assert rest.startswith("data: {")
