"""What a protocol by which engines move KV has to say, and what the two legs of a request share."""

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
    """What the two legs of one attempt share."""

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
    """A decode engine that is told to end while it waits for KV keeps its blocks. So the leg of a
    client that has left goes on for a moment."""
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
        """Return what the two legs of an attempt share; None if too little is known of the prefill
        engine (`place`, maybe one of its ranks) for now."""

    def continue_with(self, pair: LegPair, prefilled: PrefillAnswer) -> LegPair | None:
        """Return what the decode leg gets that follows this answer of the prefill engine; None if
        that is the whole answer. Raises BrokenAnswerError."""
        return pair
