"""Endpoints that are passed to one engine, as FastAPI knows them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from fastapi.responses import Response

from router.proxy.dispatch import BodyReader
from router.proxy.passthrough import FORM_PATHS, JSON_PATHS, read_form, read_json
from router.server.asgi import Served

router = APIRouter(tags=["Passed to an engine"])
SUMMARIES = {
    "/v1/embeddings": "Embeddings",
    "/v1/rerank": "Documents in order of relevance",
    "/v1/score": "How alike two texts are",
    "/tokenize": "A text as tokens",
    "/detokenize": "Tokens as text",
    "/pooling": "A pooling model's output",
    "/classify": "Classification",
    "/v1/audio/transcriptions": "Speech as text",
    "/v1/audio/translations": "Speech as English text",
}


def _handler(path: str, reading: BodyReader) -> Callable[[Request], Awaitable[Response]]:
    async def passed(request: Request) -> Response:
        return Served(request.app.state.gateway, path, reading)

    return passed


for _paths, _reading in ((JSON_PATHS, read_json), (FORM_PATHS, read_form)):
    for _path in _paths:
        router.add_api_route(
            _path,
            _handler(_path, _reading),
            methods=["POST"],
            summary=SUMMARIES.get(_path),
            response_class=Response,
            include_in_schema=_path in SUMMARIES,
        )
