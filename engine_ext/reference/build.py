"""Puts an engine together from a configuration. The one place that knows all its parts."""

from collections.abc import Callable

import tokenizers
import torch

from engine_ext.common.types import CacheGeometry
from engine_ext.reference.config import EngineConfig
from engine_ext.reference.core import EngineCore
from engine_ext.reference.engine import ReferenceEngine
from engine_ext.reference.kv_cache import KVCache, max_model_len, num_blocks
from engine_ext.reference.kv_connector import KVConnector, NoConnector
from engine_ext.reference.model import Decoder, LanguageModel, RotaryEmbedding
from engine_ext.reference.model_config import ModelConfig, read_model_config
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
        self.cache = KVCache(
            model_config,
            num_blocks=num_blocks(config, model_config),
            block_size=config.block_size,
            device=torch.device(config.device),
        )
        self.connector = connect(model_config, self.cache.geometry()) if connect else NoConnector()
        self.core = EngineCore(config, model_config, model, self.cache, self.connector, tokenizer)

    def start(self) -> ReferenceEngine:
        return ReferenceEngine(
            self.core,
            self.connector,
            self.cache.regions(),
            self.cache.stage,
            num_threads=self.config.num_threads,
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


def _check_device(name: str) -> None:
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = "unknown"
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"unsupported device {name!r}; supported: cpu, cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but no CUDA device is available")
