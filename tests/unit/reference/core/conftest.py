from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_ext.reference.config import EngineConfig
from engine_ext.reference.host import build_model
from engine_ext.reference.model import Decoder
from engine_ext.reference.model_config import read_model_config
from engine_ext.reference.tiny_model import TinyModel, write_tiny_model
from tests.unit.reference.core.harness import BLOCK, Driver, FakeConnector, make_core

SHAPE = TinyModel(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, max_positions=512
)

MakeDriver = Callable[..., Driver]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Products this small are slower on two threads, much slower where the cores are busy."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), SHAPE)


@pytest.fixture(scope="session")
def decoder(model_dir: Path) -> Decoder:
    config = EngineConfig(model=model_dir, block_size=BLOCK, num_blocks=129)
    return build_model(config, read_model_config(model_dir))


@pytest.fixture
def make_driver(model_dir: Path, decoder: Decoder) -> Iterator[MakeDriver]:
    """Drivers whose bookkeeping is checked once more when the test is over."""
    made: list[Driver] = []

    def make(connector: FakeConnector | None = None, **changes: Any) -> Driver:
        connect = (lambda *_: connector) if connector else None
        changes.setdefault("model", decoder)
        made.append(Driver(make_core(model_dir, connect=connect, **changes)))
        return made[-1]

    yield make
    for driver in made:
        driver.core.scheduler.check_integrity()
