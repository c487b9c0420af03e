"""Fixtures: prefill engines, and decode engines that retain KV."""

from collections.abc import AsyncIterator

import pytest

from scripts.mock_engine import MockEngine
from tests.unit.router.conversations.engines import decoding, prefilling
from tests.unit.router.mock_engine import running_engine


@pytest.fixture
async def p() -> AsyncIterator[MockEngine]:
    async with running_engine(prefilling()) as engine:
        yield engine


@pytest.fixture
async def d() -> AsyncIterator[MockEngine]:
    async with running_engine(decoding()) as engine:
        yield engine


@pytest.fixture
async def p2() -> AsyncIterator[MockEngine]:
    async with running_engine(prefilling()) as engine:
        yield engine


@pytest.fixture
async def d2() -> AsyncIterator[MockEngine]:
    async with running_engine(decoding()) as engine:
        yield engine
