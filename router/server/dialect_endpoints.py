"""Responses and Messages, as FastAPI knows them: translated to chats for the same flows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from router.auth.api_keys import ApiKey
from router.common.exact_json import dumps
from router.conversations.stored_responses import ResponseStore, UnknownResponseError
from router.openai import anthropic_messages, responses
from router.openai.errors import NotFoundError
from router.proxy import headers
from router.proxy.exchange import Header
from router.proxy.gateway import Gateway
from router.server.access_guard import CALLER
from router.server.asgi import AsgiExchange, Served
from router.server.dialect_exchange import (
    CountSpeaker,
    MessagesSpeaker,
    ResponsesSpeaker,
    Speaker,
    Translated,
    authorized,
)

router = APIRouter()
OPENAI: list[Any] = ["OpenAI"]
ANTHROPIC: list[Any] = ["Anthropic"]


class Spoken(Served):
    """Runs a flow behind a translation."""

    def __init__(
        self, gateway: Gateway, endpoint: str, speaker: type[Speaker] | ResponseStore
    ) -> None:
        super().__init__(gateway, endpoint)
        self._speaker_of = speaker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = AsgiExchange(scope, send, self._endpoint)
        of = self._speaker_of
        if isinstance(of, ResponseStore):
            whose = _owned(self._gateway, scope, exchange.headers)
            speaker: Speaker = ResponsesSpeaker(of, whose)
        else:
            exchange.headers = authorized(exchange.headers)
            speaker = of()
        gateway = self._gateway
        most = gateway.limits.max_answer_size
        translated = Translated(exchange, speaker, most, gateway.answers)
        try:
            await self._serve(exchange, translated, translated.read, scope, receive)
        finally:
            translated.release()


@router.post(responses.PATH, summary="A response", tags=OPENAI, response_class=Response)
async def create_response(request: Request) -> Response:
    return Spoken(request.app.state.gateway, responses.PATH, request.app.state.responses)


@router.get(f"{responses.PATH}/{{name}}", summary="A response that is kept", tags=OPENAI)
async def get_response(name: str, request: Request) -> Response:
    kept: ResponseStore = request.app.state.responses
    try:
        found = await kept.find(kept.tenant(_headers(request)), name)
    except UnknownResponseError as error:
        raise _not_found(name) from error
    return Response(dumps(found.response), media_type="application/json")


@router.delete(f"{responses.PATH}/{{name}}", summary="Forgets a response", tags=OPENAI)
async def delete_response(name: str, request: Request) -> Response:
    kept: ResponseStore = request.app.state.responses
    try:
        await kept.forget(kept.tenant(_headers(request)), name)
    except UnknownResponseError as error:
        raise _not_found(name) from error
    return JSONResponse({"id": name, "object": "response", "deleted": True})


@router.post(anthropic_messages.PATH, summary="A message", tags=ANTHROPIC, response_class=Response)
async def create_message(request: Request) -> Response:
    return Spoken(request.app.state.gateway, anthropic_messages.PATH, MessagesSpeaker)


@router.post(
    anthropic_messages.COUNT_PATH,
    summary="How many tokens a message has",
    tags=ANTHROPIC,
    response_class=Response,
)
async def count_tokens(request: Request) -> Response:
    return Spoken(request.app.state.gateway, anthropic_messages.COUNT_PATH, CountSpeaker)


def _headers(request: Request) -> Sequence[Header]:
    given = headers.sound(request.scope["headers"])
    return _owned(request.app.state.gateway, request.scope, given)


def _owned(gateway: Gateway, scope: Scope, given: Sequence[Header]) -> Sequence[Header]:
    """Where callers have keys of ours, what is kept is the key's owner's, whoever a client says
    that it is."""
    key: ApiKey | None = scope.get(CALLER)
    return (
        given
        if key is None or gateway.authenticator is None
        else gateway.authenticator.with_owner(given, key)
    )


def _not_found(name: str) -> NotFoundError:
    return NotFoundError(f"Response with id '{name[:128]}' not found.")
