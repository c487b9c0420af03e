"""The connector inside unmodified vLLM.

`--kv-transfer-config '{"kv_connector": "DisaggConnector", "kv_connector_module_path":
"engine_ext.vllm", "kv_role": "kv_both"}'`; `DisaggPushConnector` for push mode.
"""

from typing import Any

CONNECTORS = ("DisaggConnector", "DisaggPushConnector")


def __getattr__(name: str) -> Any:
    """Import the connectors when vLLM asks for one. If they do not fit this vLLM, the import itself
    might fail with a message that explains nothing, so RuntimeError is raised first."""
    if name not in CONNECTORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine_ext.vllm.compat import support
    from engine_ext.vllm.compat.vllm_symbols import REQUIRED

    support.require(*REQUIRED)
    from engine_ext.vllm import connector

    return getattr(connector, name)
