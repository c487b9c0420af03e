"""What a reload changes for the whole process is as it was after each test."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    loggers = [
        logging.getLogger(name) for name in (None, "httpx", "httpcore", "uvicorn", "asyncio")
    ]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)
