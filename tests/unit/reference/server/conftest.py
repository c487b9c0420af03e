from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from engine_ext.reference.config import EngineConfig
from engine_ext.reference.engine import ReferenceEngine
from engine_ext.reference.host import build_engine
from engine_ext.reference.server.job import ServedModel
from engine_ext.reference.tiny_model import TinyModel, write_tiny_model
from tests.unit.reference.server.fake_engine import (
    FakeEngine,
    RunningServer,
    in_process,
    saying,
    served_model,
    serving,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model for the real engine."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), TinyModel(layers=2))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(saying("Hé", "l", "lo"))


@pytest.fixture
async def server(model: ServedModel, engine: FakeEngine) -> AsyncIterator[RunningServer]:
    """For what no socket can change."""
    async with in_process(model, engine) as client:
        yield RunningServer(engine, 0, client)


# The real engine behind an API server, for modules that give ENGINE, its settings, and MAX_LENGTH,
# the tokens that a context may have.


@pytest.fixture
def roomy(directory: Path, request: pytest.FixtureRequest) -> ServedModel:
    return served_model(directory, request.module.MAX_LENGTH)


@pytest.fixture
async def real_engine(
    directory: Path, request: pytest.FixtureRequest
) -> AsyncIterator[ReferenceEngine]:
    engine = build_engine(EngineConfig(model=directory, num_threads=1, **request.module.ENGINE))
    yield engine
    engine.check_integrity()
    engine.shutdown()


@pytest.fixture
async def client(
    roomy: ServedModel, real_engine: ReferenceEngine
) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(roomy, real_engine) as client:
        yield client


@pytest.fixture
async def real_server(model: ServedModel, engine: FakeEngine) -> AsyncIterator[RunningServer]:
    async with serving(model, engine) as running:
        yield running
