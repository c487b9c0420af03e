"""The KV protocol of an engine, and how the router detects it.

Our own engines and stock vLLM with a NixlConnector use `nixl`. The router recognizes other engines
by a page of theirs (beside it: the release in which we read it):

    sglang    GET /server_info has a disaggregation_mode                      SGLang 0.5.23
    trtllm    GET /v1/models says owned_by tensorrt_llm                       TensorRT-LLM 1.2
    mooncake  GET http://PREFILLER:BOOTSTRAP_PORT/query lists engine ids      vLLM 0.32

No page names a shared KV store or vLLM's MoRIIOConnector, so the operator configures `store` and
`moriio`. The router uses `nixl` for an engine without a configured protocol whose pages name none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Any

import msgspec
import orjson
from msgspec import Struct

from router.http_client.errors import UpstreamError
from router.http_client.pool import CompleteAnswer

# SGLang's old and new name for the page.
SERVER_INFO_PATHS = ("/server_info", "/get_server_info")
MODELS_PATH = "/v1/models"
TRTLLM_OWNER = "tensorrt_llm"
# Default of SGLang's --disaggregation-bootstrap-port and of VLLM_MOONCAKE_BOOTSTRAP_PORT.
BOOTSTRAP_PORT = 8998
Get = Callable[[str], Awaitable[CompleteAnswer]]


class KvProtocol(StrEnum):
    NIXL = "nixl"
    MOONCAKE = "mooncake"
    MORIIO = "moriio"
    SGLANG = "sglang"
    TRTLLM = "trtllm"
    STORE = "store"


NIXL, MOONCAKE, MORIIO, SGLANG, TRTLLM, STORE = KvProtocol


# Engines that know no field of vLLM, or refuse it.
WITHOUT_VLLM_FIELDS = frozenset((SGLANG, TRTLLM))


class KvPeer(Struct, frozen=True):
    """The KV protocol of an engine, as its pages or the operator name it."""

    protocol: KvProtocol = NIXL
    mode: str = ""
    """SGLang's disaggregation_mode: prefill, decode, or null for an engine that moves no KV."""
    bootstrap_port: int = 0
    """The port of a prefill engine's bootstrap server (sglang, mooncake); 0 if unknown."""
    engine_ids: Mapping[int, str] = {}
    """Mooncake's ids of the engine's data-parallel ranks. They change when the engine restarts."""

    @property
    def moves_kv(self) -> bool:
        return self.mode != "null"


def can_exchange(sender: KvProtocol, receiver: KvProtocol) -> bool:
    """Return True if an engine of the one protocol may get KV from an engine of the other. The
    pages of a decode engine do not show that it has the MooncakeConnector, or a store."""
    return sender is receiver or (receiver is NIXL and sender in (MOONCAKE, STORE))


class _ServerInfo(Struct):
    """The fields of SGLang's page that matter here."""

    disaggregation_mode: str
    disaggregation_bootstrap_port: int = BOOTSTRAP_PORT


class _Worker(Struct):
    """An entry of the bootstrap server of vLLM's MooncakeConnector."""

    engine_id: str
    worker_addr: dict[str, Any]


_decode_workers = msgspec.json.Decoder(dict[int, _Worker]).decode


async def find_kv_peer(
    get: Get, wanted: KvProtocol | None, get_bootstrap: Get, bootstrap_port: int, sends: bool
) -> KvPeer:
    """Detect the KV protocol of an engine. `get` sends a GET request to it, and `get_bootstrap` to
    its bootstrap server. `wanted`: the protocol that the operator configured, if any. `sends`: the
    engine is a prefill engine.

    Raises UpstreamError if the engine did not answer.
    """
    if wanted in (None, SGLANG) and (peer := await _find_sglang(get)):
        return peer
    if wanted in (None, MOONCAKE) and sends:
        engine_ids = await _query_bootstrap(get_bootstrap)
        if engine_ids or wanted:
            return KvPeer(MOONCAKE, bootstrap_port=bootstrap_port, engine_ids=engine_ids)
    if wanted is None and await _is_trtllm(get):
        return KvPeer(TRTLLM)
    return KvPeer(wanted or NIXL, bootstrap_port=bootstrap_port)


async def _find_sglang(get: Get) -> KvPeer | None:
    for path in SERVER_INFO_PATHS:
        answer = await get(path)
        if answer.status != 200:
            continue
        try:
            info = msgspec.json.decode(answer.body, type=_ServerInfo)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None  # the page of another server
        return KvPeer(SGLANG, info.disaggregation_mode, info.disaggregation_bootstrap_port)
    return None


async def _is_trtllm(get: Get) -> bool:
    answer = await get(MODELS_PATH)
    try:
        models = orjson.loads(answer.body)["data"] if answer.status == 200 else []
        return any(model["owned_by"] == TRTLLM_OWNER for model in models)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False


async def _query_bootstrap(get: Get) -> dict[int, str]:
    """Return Mooncake's engine ids by data-parallel rank; empty if no bootstrap server of vLLM's
    MooncakeConnector answers."""
    try:
        answer = await get("/query")
        workers = _decode_workers(answer.body) if answer.status == 200 else {}
        return {rank: worker.engine_id for rank, worker in workers.items()}
    except (UpstreamError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
