"""Fixtures: decode engines that chat."""

from collections.abc import AsyncIterator

import pytest

from scripts.mock_engine import MockEngine
from tests.unit.router.mock_engine import running_engine
from tests.unit.router.openai.chats import says_hello


@pytest.fixture
async def d() -> AsyncIterator[MockEngine]:
    async with running_engine(says_hello) as engine:
        yield engine


@pytest.fixture
async def d2() -> AsyncIterator[MockEngine]:
    async with running_engine(says_hello) as engine:
        yield engine
