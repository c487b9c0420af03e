"""The bytes of answers that are read whole, in one memory for all of them."""

import pytest

from router.http_client.answer_limits import UNCOUNTED_BYTES, MemoryBudget, Reservation
from router.http_client.errors import AnswersFullError
from router.http_client.pool import EnginePool
from scripts.mock_engine import MockEngine
from tests.unit.router.engine_scripts import answering
from tests.unit.router.harness import eventually
from tests.unit.router.http_client.asking import REQUEST, soon

MIB = 1024 * 1024


async def test_the_routers_own_requests_are_never_rejected_for_memory(
    pool: EnginePool, engine: MockEngine
) -> None:
    memory = pool.memory = MemoryBudget(1)
    engine.usual = answering(200, b"x" * MIB)
    assert len((await pool.fetch(REQUEST, soon(), 2 * MIB)).body) == MIB
    answer = await pool.request(REQUEST, soon())
    with pytest.raises(AnswersFullError):
        await answer.read(2 * MIB)
    await eventually(lambda: pool.open_count == pool.idle_count)
    memory.limit = 0
    answer = await pool.request(REQUEST, soon())
    await answer.read(2 * MIB)
    assert memory.size == MIB
    answer.close()
    answer.close()
    assert memory.size == 0


def test_a_reservation_counts_large_answers_and_stays_unchanged_without_room() -> None:
    memory = MemoryBudget(4 * MIB)
    one, other = Reservation(memory), Reservation(memory)
    assert one.resize(UNCOUNTED_BYTES)
    assert memory.size == 0
    assert one.resize(3 * MIB)
    assert not other.resize(2 * MIB)
    assert other.resize(MIB)
    assert not one.resize(3 * MIB + 1)
    assert (one.size, memory.size) == (3 * MIB, 4 * MIB)
    memory.limit = MIB  # as an operator may set it meanwhile
    assert one.resize(2 * MIB), "less is always possible"
    assert not one.resize(2 * MIB + 1)
    one.release()
    one.release()
    other.release()
    assert memory.size == 0
