"""Builds an engine from a configuration, and the process that `disagg-engine` runs: one engine, its
connector, its HTTP server. The one place that knows all parts."""

import asyncio
import logging
import re
import socket
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
import uvloop

from engine_ext.common.access import OPEN
from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import CacheGeometry
from engine_ext.connector import Connector, build_connector
from engine_ext.http import identity
from engine_ext.reference.answer import StopRules
from engine_ext.reference.config import EngineConfig, ReferenceSettings
from engine_ext.reference.core import ConnectorFactory, EngineCore
from engine_ext.reference.engine import ReferenceEngine
from engine_ext.reference.grammar import GrammarCompiler
from engine_ext.reference.kv_cache import max_model_len
from engine_ext.reference.model import Decoder
from engine_ext.reference.model_config import ModelConfig, model_factors, read_model_config, renders
from engine_ext.reference.scheduler import loan_scheme
from engine_ext.reference.server.app import build_app
from engine_ext.reference.server.job import ServedModel
from engine_ext.reference.server.serving import serve
from engine_ext.reference.tokenizer import ChatTemplate, Tokenizer
from engine_ext.reference.weights import load_weights
from engine_ext.worker.agent import AgentError

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 10.0
"""For the engine's current step at shutdown: it cannot be interrupted."""
CAPABILITIES = (
    "cache_hit_threshold",
    "streamed_kv_transfer_params",
    "begun",
    "tell_token_ids",
    "hand_back",
)
"""What this engine can do besides what the connector can."""
WITH_CONNECTOR = ("hand_over", "shared_loads", "load_failures")


def build_engine(config: EngineConfig, connect: ConnectorFactory | None = None) -> ReferenceEngine:
    """Loads the model, allocates the cache, starts the engine's thread and the connector.

    `connect` makes the connector once the model's shape and the cache's geometry are known.
    Raises ValueError, one line, for a model or a configuration that cannot run.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", config.device):
        raise ValueError(f"unsupported device {config.device!r}; supported: cpu, cuda, cuda:N")
    if config.device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device {config.device!r}: no CUDA device is available")
    model_config = read_model_config(config.model, config.dtype, config.device)
    model = build_model(config, model_config)
    tokenizer = Tokenizer.load(config.model).backend
    return ReferenceEngine(EngineCore(config, model_config, model, tokenizer, connect))


def build_model(config: EngineConfig, model_config: ModelConfig) -> Decoder:
    """Raises ValueError, one line, for a checkpoint that does not fit its config.json."""
    weights = load_weights(config.model, model_config, torch.device(config.device))
    return Decoder(model_config, weights, max_model_len(config, model_config))


class HostError(Exception):
    """The engine cannot start, or did not stop well: one line that says why."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status
        """The exit status of the process."""


@dataclass(frozen=True, slots=True)
class Host:
    model: ServedModel
    engine: ReferenceEngine
    itself: identity.EngineDescription

    def run(self, bound: socket.socket, *, shutdown_timeout: int) -> None:
        """Until a signal. Raises HostError if the engine does not stop in time."""
        app = build_app(self.model, self.engine, itself=self.itself)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                spent = runner.run(serve(app, bound, shutdown_timeout=shutdown_timeout))
            # A prefill engine's answers are worthless if its blocks go before they were read.
            if not self.engine.drain(max(0.0, shutdown_timeout - spent)):
                logger.warning("other engines have not read all leased blocks")
        finally:
            try:
                self.engine.shutdown(STEP_TIMEOUT_S)
            except TimeoutError as error:
                raise HostError(str(error), status=1) from error
        if self.engine.has_failed:
            raise HostError("the engine failed: see the log", status=1)
        logger.info("stopped")


def build_host(settings: ReferenceSettings) -> Host:
    """Raises HostError."""
    config = settings.engine
    try:
        model_config = read_model_config(config.model, config.dtype, config.device)
        model = _served_model(settings, model_config)
        started = time.monotonic()
        connect = partial(_connect, settings) if settings.connector else None
        engine = build_engine(config, connect)
        logger.info("loaded %s in %.1f s", config.model, time.monotonic() - started)
        return Host(model, engine, _description(settings))
    except (ValueError, OSError, AgentError) as error:
        raise HostError(str(error)) from error


def _served_model(settings: ReferenceSettings, model_config: ModelConfig) -> ServedModel:
    directory, eos = settings.engine.model, model_config.eos_token_ids
    tokenizer, vocab_size = Tokenizer.load(directory), model_config.vocab_size
    json = tokenizer.backend.to_str()
    return ServedModel(
        names=settings.served_model_names,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(directory, tokenizer),
        rules=StopRules(eos, max_model_len(settings.engine, model_config)),
        grammars=GrammarCompiler(json, vocab_size=vocab_size, eos_token_ids=eos),
        created=int(time.time()),
    )


def _connect(
    settings: ReferenceSettings, model_config: ModelConfig, geometry: CacheGeometry
) -> Connector:
    config, engine, (host, port) = settings.connector, settings.engine, settings.side_channel
    assert config is not None
    has_mirror = is_staged(config, engine)
    return build_connector(
        config,
        replace(geometry, is_staged=has_mirror, lends=geometry.lends and not has_mirror),
        host=host,
        port=port,
        model_factors=model_factors(engine.model, model_config),
    )


def is_staged(config: ConnectorConfig, engine: EngineConfig) -> bool:
    return config.buffer_device == "cpu" and engine.device != "cpu"


def _why_not_lent(config: ConnectorConfig, engine: EngineConfig) -> str | None:
    if is_staged(config, engine):
        return "KV moves through host buffers"
    return None if engine.enable_prefix_caching else "prefix caching is off"


def _description(settings: ReferenceSettings) -> identity.EngineDescription:
    description = identity.EngineDescription(
        name="disagg-engine",
        capabilities=CAPABILITIES,
        renders=renders(settings.engine.model),
        versions={"torch": identity.installed_version("torch")},
        access=OPEN,
    )
    connector = settings.connector
    if connector is None:
        return description
    problem = _why_not_lent(connector, settings.engine)
    if problem is not None:
        logger.info("this engine lends no prefixes: %s", problem)
    return replace(
        description,
        side_channels=(identity.SideChannel(0, *settings.side_channel),),
        transfer_modes=(connector.transfer_mode,),
        capabilities=(*CAPABILITIES, *WITH_CONNECTOR, *identity.capabilities_of(connector)),
        access=connector.access,
        lease_seconds=connector.lease_duration,
        max_step_tokens=settings.engine.tokens_per_step,
        max_num_seqs=settings.engine.max_num_seqs,
        target_itl_ms=settings.engine.target_itl_ms,
        loan_scheme=loan_scheme(settings.engine.block_size),
        lends=problem is None,
        borrows=not is_staged(connector, settings.engine),
        loan_problem=problem,
    )
