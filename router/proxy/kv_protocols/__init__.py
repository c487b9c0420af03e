"""The protocols by which engines move KV, other than the one of vLLM's NixlConnector.

| protocol | legs         | into the prefill leg          | taken from its answer  | into the decode leg |
|----------|--------------|-------------------------------|------------------------|---------------------|
| mooncake | P, then D    | transfer_id                   | -                      | transfer_id, engine id, bootstrap address |
| sglang   | together     | bootstrap host, port and room | -                      | the same            |
| trtllm   | P, then D    | context_only, an id           | disaggregated_params   | generation_only     |
| moriio   | P, then D    | transfer_id, D's address      | kv_transfer_params     | the same            |
| store    | P, then D    | -                             | -                      | -                   |

Each module says what is written into the two legs, and what its engines can do. How the legs run,
are retried and ended is the same for all: `strategies.transfer`. The NixlConnector can do more
(turns, hand-over, release), so it has strategies of its own: `pull`, and `push` with `nixl_push`.
"""  # noqa: E501

from collections.abc import Mapping

from router.fleet.engine import Engine
from router.fleet.kv_protocol import KvProtocol
from router.proxy.kv_protocols.mooncake import Mooncake
from router.proxy.kv_protocols.moriio import MoRIIO
from router.proxy.kv_protocols.protocol import TransferProtocol
from router.proxy.kv_protocols.sglang import SGLang
from router.proxy.kv_protocols.store import KvStore
from router.proxy.kv_protocols.trtllm import TensorRTLLM

PROTOCOLS: Mapping[KvProtocol, TransferProtocol] = {
    one.name: one for one in (Mooncake(), MoRIIO(), SGLang(), TensorRTLLM(), KvStore())
}


def protocol_of(engine: Engine) -> TransferProtocol | None:
    """Return the protocol of an engine; None for vLLM's NixlConnector."""
    return PROTOCOLS.get(engine.capabilities.kv_peer.protocol)
