"""The endpoints whose requests are sent to engines.

The server answers them itself, before they reach the FastAPI application (see client_connection).
FastAPI has routes for them only for the sake of the API documentation. Bodies are described there
and not validated: engines validate them, and fields that the router does not know must pass.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from router.conversations.stored_responses import ResponseStore
from router.openai.anthropic_messages import COUNT_TOKENS_PATH, MESSAGES_PATH
from router.openai.errors import NotFoundError, RequestError, UnauthorizedError
from router.openai.responses import RESPONSES_PATH
from router.proxy.dispatch import refuse, serve
from router.proxy.exchange import Exchange
from router.proxy.gateway import Gateway
from router.proxy.passthrough import FORM_PATHS, JSON_PATHS, read_form, read_json
from router.server.dialect_exchange import CHAT_PATH, DIALECTS, DialectExchange

router = APIRouter()
COMPLETIONS_PATH = "/v1/completions"
GENERATION_PATHS = frozenset((CHAT_PATH, COMPLETIONS_PATH))
PASSTHROUGH_READERS = {
    **dict.fromkeys(JSON_PATHS, read_json),
    **dict.fromkeys(FORM_PATHS, read_form),
}
# By the path of a request's target; some clients end the paths of completions with a slash.
PROXIED_PATHS = {
    **{path.encode(): path for path in GENERATION_PATHS | DIALECTS.keys() | {*PASSTHROUGH_READERS}},
    **{path.encode() + b"/": path for path in GENERATION_PATHS},
}


def serve_proxied(
    exchange: Exchange, gateway: Gateway, stored: ResponseStore
) -> Coroutine[Any, Any, None]:
    """Answer a request to any proxied endpoint."""
    if exchange.endpoint in DIALECTS:
        return _serve_dialect(exchange, gateway, stored, None)
    return serve(exchange, gateway, PASSTHROUGH_READERS.get(exchange.endpoint))


def refuse_proxied(
    exchange: Exchange, gateway: Gateway, stored: ResponseStore, error: RequestError
) -> Coroutine[Any, Any, None]:
    """Answer a request that was refused before it was complete. API keys are the router's own, so
    their errors have OpenAI's form everywhere; other errors have that of the endpoint's dialect."""
    if exchange.endpoint in DIALECTS and not isinstance(error, UnauthorizedError):
        return _serve_dialect(exchange, gateway, stored, error)
    return refuse(exchange, gateway, error)


async def _serve_dialect(
    exchange: Exchange, gateway: Gateway, stored: ResponseStore, error: RequestError | None
) -> None:
    translated = DialectExchange(exchange, DIALECTS[exchange.endpoint](stored), gateway)
    try:
        if error is None:
            await serve(translated, gateway, translated.read)
        else:
            await refuse(translated, gateway, error)
    finally:
        translated.release()


# Documentation.

PASSTHROUGH_SUMMARIES = {
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
JsonSchema = dict[str, Any]


def _object(required: list[str], **properties: JsonSchema) -> JsonSchema:
    return {"type": "object", "required": required, "properties": properties}


STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in
                                    ("string", "integer", "number", "boolean"))  # fmt: skip
STRINGS, INTEGERS = {"type": "array", "items": STRING}, {"type": "array", "items": INTEGER}
COMMON_FIELDS: JsonSchema = {
    "model": STRING,
    "max_tokens": INTEGER | {"minimum": 1},
    "temperature": NUMBER | {"minimum": 0},
    "top_p": NUMBER,
    "n": INTEGER | {"default": 1},
    "stop": {"anyOf": [STRING, STRINGS]},
    "seed": INTEGER,
    "stream": BOOLEAN | {"default": False},
    "stream_options": {"type": "object", "properties": {"include_usage": BOOLEAN}},
}
MESSAGE = _object(["role"], role=STRING, content={}) | {"additionalProperties": True}
MESSAGES = {"type": "array", "items": MESSAGE}
PROMPT = {"anyOf": [STRING, STRINGS, INTEGERS, {"type": "array", "items": INTEGERS}]}
ERROR = _object(
    ["error"],
    error=_object(
        ["message", "type", "param", "code"],
        message=STRING,
        type=STRING,
        param={"type": ["string", "null"]},
        code={"type": ["integer", "string"]},
    ),
)
FAILURES = {
    400: "The body is not a JSON object, or an engine rejected the request",
    401: "The router has API keys, and the request has no valid one",
    408: "The request was not received in time",
    413: "The body is too large",
    429: "A limit of the API key is exceeded, or too many requests of this tenant are queued",
    502: "An engine failed or sent an invalid answer",
    503: "No engine of a role is healthy or has room, or an engine cannot be reached",
    504: "An engine did not answer in time",
}


async def _never_called() -> Response:
    raise NotFoundError("Not Found")  # the server answers these paths before the application can


def _add_route(path: str, name: str, summary: str = "", tag: str = "", **more: Any) -> None:
    router.add_api_route(
        path,
        _never_called,
        methods=["POST"],
        name=name,
        summary=summary,
        tags=[tag],
        response_class=Response,
        include_in_schema=bool(summary),
        **more,
    )


def _add_generation(path: str, name: str, summary: str, field: str, schema: JsonSchema) -> None:
    body = _object([field], **COMMON_FIELDS, **{field: schema}) | {"additionalProperties": True}
    answer = {
        "application/json": {"schema": {"type": "object"}},
        "text/event-stream": {"schema": {"type": "string"}},
    }
    errors = {"application/json": {"schema": ERROR}}
    responses: dict[int | str, dict[str, Any]] = {
        200: {"description": "The decode engine's answer", "content": answer},
        **{status: {"description": why, "content": errors} for status, why in FAILURES.items()},
    }
    request = {"required": True, "content": {"application/json": {"schema": body}}}
    extra = {"requestBody": request}
    _add_route(path, name, summary, "OpenAI", responses=responses, openapi_extra=extra)
    _add_route(path + "/", name)


_add_generation(CHAT_PATH, "chat_completions", "Chat completion", "messages", MESSAGES)
_add_generation(COMPLETIONS_PATH, "completions", "Text completion", "prompt", PROMPT)
_add_route(RESPONSES_PATH, "create_response", "A response", "OpenAI")
_add_route(MESSAGES_PATH, "create_message", "A message", "Anthropic")
_add_route(COUNT_TOKENS_PATH, "count_tokens", "How many tokens a message has", "Anthropic")
for _path in PASSTHROUGH_READERS:
    _add_route(_path, "passed", PASSTHROUGH_SUMMARIES.get(_path, ""), "Passed to an engine")
