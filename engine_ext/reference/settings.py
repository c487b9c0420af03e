"""What the command line of `disagg-engine` comes down to. Frozen; knows nothing of torch."""

from dataclasses import dataclass

from engine_ext.common.config import ConnectorConfig
from engine_ext.reference.engine_config import EngineConfig


@dataclass(frozen=True, slots=True)
class SideChannelConfig:
    """Where other engines ask for the handshake: vLLM's VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT."""

    host: str = "localhost"
    port: int = 5600


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    engine: EngineConfig
    connector: ConnectorConfig | None
    """None: an engine that transfers nothing."""
    side_channel: SideChannelConfig
    served_model_names: tuple[str, ...]
    host: str
    port: int
    log_level: str
    shutdown_timeout: int
    """Seconds that running requests get to finish after the first signal."""
