"""Fixtures: decode engines that chat."""

from tests.unit.router.mock_engine import engine_fixture
from tests.unit.router.openai.chats import says_hello

d, d2 = (engine_fixture(lambda: says_hello) for _ in range(2))
