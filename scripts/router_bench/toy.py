"""The usual P/D proxy of examples: FastAPI and httpx. Arguments: port, prefiller, decoder."""

import sys
from collections.abc import AsyncIterator
from typing import Any

import fastapi
import httpx
import uvicorn

EMPTY = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(EMPTY)}
CHAT = "/v1/chat/completions"


def build(prefiller: str, decoder: str) -> fastapi.FastAPI:
    app = fastapi.FastAPI()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    to_p = httpx.AsyncClient(base_url=prefiller, timeout=None, limits=limits, trust_env=False)
    to_d = httpx.AsyncClient(base_url=decoder, timeout=None, limits=limits, trust_env=False)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post(CHAT)
    async def chat(request: fastapi.Request) -> fastapi.Response:
        body: dict[str, Any] = await request.json()
        one = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": TO_PREFILL}
        prefilled = (await to_p.post(CHAT, json=one)).raise_for_status().json()
        asked = {**body, "kv_transfer_params": prefilled["kv_transfer_params"]}
        kind = "text/event-stream" if body.get("stream") else "application/json"
        return fastapi.responses.StreamingResponse(_relay(to_d, asked), media_type=kind)

    return app


async def _relay(decoder: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[bytes]:
    async with decoder.stream("POST", CHAT, json=body) as answer:
        answer.raise_for_status()
        async for block in answer.aiter_bytes():
            yield block


if __name__ == "__main__":
    app = build(sys.argv[2], sys.argv[3])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=False)
