"""The OpenAI endpoints as FastAPI knows them: documented here, served by flows.

The bodies are described and not validated: that is the engines' business, and what they do not
know yet must pass.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from router.server.asgi import Served
from router.server.proxied_endpoints import CHAT, COMPLETIONS

router = APIRouter(tags=["OpenAI"])

COMMON: dict[str, Any] = {
    "model": {"type": "string"},
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number"},
    "n": {"type": "integer", "default": 1},
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "seed": {"type": "integer"},
    "stream": {"type": "boolean", "default": False},
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": {"type": "boolean"}},
    },
}
MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string"}, "content": {}},
    "additionalProperties": True,
}
PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string"]},
            },
        }
    },
}
FAILURES = {
    400: "The body is not a JSON object, or an engine refused it",
    401: "No API key of the router's is shown, where there are such keys",
    408: "The request was not received in time",
    413: "The body is too large",
    429: "A limit of the API key, or too many of this tenant's requests wait already",
    502: "An engine failed, or sent a broken answer",
    503: "No engine of a role is healthy or has room, or an engine cannot be reached",
    504: "An engine did not answer in time",
}


def _operation(fields: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "required": required,
        "properties": COMMON | fields,
        "additionalProperties": True,
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _responses() -> dict[int | str, dict[str, Any]]:
    answer = {
        "application/json": {"schema": {"type": "object"}},
        "text/event-stream": {"schema": {"type": "string"}},
    }
    error = {"application/json": {"schema": ERROR}}
    responses: dict[int | str, dict[str, Any]] = {
        200: {"description": "The decoder's answer", "content": answer}
    }
    for status, why in FAILURES.items():
        responses[status] = {"description": why, "content": error}
    return responses


@router.post(CHAT + "/", include_in_schema=False)
@router.post(
    CHAT,
    summary="Chat completion",
    response_class=Response,
    responses=_responses(),
    openapi_extra=_operation({"messages": {"type": "array", "items": MESSAGE}}, ["messages"]),
)
async def chat_completions(request: Request) -> Response:
    return Served(request.app.state.gateway, CHAT)


@router.post(COMPLETIONS + "/", include_in_schema=False)
@router.post(
    COMPLETIONS,
    summary="Text completion",
    response_class=Response,
    responses=_responses(),
    openapi_extra=_operation({"prompt": PROMPT}, ["prompt"]),
)
async def completions(request: Request) -> Response:
    return Served(request.app.state.gateway, COMPLETIONS)
