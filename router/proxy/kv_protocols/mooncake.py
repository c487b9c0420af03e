"""vLLM's MooncakeConnector (read and run in vLLM 0.32 and 0.33).

The prefill engine keeps the KV under a transfer_id. The decode engine finds the prefill engine's
workers by its bootstrap server, and asks them for that id.

vLLM lets the legs run in any order. Here the decode leg follows the prefill leg, because a decode
engine that waits for KV keeps its blocks even when its leg is aborted: until the prefill engine
sends, or for VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (480 s) and more. In this order a prefill leg may
fail or be aborted, and nothing is held. Computed KV waits until a decode engine has read it or has
ended its leg. If that engine is gone, another one reads it, for a prompt of one token.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.common.exact_json import dumps
from router.fleet.engine import Engine, EngineRank, Place, engine_of
from router.fleet.kv_protocol import MOONCAKE
from router.proxy.kv_params import KvParams
from router.proxy.kv_protocols.protocol import LegPair, TransferProtocol, new_transfer_id
from router.proxy.messages import ONE_AND_ON
from router.proxy.ranks import header_line, rank_number_chosen_by_client
from router.proxy.request import Request
from router.settings import Address


class Mooncake(TransferProtocol):
    name = MOONCAKE
    runs_together = False

    def pair(self, request: Request, place: Place, decoder: Engine) -> LegPair | None:
        """The id of a rank names the process that holds the KV, so the rank is chosen here."""
        engine = engine_of(place)
        peer = engine.capabilities.kv_peer
        number = _rank_number(request, place, peer.engine_ids)
        engine_id = peer.engine_ids.get(number)
        if engine_id is None:
            return None
        transfer_id = new_transfer_id()
        bootstrap = Address(engine.spec.address.host, peer.bootstrap_port)
        prefill = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        }
        decode = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_engine_id": engine_id,
            "remote_bootstrap_addr": f"http://{bootstrap}",
        }
        known = number if len(peer.engine_ids) > 1 else None
        return LegPair(
            place,
            KvParams(dumps(decode)),
            pinned=header_line(request, place, known),
            prefill_fields=b'"kv_transfer_params":' + dumps(prefill),
            lengths=ONE_AND_ON,
            release={"prompt": [1], "max_tokens": 1, "kv_transfer_params": decode},
            keeps_aborted=True,
        )


def _rank_number(request: Request, place: Place, engine_ids: Mapping[int, str]) -> int:
    """Return the number of the data-parallel rank that computes the prompt."""
    if isinstance(place, EngineRank):
        return place.header
    wanted = rank_number_chosen_by_client(request)
    if wanted is not None:
        return wanted
    numbers = sorted(engine_ids)
    return numbers[request.number % len(numbers)] if numbers else -1
