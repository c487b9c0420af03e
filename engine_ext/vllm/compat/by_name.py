"""Our connectors, where vLLM looks for them by their names: MultiConnector does so for what one of
its several counts, wherever that one's module is."""

import contextlib

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from engine_ext.vllm import CONNECTORS


def install() -> None:
    """Idempotent."""
    for name in CONNECTORS:
        with contextlib.suppress(ValueError):  # it is known
            KVConnectorFactory.register_connector(name, "engine_ext.vllm", name)
