from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from engine_ext.reference.tiny_model import write_tiny_model
from tests.conftest import find_free_ports
from tests.integration.processes import Server
from tests.vllm.releases import BUILD, python_of
from tests.vllm.servers import OURS, SCHEDULER, TRUSTING, Fleet, Kind, build_python


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    return Fleet(build_python(), model, tmp_path_factory.mktemp("logs"), find_free_ports)


@pytest.fixture(scope="session")
def trio(fleet: Fleet) -> Iterator[list[Server]]:
    with fleet.servers(
        Kind("alone"),
        Kind("prefill", TRUSTING, (*SCHEDULER, "--no-enable-prefix-caching")),
        Kind("decode", OURS, SCHEDULER),
    ) as servers:
        yield servers


@pytest.fixture(scope="session")
def alone(trio: list[Server]) -> Server:
    """One vLLM that answers everything by itself: what the right answer is."""
    return trio[0]


@pytest.fixture(scope="session")
def prefiller(trio: list[Server]) -> Server:
    """Without a prefix cache of its own: what it does not pull, it computes, and counts. It
    believes stock decode engines, which prove nothing, that they hold the prompt's tokens."""
    return trio[1]


@pytest.fixture(scope="session")
def decoder(trio: list[Server]) -> Server:
    return trio[2]


# A module describes servers of its own in PAIR, PUSHING or SERVERS, and tests ask for them by the
# name in small letters. A list of descriptions, or of pytest.param, has tests run for each.


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in ("pair", "pushing", "servers"):
        described = getattr(metafunc.module, name.upper(), None)
        if name in metafunc.fixturenames and isinstance(described, list):
            metafunc.parametrize(name, described, indirect=True, scope="module")


def _described(fleet: Fleet, request: pytest.FixtureRequest) -> AbstractContextManager[Any]:
    constant = str(request.fixturename).upper()
    release = getattr(request.module, "RELEASE", BUILD)
    kinds = getattr(request, "param", None) or getattr(request.module, constant)
    return replace(fleet, python=python_of(fleet, release)).described(kinds)


@pytest.fixture(scope="module")
def pair(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[list[Server]]:
    """A prefill and a decode engine: the module's own, or those of all modules."""
    if not hasattr(request.module, "PAIR"):
        yield request.getfixturevalue("trio")[1:]
        return
    with _described(fleet, request) as servers:
        yield servers


@pytest.fixture(scope="module")
def pushing(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[list[Server]]:
    with _described(fleet, request) as servers:
        yield servers


@pytest.fixture(scope="module")
def servers(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Any]:
    """In a list or by name, as they are described."""
    with _described(fleet, request) as servers:
        yield servers


@pytest.fixture(scope="module")
def router(fleet: Fleet, pair: list[Server]) -> Iterator[Server]:
    """Turns take both legs here, whatever it finds out about its decoder."""
    prefiller, decoder = pair
    with fleet.router([prefiller], [decoder], "--decode-first-turns", "0") as server:
        yield server
