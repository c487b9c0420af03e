"""Responses that the next one may go on with: kept where turns are, each for who asked for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec
import orjson
from msgspec import Meta, Struct

from router.common.exact_json import dumps, loads
from router.conversations.identity import ConversationResolver, Header
from router.conversations.store import Shelf, StoreError
from router.openai.answers import Json
from router.openai.errors import BadRequestError, ResponseStoreError

VERSION = 1
LONGEST_ID = 128
Text = Annotated[str, Meta(max_length=256)]


class UnknownResponseError(BadRequestError):
    """In OpenAI's words."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"Previous response with id '{name[:LONGEST_ID]}' not found.", "previous_response_id"
        )


class StoredResponse(Struct, frozen=True, tag_field="v", tag=VERSION, forbid_unknown_fields=True):
    """`root`: the id of the first response of the conversation."""

    root: Text
    messages: list[Json]
    response: Json


class ResponseStore:
    """`shelf` is None where nothing is kept. Bounded by the store, and `seconds` of life."""

    def __init__(self, shelf: Shelf | None, tenant_header: str, seconds: float) -> None:
        self._shelf, self._seconds = shelf, seconds
        self._identity = ConversationResolver((), tenant_header)

    def tenant(self, headers: Sequence[Header]) -> str:
        return self._identity.tenant(headers)

    async def keep(self, tenant: str, name: str, kept: StoredResponse) -> None:
        """Or not, if the store cannot: a client hears of it when it goes on."""
        if self._shelf is None:
            return
        try:
            raw = dumps({"v": VERSION, **msgspec.structs.asdict(kept)})
            await self._shelf.put(_key(tenant, name), raw, self._seconds)
        except (StoreError, orjson.JSONEncodeError):
            return

    async def find(self, tenant: str, name: str) -> StoredResponse:
        """Raises UnknownResponseError, ResponseStoreError."""
        if self._shelf is None:
            raise BadRequestError(
                "responses are not kept: the router was started with --conversation-store off",
                "previous_response_id",
            )
        try:
            raw = await self._shelf.read(_key(tenant, name))
        except StoreError as error:
            raise ResponseStoreError("what was said before cannot be read now") from error
        kept = None if raw is None else _read(raw)
        if kept is None:
            raise UnknownResponseError(name)
        return kept

    async def forget(self, tenant: str, name: str) -> None:
        """Raises UnknownResponseError, ResponseStoreError."""
        await self.find(tenant, name)
        assert self._shelf is not None
        try:
            await self._shelf.take(_key(tenant, name))
        except StoreError as error:
            raise ResponseStoreError("what was said before cannot be forgotten now") from error


def _read(raw: bytes) -> StoredResponse | None:
    """Total: None for what this version did not write."""
    try:
        content = loads(raw)
        if not isinstance(content, dict) or "v" not in content:
            return None
        return msgspec.convert(content, StoredResponse)
    except (orjson.JSONDecodeError, msgspec.ValidationError, RecursionError):
        return None


def _key(tenant: str, name: str) -> str:
    raw = b"response:%d:%b:%b" % (len(tenant), tenant.encode(), name.encode("utf-8", "replace"))
    return hashlib.blake2b(raw, digest_size=20).hexdigest()
