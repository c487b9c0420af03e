"""vLLM's MoRIIOConnector in WRITE mode (read in vLLM 0.31 to 0.33; it runs on ROCm only).

The prefill engine writes its KV into blocks of the decode engine. It needs the address of the
decode engine for that, and the decode engine needs that of the prefill engine, to name its blocks.
The answer of the prefill engine has its own address and rank. No page shows those of a decode
engine, so it must listen at its HTTP host and at vLLM's default ports.

vLLM lets the legs run together, so that layers are written while the next ones are computed. Here
the decode leg follows the prefill leg, because a decode engine that waits for KV has no timeout,
and keeps its blocks for good when its leg is aborted. In this order a prefill leg may fail or be
aborted, and nothing is held. Computed KV waits `defer_timeout` (60 s) for a decode engine. No other
decode engine can read it: the prefill engine would write into its blocks at the first one.
"""

from __future__ import annotations

from router.common.exact_json import dumps
from router.fleet.engine import Engine, Place
from router.fleet.kv_protocol import MORIIO
from router.http_client.errors import BrokenAnswerError
from router.proxy.answer_check import PrefillAnswer
from router.proxy.kv_params import KvParams
from router.proxy.kv_protocols.protocol import LegPair, TransferProtocol, new_transfer_id
from router.proxy.messages import ONE_AND_ON
from router.proxy.ranks import header_line
from router.proxy.request import Request

# vLLM's DEFAULT_HANDSHAKE_PORT and DEFAULT_NOTIFY_PORT. Ranks listen at the ports that follow.
HANDSHAKE_PORT, NOTIFY_PORT = 6301, 61005


class MoRIIO(TransferProtocol):
    name = MORIIO
    runs_together = False

    def pair(self, request: Request, place: Place, decoder: Engine) -> LegPair | None:
        host = decoder.spec.address.host
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": new_transfer_id(),
            "remote_engine_id": f"{host}:{HANDSHAKE_PORT}",
            "remote_block_ids": [],
            "remote_host": host,
            "remote_handshake_port": HANDSHAKE_PORT,
            "remote_notify_port": NOTIFY_PORT,
            "remote_dp_size": max(len(decoder.ranks or ()), 1),
        }
        return LegPair(
            place,
            pinned=header_line(request, place),
            prefill_fields=b'"kv_transfer_params":' + dumps(params),
            lengths=ONE_AND_ON,
            keeps_aborted=True,
        )

    def continue_with(self, pair: LegPair, prefilled: PrefillAnswer) -> LegPair | None:
        if prefilled.params is None:
            raise BrokenAnswerError("a MoRIIO prefill engine's answer without kv_transfer_params")
        # Without this only the decode rank with the number of the prefill rank would name its
        # blocks, and any other one would wait for good.
        named = prefilled.params.raw[:-1] + b',"is_request_leader":true}'
        return pair._replace(params=KvParams(named))
