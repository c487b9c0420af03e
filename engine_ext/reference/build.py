"""Puts an engine together from a configuration. The one place that knows all its parts."""

from collections.abc import Callable

import tokenizers
import torch

from engine_ext.common.types import CacheGeometry
from engine_ext.reference.answer import StopRules
from engine_ext.reference.block_manager import BlockManager
from engine_ext.reference.config import EngineConfig
from engine_ext.reference.core import EngineCore
from engine_ext.reference.engine import ReferenceEngine
from engine_ext.reference.kv_cache import KVCache
from engine_ext.reference.kv_connector import KVConnector, NoConnector
from engine_ext.reference.messages import Counters
from engine_ext.reference.model import BatchBuilder, Decoder, LanguageModel, RotaryEmbedding
from engine_ext.reference.model_config import ModelConfig, read_model_config
from engine_ext.reference.runner import ModelRunner
from engine_ext.reference.sampler import Sampler
from engine_ext.reference.scheduler import Scheduler
from engine_ext.reference.tokenizer import Tokenizer
from engine_ext.reference.weights import load_weights

ConnectorFactory = Callable[[ModelConfig, CacheGeometry], KVConnector]


class EngineParts:
    """An engine whose thread does not run yet."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: LanguageModel,
        tokenizer: tokenizers.Tokenizer,
        connect: ConnectorFactory | None = None,
    ) -> None:
        self.config = config
        device = torch.device(config.device)
        num_blocks, block_size = _num_blocks(config, model_config), config.block_size
        self.cache = KVCache(
            model_config, num_blocks=num_blocks, block_size=block_size, device=device
        )
        self.connector = connect(model_config, self.cache.geometry()) if connect else NoConnector()
        counters, eos = Counters(), model_config.eos_token_ids
        blocks = BlockManager(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.core = EngineCore(
            scheduler=Scheduler(config, blocks, self.connector.scheduler, counters),
            blocks=blocks,
            runner=ModelRunner(
                model,
                self.cache,
                BatchBuilder(model_config, block_size=block_size, device=device),
                Sampler(seed=config.seed, eos_token_ids=eos),
            ),
            connector=self.connector,
            counters=counters,
            tokenizer=tokenizer,
            vocab_size=model_config.vocab_size,
            rules=StopRules(eos, max_model_len(config, model_config)),
        )

    def start(self) -> ReferenceEngine:
        def set_num_threads() -> None:
            if self.config.num_threads is not None:
                torch.set_num_threads(self.config.num_threads)

        return ReferenceEngine(
            self.core,
            self.connector,
            self.cache.regions(),
            self.cache.stage,
            prepare_thread=set_num_threads,
        )


def build_engine(config: EngineConfig, connect: ConnectorFactory | None = None) -> ReferenceEngine:
    """Loads the model, allocates the cache, starts the engine's thread and the connector.

    `connect` makes the connector once the model's shape and the cache's geometry are known.
    Raises ValueError, one line, for a model or a configuration that cannot run.
    """
    _check_device(config.device)
    model_config = read_model_config(config.model, config.dtype, config.device)
    max_model_len(config, model_config)
    tokenizer = Tokenizer.load(config.model).backend
    model = build_model(config, model_config)
    return EngineParts(config, model_config, model, tokenizer, connect).start()


def build_model(config: EngineConfig, model_config: ModelConfig) -> Decoder:
    """Raises ValueError, one line, for a checkpoint that does not fit its config.json."""
    device = torch.device(config.device)
    rope = RotaryEmbedding(model_config, max_model_len(config, model_config), device)
    return Decoder(model_config, load_weights(config.model, model_config, device), rope)


def max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    """Most tokens of one request. Any request of that length fits into the cache when alone.

    Raises ValueError if the configuration promises more than model or cache can hold.
    """
    in_cache = (_num_blocks(config, model_config) - 1) * config.block_size
    positions = model_config.max_position_embeddings
    asked = config.max_model_len
    if asked is None:
        return min(positions, in_cache)
    if asked > positions:
        raise ValueError(f"max_model_len {asked} is more than the model's {positions} positions")
    if asked > in_cache:
        raise ValueError(f"max_model_len {asked} is more than the KV cache's {in_cache} tokens")
    return asked


def _num_blocks(config: EngineConfig, model_config: ModelConfig) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    per_token = model_config.num_layers * model_config.kv_bytes_per_token_and_layer
    block_bytes = per_token * config.block_size
    num_blocks = config.kv_cache_bytes // block_bytes
    if num_blocks < 2:
        raise ValueError(
            f"kv_cache_bytes {config.kv_cache_bytes} is less than two blocks of {block_bytes} bytes"
        )
    return num_blocks


def _check_device(name: str) -> None:
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = "unknown"
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"unsupported device {name!r}; supported: cpu, cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but no CUDA device is available")
