"""Fixtures: a decoder that chats."""

from collections.abc import AsyncIterator

import pytest

from tests.unit.router.mock_engine import MockEngine, running_engine
from tests.unit.router.openai.chats import says_hello


@pytest.fixture
async def d() -> AsyncIterator[MockEngine]:
    async with running_engine(says_hello) as engine:
        yield engine
