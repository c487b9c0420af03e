"""The process `disagg-engine` runs: one engine, its connector, its HTTP server."""

import asyncio
import logging
import socket
import time
from dataclasses import dataclass, replace

import uvloop

from engine_ext.common.access import OPEN
from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import CacheGeometry
from engine_ext.connector import Connector, build_connector
from engine_ext.http import identity
from engine_ext.reference.build import build_engine, max_model_len
from engine_ext.reference.compatibility import model_factors, renders
from engine_ext.reference.config import EngineConfig, ReferenceSettings, SideChannelConfig
from engine_ext.reference.engine import ReferenceEngine
from engine_ext.reference.grammar import GrammarCompiler
from engine_ext.reference.model_config import ModelConfig, read_model_config
from engine_ext.reference.server.app import build_app
from engine_ext.reference.server.served_model import SamplingDefaults, ServedModel
from engine_ext.reference.server.serving import Stopwatch, serve
from engine_ext.reference.tokenizer import ChatTemplate, Tokenizer
from engine_ext.worker.agent import AgentError

logger = logging.getLogger(__name__)

STEP_SECONDS = 10.0
"""What the engine's current step may take once it is told to stop: it cannot be interrupted."""


CAPABILITIES = (
    "cache_hit_threshold",
    "streamed_kv_transfer_params",
    "begun",
    "tell_token_ids",
    "hand_back",
)
"""What this engine can do besides what the connector can."""
WITH_CONNECTOR = ("hand_over", "shared_loads", "load_failures")


class HostError(Exception):
    """The engine cannot start, or cannot stop: one line that says why."""


@dataclass(frozen=True, slots=True)
class Host:
    model: ServedModel
    engine: ReferenceEngine
    itself: identity.EngineDescription

    def run(self, bound: socket.socket, *, shutdown_timeout: int) -> None:
        """Until a signal. Raises HostError where the engine does not stop in time."""
        app = build_app(self.model, self.engine, itself=self.itself)
        signalled = Stopwatch()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve(app, bound, signalled, shutdown_timeout=shutdown_timeout))
            self._drain(shutdown_timeout - signalled.seconds())
        finally:
            self._stop()
        logger.info("stopped")

    def _drain(self, seconds: float) -> None:
        """A prefill engine's answers are worth nothing if its blocks go before they were read."""
        if not self.engine.drain(max(0.0, seconds)):
            logger.warning("leaving although other engines have not read all they were promised")

    def _stop(self) -> None:
        try:
            self.engine.shutdown(STEP_SECONDS)
        except TimeoutError as error:
            raise HostError(str(error)) from error
        if self.engine.has_failed:
            raise HostError("the engine had failed; the log says how")


def build_host(settings: ReferenceSettings) -> Host:
    """Raises HostError."""
    try:
        return _build(settings)
    except (ValueError, OSError, AgentError) as error:
        raise HostError(str(error)) from error


def _build(settings: ReferenceSettings) -> Host:
    config = settings.engine
    model = _served_model(settings, read_model_config(config.model, config.dtype, config.device))
    started = time.monotonic()
    engine = build_engine(config, _connector_factory(settings))
    logger.info("loaded %s in %.1f s", config.model, time.monotonic() - started)
    return Host(model, engine, _itself(settings))


def _served_model(settings: ReferenceSettings, model_config: ModelConfig) -> ServedModel:
    directory = settings.engine.model
    tokenizer = Tokenizer.load(directory)
    return ServedModel(
        names=settings.served_model_names,
        max_model_len=max_model_len(settings.engine, model_config),
        vocab_size=model_config.vocab_size,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(directory, tokenizer),
        eos_token_ids=model_config.eos_token_ids,
        grammars=GrammarCompiler(
            tokenizer.backend.to_str(),
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
        ),
        defaults=SamplingDefaults.load(directory),
        created=int(time.time()),
    )


def _itself(settings: ReferenceSettings) -> identity.EngineDescription:
    connector, at = settings.connector, settings.side_channel
    own = () if connector is None else WITH_CONNECTOR
    return identity.EngineDescription(
        name="disagg-engine",
        side_channels=() if connector is None else (identity.SideChannel(0, at.host, at.port),),
        transfer_modes=() if connector is None else (connector.transfer_mode,),
        capabilities=(*CAPABILITIES, *own, *identity.capabilities_of(connector)),
        renders=renders(settings.engine.model),
        versions={"torch": identity.installed_version("torch")},
        access=OPEN if connector is None else connector.access,
    )


def _connector_factory(settings: ReferenceSettings) -> "_ConnectorFactory | None":
    if settings.connector is None:
        return None
    return _ConnectorFactory(settings.engine, settings.connector, settings.side_channel)


@dataclass(frozen=True, slots=True)
class _ConnectorFactory:
    engine: EngineConfig
    config: ConnectorConfig
    side_channel: SideChannelConfig

    def __call__(self, model_config: ModelConfig, geometry: CacheGeometry) -> Connector:
        return build_connector(
            self.config,
            replace(geometry, is_staged=is_staged(self.config, self.engine)),
            host=self.side_channel.host,
            port=self.side_channel.port,
            model_factors=model_factors(self.engine.model, model_config),
        )


def is_staged(config: ConnectorConfig, engine: EngineConfig) -> bool:
    return config.buffer_device == "cpu" and engine.device != "cpu"
