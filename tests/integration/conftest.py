from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from engine_ext.reference.tiny_model import write_tiny_model
from tests.browser import running_browser
from tests.conftest import find_free_ports
from tests.integration.oracle import Answer, complete_all, thirty_six_prompts
from tests.integration.processes import (
    BOTH_WAYS,
    UNCACHED,
    Launcher,
    Server,
    described,
    start_fork_server,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Launcher:
    logs = tmp_path_factory.mktemp("logs")
    return Launcher(logs, model, find_free_ports, start_fork_server())


@pytest.fixture(scope="session")
def alone(launcher: Launcher) -> Iterator[Server]:
    """One engine that answers everything by itself: what the right answer is."""
    with launcher.engine("alone") as server:
        yield server


@pytest.fixture(scope="session")
def expected(alone: Server) -> list[Answer]:
    """One prompt at a time: no batching between the model and the oracle."""
    return complete_all(alone, thirty_six_prompts(), at_once=1)


# The engines of a module that describes none in PREFILLER and DECODER, nor by parametrization. The
# prefill engine has no prefix cache of its own: what it does not pull, it computes, and counts.
PREFILLER = described("prefill", UNCACHED, extra=BOTH_WAYS)
DECODER = described("decode", extra=BOTH_WAYS)


@pytest.fixture(scope="module")
def prefiller(launcher: Launcher, request: pytest.FixtureRequest) -> Iterator[Server]:
    start = getattr(request.module, "PREFILLER", PREFILLER)
    with getattr(request, "param", start)(launcher) as server:
        yield server


@pytest.fixture(scope="module")
def decoder(launcher: Launcher, request: pytest.FixtureRequest) -> Iterator[Server]:
    start = getattr(request.module, "DECODER", DECODER)
    with getattr(request, "param", start)(launcher) as server:
        yield server


@pytest.fixture(scope="module")
def router(
    launcher: Launcher, prefiller: Server, decoder: Server, request: pytest.FixtureRequest
) -> Iterator[Server]:
    """With the options of the module's ROUTER."""
    options = getattr(request.module, "ROUTER", ())
    with launcher.router([prefiller], [decoder], *options) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Chromium, for tests on the loop of their module."""
    async with running_browser() as browser:
        yield browser


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    return find_free_ports
