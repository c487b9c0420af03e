"""Our connector among those of vLLM's MultiConnector."""

from engine_ext.vllm.compat.probe import Feature, symbols
from engine_ext.vllm.compat.vllm_symbols import KV

SEVERAL = Feature(
    "several_connectors",
    "DisaggConnector cannot be used inside MultiConnector",
    symbols(f"""
        - DisaggConnector among MultiConnector's. Weight changes, pages and our scheduler class do
            not find it
        {KV}.v1.multi_connector:MultiConnector has sub_connectors
    """),
    modules=("optional.several_connectors.connector_names",),
    patches=("optional.several_connectors.connector_names",),
)
