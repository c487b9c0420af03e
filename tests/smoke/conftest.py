"""One fleet of real engines for all smoke tests: processes that move KV over real NIXL.

The two prefill engines are started the usual way, the others and the routers by a fork server: the
engines of a pair share neither a hash seed nor addresses of memory.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

import pytest

from engine_ext.reference.tiny_model import write_tiny_model
from tests.conftest import find_free_ports
from tests.integration.processes import BOTH_WAYS, CONNECTORS, Launcher, Server, start_fork_server


@dataclass(frozen=True)
class SmokeFleet:
    """`alone` computes everything by itself and is the oracle; `p` and `d` pull; `push_p` writes to
    `push_d`. Only `d` has a prefix cache, so the prefill engines count every token they compute."""

    alone: Server
    p: Server
    d: Server
    push_p: Server
    push_d: Server


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    logs = tmp_path_factory.mktemp("logs")
    return Launcher(logs, model, find_free_ports, start_fork_server())


@pytest.fixture(scope="session")
def fleet(launcher: Launcher) -> Iterator[SmokeFleet]:
    uncached, push = "--no-enable-prefix-caching", CONNECTORS["push"]
    usual = replace(launcher, fork_server=None)
    engines: list[AbstractContextManager[Server]] = [
        launcher.engine("alone"),
        usual.engine("p", uncached, extra=BOTH_WAYS),
        launcher.engine("d", extra=BOTH_WAYS),
        usual.engine("push-p", uncached, connector=push),
        launcher.engine("push-d", uncached, connector=push),
    ]
    with ExitStack() as stack, ThreadPoolExecutor(len(engines)) as pool:
        yield SmokeFleet(*pool.map(stack.enter_context, engines))
