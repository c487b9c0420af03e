"""The interface of a KV protocol, and the values that the two legs of an attempt share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple
from uuid import uuid4

from router.fleet.engine import Engine, Place
from router.fleet.kv_protocol import KvProtocol
from router.proxy.answer_check import PrefillAnswer
from router.proxy.kv_params import KvParams
from router.proxy.messages import ONE, PrefillLengths
from router.proxy.request import AS_SENT, Body, Request


class Abort(NamedTuple):
    """A POST request that ends a leg at its engine."""

    path: str
    body: Body


class LegPair(NamedTuple):
    """The values that the two legs of one attempt share."""

    place: Place
    """The prefill engine or its data-parallel rank."""
    params: KvParams | None = None
    """The kv_transfer_params of the decode leg."""
    leg_id: str = ""
    """The X-Request-Id of both legs; "" for one of its own for each leg."""
    transfer_id: str = ""
    pinned: bytes = b""
    """The header line that selects a data-parallel rank of the prefill engine, or b""."""
    prefill_fields: bytes | None = None
    """The fields of the prefill leg that are the protocol's, as members of a JSON object; None for
    vLLM's NixlConnector."""
    lengths: PrefillLengths = ONE
    decode_fields: bytes | None = None
    """The protocol's fields of the decode leg; None if it has `params` instead."""
    release: Body | None = None
    """A completion that makes a decode engine read the prefill engine's KV, which frees it."""
    keeps_aborted: bool = False
    """A decode engine keeps the blocks of a request that is aborted while it waits for KV. So the
    router lets the leg continue for a moment after the client has disconnected."""
    abort: Abort | None = None
    """Tells an engine at once that its leg has ended; for engines that notice a closed connection
    late."""


def new_transfer_id() -> str:
    """Return an id by which vLLM's connectors match the two legs of an attempt."""
    return f"xfer-{uuid4()}"


class TransferProtocol(ABC):
    """A protocol by which a decode engine gets the KV that a prefill engine has computed."""

    name: ClassVar[KvProtocol]
    runs_together: ClassVar[bool]
    """Both engines get the request at once; else the decode engine gets it after the prefill
    engine's answer."""
    decoder_prefills: ClassVar[bool] = True
    """A decode engine can compute a prompt itself. Else two engines share requests for several
    answers as well."""

    def plans(self, request: Request) -> bool:
        """Return True if two engines share this request. It never is the turn of a conversation
        that reads KV of the last one: only vLLM's NixlConnector does."""
        if not self.decoder_prefills:
            return request.decode_only_reason not in AS_SENT
        return not request.decode_only_reason and not request.is_several

    @abstractmethod
    def pair(self, request: Request, place: Place, decoder: Engine) -> LegPair | None:
        """Return the values that the two legs of an attempt share. Return None while the address or
        id of the prefill engine (`place`, an engine or a rank) is unknown."""

    def continue_with(self, pair: LegPair, prefilled: PrefillAnswer) -> LegPair | None:
        """Return the pair for the decode leg that follows this answer of the prefill engine; None
        if the client gets this answer. Raises BrokenAnswerError."""
        return pair
