"""What sources list becomes the fleet: gently, as one change, whatever a source does."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from router.common.deadlines import Deadlines
from router.fleet import fleet as fleet_module
from router.fleet import registry as registry_module
from router.fleet.engine import Engine, EngineRole, EngineSpec, Health, Intent
from router.fleet.fleet import Fleet
from router.fleet.registry import EngineRegistry, OperatorOverrides
from router.fleet.sources.source import SourceReport
from router.http_client.pool import EnginePool, PoolLimits
from router.settings import Address
from tests.unit.router.harness import eventually

BOUND = 100.0


class FakeSource:
    """Says what a test says, and fails as it says."""

    def __init__(self, name: str = "fake", first: SourceReport | None = None) -> None:
        self.name = name
        self.first = SourceReport() if first is None else first
        self.words: asyncio.Queue[SourceReport | Exception | None] = asyncio.Queue()
        self.watches = 0

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        self.watches += 1
        while (word := await self.words.get()) is not None:
            if isinstance(word, Exception):
                raise word
            yield word

    def lists(self, *listed: EngineSpec, trouble: str = "") -> None:
        self.words.put_nowait(SourceReport(listed, trouble))

    def fails(self, trouble: str) -> None:
        self.words.put_nowait(SourceReport(None, trouble))


class World:
    """A fleet and its registry, with a clock that a test sets."""

    def __init__(self, *sources: FakeSource) -> None:
        self.time = 0.0
        self.snapshots = 0
        self.lost: list[str] = []
        self.fleet = Fleet(self._pool, 2)
        self.fleet.on_new_snapshot = self._count
        self.fleet.on_lost = lambda engine: self.lost.append(engine.name)
        self.registry = EngineRegistry(self.fleet, sources, BOUND, clock=lambda: self.time)

    def engine(self, name: str) -> Engine:
        engine = self.fleet.find(name)
        assert engine is not None
        return engine

    def _count(self) -> None:
        self.snapshots += 1

    def _pool(self, spec: EngineSpec) -> EnginePool:
        return EnginePool(*spec.address, PoolLimits(1, 1, 1, 1), Deadlines())

    @property
    def names(self) -> set[str]:
        return {engine.name for engine in self.fleet.engines}


def listed(name: str, role: EngineRole = EngineRole.DECODE, **spec: Any) -> EngineSpec:
    host, port = name.split(":")
    return EngineSpec(role, Address(host, int(port)), **spec)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("BATCH_S", 0.01),
        ("CHECK_INTERVAL_S", 0.02),
        ("SOURCE_RESTART_DELAY_S", 0.01),
    ):
        monkeypatch.setattr(registry_module, name, seconds)


@contextlib.asynccontextmanager
async def world_of(*sources: FakeSource) -> AsyncIterator[World]:
    world = World(*sources)
    task = asyncio.create_task(world.registry.run())
    try:
        yield world
    finally:
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_first_reports_are_applied_at_once() -> None:
    first = SourceReport(
        (
            listed("a:1"),
            listed("b:1", EngineRole.PREFILL),
        )
    )
    world = World(FakeSource(first=first))
    assert world.names == {"a:1", "b:1"}
    assert not world.registry.problems()


async def test_engines_join_change_leave_and_return() -> None:
    source = FakeSource()
    async with world_of(source) as world:
        source.lists(listed("a:1"), listed("b:1"))
        await eventually(lambda: world.names == {"a:1", "b:1"})
        a = world.engine("a:1")
        a.in_flight = 1
        source.lists(listed("b:1"))
        await eventually(lambda: a.intent is Intent.DRAINING)
        assert [e.name for pool in world.fleet.snapshot.any_model for e in pool.decoders] == ["b:1"]
        source.lists(listed("a:1"), listed("b:1"))
        await eventually(lambda: a.intent is Intent.SERVING)
        assert world.engine("a:1") is a, "it has never been away"
        a.in_flight = 0
        world.registry.remove_drained()
        assert world.names == {"a:1", "b:1"}
        a.in_flight = 1
        source.lists(listed("b:1"))
        await eventually(lambda: a.intent is Intent.DRAINING)
        a.in_flight = 0
        await eventually(lambda: world.names == {"b:1"})
        source.lists(listed("a:1"), listed("b:1"))
        await eventually(lambda: world.names == {"a:1", "b:1"})
        assert world.engine("a:1") is not a


@pytest.mark.parametrize("returns", [True, False])
async def test_cache_of_an_unlisted_engine_is_forgotten_unless_it_returns(
    monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    monkeypatch.setattr(fleet_module, "MAX_ABSENCE_S", 0.2)
    source = FakeSource(first=SourceReport((listed("a:1"), listed("b:1"))))
    async with world_of(source) as world:
        source.lists(listed("b:1"))
        await eventually(lambda: world.names == {"b:1"})
        if returns:
            source.lists(listed("a:1"))
            await eventually(lambda: world.names == {"a:1"})
        else:
            source.lists()
        await eventually(lambda: world.lost[-1:] == ["b:1"])
        assert world.lost == (["b:1"] if returns else ["a:1", "b:1"])


async def test_a_leaving_engine_has_limited_time_for_its_legs() -> None:
    source = FakeSource(first=SourceReport((listed("a:1"),)))
    async with world_of(source) as world:
        a = world.engine("a:1")
        a.in_flight = 1
        source.lists()
        await eventually(lambda: a.intent is Intent.DRAINING)
        world.time = BOUND - 1
        source.lists(listed("b:1"))
        await eventually(lambda: "b:1" in world.names)
        world.registry.remove_drained()
        assert world.names == {"a:1", "b:1"}
        world.time = BOUND
        await eventually(lambda: world.names == {"b:1"})


async def test_a_source_may_list_a_draining_engine() -> None:
    source = FakeSource(first=SourceReport((listed("a:1", intent=Intent.DRAINING),)))
    async with world_of(source) as world:
        a = world.engine("a:1")
        assert (a.intent, world.fleet.snapshot.any_model) == (Intent.DRAINING, ())
        source.lists(listed("a:1"))
        await eventually(lambda: a.intent is Intent.SERVING)
        source.lists(listed("a:1", intent=Intent.DRAINING))
        await eventually(lambda: a.intent is Intent.DRAINING)
        world.registry.remove_drained()
        assert world.names == {"a:1"}, "it is listed"


async def test_a_new_description_changes_an_engine_in_place() -> None:
    source = FakeSource(first=SourceReport((listed("a:1"),)))
    async with world_of(source) as world:
        a = world.engine("a:1")
        a.health, a.in_flight, a.capabilities.is_identity_known = Health.HEALTHY, 1, True
        source.lists(listed("a:1", weight=3.0, models=frozenset("m")))
        await eventually(lambda: a.models == frozenset("m"))
        assert (a.capabilities.is_identity_known, world.lost) == (True, []), "it is what it was"
        assert world.fleet.snapshot.pools("m")[0].weight == 3.0
        source.lists(listed("a:1"))
        await eventually(lambda: a.models is None)
        a.models = frozenset("x")  # as its page says
        source.lists(listed("a:1", EngineRole.BOTH, group="blue"))
        await eventually(lambda: a.role is EngineRole.BOTH)
        assert (a.models, a.spec.group) == (frozenset("x"), "blue")
        assert (a.capabilities.is_identity_known, world.lost) == (False, ["a:1"]), (
            "asked anew what it is"
        )
        assert (world.engine("a:1"), a.health, a.in_flight) == (a, Health.HEALTHY, 1)
        assert world.fleet.groups == {"blue"}


async def test_many_changes_make_one_snapshot_and_no_change_makes_none() -> None:
    source, other = FakeSource(), FakeSource("other")
    async with world_of(source, other) as world:
        many = [listed(f"h:{port}") for port in range(1, 501)]
        source.lists(*many)
        await eventually(lambda: len(world.names) == 500)
        assert world.snapshots == 1
        source.lists(*many)
        other.lists(many[0])
        source.lists(*reversed(many))
        await eventually(lambda: source.words.empty() and other.words.empty())
        await asyncio.wait_for(world.registry.wait_for_sources(1), 5)
        assert world.snapshots == 1
        source.lists(*many[:250], *[listed(f"i:{port}") for port in range(1, 251)])
        await eventually(lambda: "h:500" not in world.names)
        assert world.snapshots == 3, "one that drains and joins, one that removes"


async def test_an_engine_stays_while_any_source_lists_it() -> None:
    one, other = FakeSource("one"), FakeSource("other")
    async with world_of(one, other) as world:
        one.lists(listed("a:1", EngineRole.PREFILL))
        other.lists(listed("a:1", EngineRole.DECODE))
        await eventually(lambda: world.names and world.engine("a:1").role is EngineRole.BOTH)
        one.lists()
        await eventually(lambda: world.engine("a:1").role is EngineRole.DECODE)
        other.lists()
        await eventually(lambda: not world.names)


async def test_a_conflict_is_resolved_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    one, other = FakeSource("one"), FakeSource("other")
    async with world_of(one, other) as world:
        one.lists(listed("a:1", group="blue"))
        other.lists(listed("a:1", group="green"))
        await eventually(lambda: "disagree on its group" in caplog.text)
        other.lists(listed("a:1", group="green"), listed("b:1"))
        await eventually(lambda: "b:1" in world.names)
        assert world.engine("a:1").spec.group == "blue"
        assert caplog.text.count("disagree on its group") == 1


async def test_a_failing_source_keeps_its_engines_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="disagg_router")
    source = FakeSource()
    async with world_of(source) as world:
        assert world.registry.problems() == {"fake": "has not reported yet"}
        source.lists(listed("a:1"))
        await eventually(lambda: world.names and not world.registry.problems())
        for number in range(20):
            source.fails("the dog ate it" if number % 2 else "it is gone")
        await eventually(lambda: source.words.empty() and world.registry.problems())
        assert world.names == {"a:1"}
        assert world.registry.problems() == {"fake": "the dog ate it"}
        assert caplog.text.count("the dog ate it") == caplog.text.count("it is gone") == 1
        told = world.registry.sources[0].listed_at
        source.lists(listed("a:1"), trouble="and yet")
        await eventually(lambda: world.registry.sources[0].listed_at > told)
        assert world.registry.problems() == {"fake": "and yet"}
        source.lists(listed("a:1"))
        await eventually(lambda: "works again" in caplog.text)
        assert not world.registry.problems()


async def test_a_source_that_raises_is_watched_again_without_disturbing_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dying, other = FakeSource("dying"), FakeSource("other")
    async with world_of(dying, other) as world:
        dying.lists(listed("a:1"))
        await eventually(lambda: world.names)
        dying.words.put_nowait(RuntimeError("a fault of ours"))
        await eventually(lambda: dying.watches == 2)
        assert "a fault of ours" in world.registry.problems()["dying"]
        other.lists(listed("b:1"))
        await eventually(lambda: world.names == {"a:1", "b:1"})
        dying.lists(listed("c:1"))
        await eventually(lambda: world.names == {"b:1", "c:1"})


async def test_an_error_during_reconciliation_is_reported_and_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = FakeSource()
    async with world_of(source) as world:
        add: Callable[..., Engine] = world.fleet.add
        failures: Sequence[Exception] = [RuntimeError("no")]

        def fail_once(*arguments: Any) -> Engine:
            nonlocal failures
            if failures:
                (error,), failures = failures, []
                raise error
            return add(*arguments)

        monkeypatch.setattr(world.fleet, "add", fail_once)
        source.lists(listed("a:1"), listed("b:1"))
        await eventually(lambda: "registry" in world.registry.problems())
        await eventually(lambda: world.names == {"a:1", "b:1"})
        await eventually(lambda: not world.registry.problems())


async def test_waiting_for_the_first_reports_ends_at_a_timeout() -> None:
    quick, mute = FakeSource("quick"), FakeSource("mute")
    async with world_of(quick, mute) as world:
        quick.lists(listed("a:1"))
        await asyncio.wait_for(world.registry.wait_for_sources(0.05), 5)
        assert world.names == {"a:1"}
        mute.fails("cannot tell")
        await asyncio.wait_for(world.registry.wait_for_sources(60), 5)
    async with world_of(FakeSource("only")) as world:
        source = world.registry.sources[0].source
        assert isinstance(source, FakeSource)
        source.lists(listed("a:1"))
        await asyncio.wait_for(world.registry.wait_for_sources(60), 5)
        assert world.names == {"a:1"}, "it is there when it was heard"


async def test_an_ended_source_is_never_outdated() -> None:
    source = FakeSource(first=SourceReport((listed("a:1"),)))
    async with world_of(source) as world:
        standing = world.registry.sources[0]
        told = standing.listed_at
        source.words.put_nowait(None)
        await eventually(lambda: standing.listed_at > told)
        assert world.names == {"a:1"}


async def test_simultaneous_probe_results_make_one_snapshot() -> None:
    first = SourceReport(tuple(listed(f"h:{port}") for port in range(1, 101)))
    world = World(FakeSource(first=first))
    engines, before = world.fleet.engines, world.snapshots
    for engine in engines[:99]:
        world.fleet.note_probe_passed(engine)
        world.fleet.note_models(engine, frozenset("m"), {})
    assert all(engine.is_available for engine in engines[:99]), "each is known at once"
    world.fleet.note_unreachable(engines[99], "gone")
    await eventually(lambda: world.snapshots > before)
    assert world.snapshots == before + 1
    assert len(world.fleet.snapshot.pools("m")[0].decoders) == 99
    world.fleet.note_probe_failed(engines[0], "slow")
    world.fleet.note_probe_failed(engines[0], "slow")
    assert not engines[0].is_available
    await eventually(lambda: world.snapshots == before + 2)


async def test_an_engine_with_kv_leases_does_not_leave_yet() -> None:
    source = FakeSource(first=SourceReport((listed("a:1"),)))
    async with world_of(source) as world:
        a = world.engine("a:1")
        a.kv_leases = 1
        source.lists(listed("b:1"))
        await eventually(lambda: "b:1" in world.names and a.intent is Intent.DRAINING)
        world.registry.remove_drained()
        assert (world.names, a.is_idle) == ({"a:1", "b:1"}, False)
        a.kv_leases = 0
        await eventually(lambda: world.names == {"b:1"})


async def test_overrides_outlive_a_new_listing() -> None:
    source = FakeSource(first=SourceReport((listed("a:1"),)))
    async with world_of(source) as world:
        a, added = world.engine("a:1"), listed("c:1")
        world.registry.set_overrides(OperatorOverrides((added,), frozenset([a.spec.address])))
        assert (a.intent, world.names) == (Intent.DRAINING, {"a:1", "c:1"}), "at once"
        source.lists(listed("a:1", weight=2.0), listed("b:1"))
        await eventually(lambda: "b:1" in world.names)
        assert (a.intent, a.spec.weight) == (Intent.DRAINING, 2.0)
        assert list(world.registry.sources_of(a.spec.address)) == ["fake"]
        assert list(world.registry.sources_of(added.address)) == ["admin"]
        world.registry.set_overrides(OperatorOverrides())
        assert a.intent is Intent.SERVING
        await eventually(lambda: world.names == {"a:1", "b:1"})
        assert not world.registry.sources_of(added.address)


async def test_an_error_while_overrides_are_applied_does_not_lose_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world_of(FakeSource(first=SourceReport((listed("a:1"),)))) as world:
        change_spec = world.fleet.change_spec

        def fail(*_: object) -> None:
            monkeypatch.setattr(world.fleet, "change_spec", change_spec)
            raise RuntimeError("no")

        monkeypatch.setattr(world.fleet, "change_spec", fail)
        a = world.engine("a:1")
        with pytest.raises(RuntimeError):
            world.registry.set_overrides(OperatorOverrides(draining=frozenset([a.spec.address])))
        await eventually(lambda: a.intent is Intent.DRAINING)


async def test_all_listings_are_known_when_each_source_has_listed_once() -> None:
    one, other = FakeSource("one"), FakeSource("other")
    async with world_of(one, other) as world:
        one.lists(listed("a:1"))
        other.fails("cannot tell")
        await eventually(lambda: world.names and "other" in world.registry.problems())
        assert not world.registry.has_all_listings
        other.lists()
        await eventually(lambda: world.registry.has_all_listings)
        one.fails("cannot tell any more")
        await eventually(lambda: "one" in world.registry.problems())
        assert world.registry.has_all_listings, "what it listed last stands"


async def test_a_registry_without_sources_waits_for_none() -> None:
    async with world_of() as world:
        await asyncio.wait_for(world.registry.wait_for_sources(60), 5)
        world.registry.set_overrides(OperatorOverrides((listed("a:1"),)))
        assert world.names == {"a:1"}
