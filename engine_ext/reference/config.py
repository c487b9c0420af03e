"""What an operator decides about one engine. Frozen, checked once, passed down; free of torch."""

from dataclasses import dataclass
from pathlib import Path

from engine_ext.common.config import ConnectorConfig
from engine_ext.scheduler.admission import parse_threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Raises ValueError, one line, for a value that makes no sense."""

    model: Path
    """A Hugging Face directory: config.json, safetensors, tokenizer.json."""
    device: str = "cpu"
    dtype: str = "auto"
    """auto: float32 on a CPU, the checkpoint's own elsewhere."""
    block_size: int = 32
    """Tokens per KV block. vLLM on CPU wants multiples of 32."""
    num_blocks: int | None = None
    """Blocks per layer; block 0 is never handed out, as in vLLM. None: what fits into
    `kv_cache_memory_mib`."""
    kv_cache_memory_mib: int = 512
    max_model_len: int | None = None
    """Prompt and answer together, in tokens. None: what the model and the cache allow."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    """Most tokens one step runs through the model; longer prompts are computed in chunks, and
    requests that decode wait no longer than a chunk takes. None: 256 on a CPU, elsewhere 2048."""
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    """Threads of a CPU forward pass. None: torch decides."""
    seed: int = 0
    """For sampled requests that bring no seed of their own."""
    global_cache_hit_threshold: float = 0.0
    """Share of a request's tokens whose KV must be at hand, if the request does not say."""
    hand_back: bool = False
    """Whether a request that does not say is handed back rather than preempted."""

    def __post_init__(self) -> None:
        for name in ("block_size", "kv_cache_memory_mib", "num_blocks", "num_threads",
                     "max_model_len", "max_num_seqs", "max_num_batched_tokens"):  # fmt: skip
            least, value = 2 if name == "num_blocks" else 1, getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        parse_threshold(self.global_cache_hit_threshold)

    @property
    def tokens_per_step(self) -> int:
        return self.max_num_batched_tokens or (256 if self.device == "cpu" else 2048)


@dataclass(frozen=True, slots=True)
class SideChannelConfig:
    """The address of the handshake listener: VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, as in vLLM."""

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
