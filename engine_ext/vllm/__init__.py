"""The connector inside unmodified vLLM.

`--kv-transfer-config '{"kv_connector": "DisaggConnector", "kv_connector_module_path":
"engine_ext.vllm", "kv_role": "kv_both"}'`; `DisaggPushConnector` for push mode.
"""

from typing import Any

CONNECTORS = ("DisaggConnector", "DisaggPushConnector")


def __getattr__(name: str) -> Any:
    """The connectors, when vLLM asks for one: where they do not fit, their very import might fail,
    in less than clear words. Raises RuntimeError there."""
    if name not in CONNECTORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine_ext.vllm.compat import features, support

    support.require(*features.REQUIRED)
    from engine_ext.vllm import connector

    return getattr(connector, name)
