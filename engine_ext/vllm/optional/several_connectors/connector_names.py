"""The names of our connectors in vLLM's factory.

MultiConnector looks for the statistics class of each of its connectors by name alone, whatever its
`kv_connector_module_path`. If it does so elsewhere, it cannot have ours among its connectors.
"""

import contextlib

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from engine_ext.vllm import CONNECTORS


def install() -> None:
    """Idempotent."""
    for name in CONNECTORS:
        with contextlib.suppress(ValueError):  # it is known
            KVConnectorFactory.register_connector(name, "engine_ext.vllm", name)
