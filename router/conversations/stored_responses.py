"""Responses that a later request may continue (`previous_response_id`), stored for their tenant."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec
import orjson
from msgspec import Meta, Struct

from router.common.exact_json import dumps
from router.conversations.conversations import Header, tenant_of
from router.conversations.entry import VERSION, decode_versioned
from router.conversations.store import Store, StoreError
from router.openai.answers import Json
from router.openai.errors import BadRequestError, NotFoundError, RequestError, ResponseStoreError
from router.openai.responses import response_of_item

MAX_QUOTED_ID_LENGTH = 128
# Each costs a read of the store.
MAX_REFERENCED_RESPONSES = 256
ResponseId = Annotated[str, Meta(max_length=256)]


class UnknownResponseError(BadRequestError):
    """The store has no response with this id. The message is OpenAI's."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"Previous response with id '{name[:MAX_QUOTED_ID_LENGTH]}' not found.",
            "previous_response_id",
        )


class UnknownItemError(RequestError):
    """The store has no item with this id. The message is OpenAI's."""

    shape = NotFoundError.shape
    param = "input"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"Item with id '{name[:MAX_QUOTED_ID_LENGTH]}' not found. "
            "Items are not persisted when `store` is set to false. Try again with `store` set to "
            "true, or remove this item from your input."
        )


class StoredResponse(Struct, frozen=True, tag_field="v", tag=VERSION, forbid_unknown_fields=True):
    """A response, and the messages up to it. `root` is the id of the conversation's first one."""

    root: ResponseId
    messages: list[Json]
    response: Json


class ResponseStore:
    """Stored responses, each visible to the tenant that asked for it.

    `store` is None where the router stores none. A response is kept for `seconds` seconds, or until
    the store evicts it.
    """

    def __init__(self, store: Store | None, tenant_header: str, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._tenant_header = tenant_header.lower().encode("latin-1")

    def tenant_of(self, headers: Sequence[Header]) -> str:
        return tenant_of(headers, self._tenant_header)

    async def keep(self, tenant: str, name: str, response: StoredResponse) -> bool:
        """Store a response. Return False if the store has not confirmed that it has it."""
        if self._store is None:
            return False
        try:
            raw = dumps({"v": VERSION, **msgspec.structs.asdict(response)})
            return raw not in await self._store.put(_key(tenant, name), raw, self._seconds)
        except (StoreError, orjson.JSONEncodeError):
            return False

    async def find(self, tenant: str, name: str) -> StoredResponse:
        """Raises UnknownResponseError, ResponseStoreError, and BadRequestError without a store."""
        if self._store is None:
            raise BadRequestError(
                "responses are not stored: the router was started with --conversation-store off",
                "previous_response_id",
            )
        try:
            raw = await self._store.read(_key(tenant, name))
        except StoreError as error:
            raise ResponseStoreError(
                "the conversation store failed: the previous response cannot be read now"
            ) from error
        found = None if raw is None else decode_versioned(raw, StoredResponse)
        if found is None:
            raise UnknownResponseError(name)
        return found

    async def resolve_references(self, tenant: str, items: list[object]) -> list[object]:
        """Return a request's items with the output item of a stored response in the place of each
        reference. Raises UnknownItemError, ResponseStoreError and BadRequestError.

        An item can be referred to once, or a small request could become an enormous one.
        """
        unused: dict[str, Json] = {}
        read: set[str] = set()
        resolved: list[object] = []
        for item in items:
            name = _referenced(item)
            if name is None:
                resolved.append(item)
                continue
            response = response_of_item(name)
            if response not in read:
                if len(read) == MAX_REFERENCED_RESPONSES:
                    raise BadRequestError("input: refers to items of too many responses", "input")
                read.add(response)
                unused |= await self._items_of(tenant, response)
            if name not in unused:
                raise UnknownItemError(name)
            resolved.append(unused.pop(name))
        return resolved

    async def _items_of(self, tenant: str, name: str) -> dict[str, Json]:
        """Return the output items of a response by their ids; none if it is unknown."""
        try:
            output = (await self.find(tenant, name)).response.get("output")
        except UnknownResponseError:
            return {}
        items = [item for item in output if isinstance(item, dict)] if type(output) is list else []
        return {item["id"]: item for item in items if isinstance(item.get("id"), str)}

    async def forget(self, tenant: str, name: str) -> None:
        """Delete a response. Raises the errors of `find`."""
        await self.find(tenant, name)
        assert self._store is not None
        try:
            await self._store.delete(_key(tenant, name))
        except StoreError as error:
            raise ResponseStoreError(
                "the conversation store failed: the response cannot be deleted now"
            ) from error


def _referenced(item: object) -> str | None:
    """Return the id that an item refers to. The type of a reference may be missing."""
    if not isinstance(item, dict) or not isinstance(name := item.get("id"), str):
        return None
    kind = item.get("type")
    is_reference = item.keys() <= {"id", "type"} if kind is None else kind == "item_reference"
    return name if is_reference else None


def _key(tenant: str, name: str) -> str:
    raw = b"response:%d:%b:%b" % (len(tenant), tenant.encode(), name.encode("utf-8", "replace"))
    return hashlib.blake2b(raw, digest_size=20).hexdigest()
