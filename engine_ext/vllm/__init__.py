"""The connector inside unmodified vLLM.

`--kv-transfer-config '{"kv_connector": "DisaggConnector", "kv_connector_module_path":
"engine_ext.vllm", "kv_role": "kv_both"}'`; `DisaggPushConnector` for push mode.
"""

from engine_ext.vllm.connector import DisaggConnector, DisaggPushConnector

__all__ = ["DisaggConnector", "DisaggPushConnector"]
