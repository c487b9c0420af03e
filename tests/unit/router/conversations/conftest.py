"""Fixtures: prefill engines, and decode engines that retain KV."""

from tests.unit.router.conversations.engines import decoding, prefilling
from tests.unit.router.mock_engine import engine_fixture

p, p2 = (engine_fixture(prefilling) for _ in range(2))
d, d2 = (engine_fixture(decoding) for _ in range(2))
