"""What an operator decides about one engine. Frozen, checked once, passed down; free of torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.step_budget import parse_target
from engine_ext.scheduler.admission import parse_threshold


def _option(default: Any, text: str) -> Any:
    """A field that is an option of the command line, too."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Raises ValueError, one line, for a value that makes no sense."""

    model: Path
    """A Hugging Face directory: config.json, safetensors, tokenizer.json."""
    device: str = _option("cpu", "where the model runs: cpu, cuda or cuda:N")
    dtype: str = _option(
        "auto", "float32, float16, bfloat16, or auto: float32 on a CPU, else as the checkpoint"
    )
    block_size: int = _option(32, "tokens per KV block; vLLM on CPU needs multiples of 32")
    num_blocks: int | None = _option(None, "KV blocks, the first is unused; default: what fits")
    kv_cache_memory_mib: int = _option(512, "size of the KV cache in MiB, without --num-blocks")
    max_model_len: int | None = _option(
        None, "largest number of tokens of prompt and answer; default: what fits"
    )
    max_num_seqs: int = _option(64, "largest number of requests in one batch")
    max_num_batched_tokens: int | None = _option(
        None, "largest number of tokens of a step (chunked prefill); default 256, on a GPU 2048"
    )
    target_itl_ms: float | None = _option(
        None,
        "cut prompts so that a step which decodes ends within 0.9 of this many milliseconds, "
        "with at least 64 tokens; default: --max-num-batched-tokens alone",
    )
    num_threads: int | None = _option(None, "threads of a forward pass on a CPU; default: torch's")
    seed: int = _option(0, "seed of requests that set none")
    global_cache_hit_threshold: float = _option(
        0.0, "share of a prompt that must be cached or offered, else the request is rejected"
    )
    enable_prefix_caching: bool = True
    hand_back: bool = False
    """Whether a request that does not say is handed back rather than preempted."""

    def __post_init__(self) -> None:
        for name in ("block_size", "kv_cache_memory_mib", "num_blocks", "num_threads",
                     "max_model_len", "max_num_seqs", "max_num_batched_tokens"):  # fmt: skip
            least, value = 2 if name == "num_blocks" else 1, getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.target_itl_ms is not None:
            parse_target(self.target_itl_ms)
        parse_threshold(self.global_cache_hit_threshold)

    @property
    def tokens_per_step(self) -> int:
        return self.max_num_batched_tokens or (256 if self.device == "cpu" else 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    engine: EngineConfig
    connector: ConnectorConfig | None
    """None: an engine that transfers nothing."""
    side_channel: tuple[str, int]
    """Host and port of the handshake listener."""
    served_model_names: tuple[str, ...]
    host: str
    port: int
    log_level: str
    shutdown_timeout: int
    """Seconds that running requests get to finish after the first signal."""
