"""A process that starts while a source is unreachable uses the listing that was saved."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from router.fleet.engine import EngineRole, EngineSpec, Intent
from router.fleet.sources import source as source_module
from router.fleet.sources.source import SavedListing, SourceReport, load_listing, save_listing
from router.settings import Address
from tests.unit.router.harness import eventually

P = EngineSpec(EngineRole.PREFILL, Address("p", 8100))
D = EngineSpec(
    EngineRole.DECODE, Address("::1", 9), frozenset("ab"), "blue", 0.5, intent=Intent.DRAINING
)
BROKEN = SourceReport(None, "the file is broken")


class FakeSource:
    name = "fake"

    def __init__(self, *reports: SourceReport, first: SourceReport | None = None) -> None:
        self.first = first or SourceReport()
        self._reports = reports

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        for report in self._reports:
            yield report


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "source-0.json"


async def watched(source: SavedListing) -> list[SourceReport]:
    return [report async for report in source.watch()]


async def test_a_failing_source_starts_with_the_saved_list(file: Path) -> None:
    said = (SourceReport((P,)), SourceReport((P, D)), BROKEN)
    assert await watched(SavedListing(FakeSource(*said), file)) == list(said), "it hides nothing"
    again = SavedListing(FakeSource(first=BROKEN), file)
    assert again.first == SourceReport((P, D), BROKEN.problem), "and it is in trouble still"
    assert SavedListing(FakeSource(), file).first == SourceReport((P, D)), (
        "one that has to be asked first"
    )
    told = SourceReport((), "")
    assert SavedListing(FakeSource(first=told), file).first == told, "its own word counts more"


async def test_a_failing_source_without_a_saved_list_has_none(file: Path) -> None:
    assert SavedListing(FakeSource(first=BROKEN), file).first == BROKEN


@pytest.mark.parametrize("content", [b"", b"[", b"[1]", b"null", b"\xff", b'[{"spec": {}}]'])
def test_an_unreadable_saved_list_is_ignored(
    file: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_bytes(content)
    assert SavedListing(FakeSource(first=BROKEN), file).first == BROKEN
    assert len(caplog.records) == 1


async def test_an_unchanged_list_is_not_saved_again(tmp_path: Path) -> None:
    file, same = tmp_path / "source-0.json", [SourceReport((P,))] * 3
    async with contextlib.aclosing(SavedListing(FakeSource(*same), file).watch()) as reports:
        await anext(reports)
        await anext(reports)
        file.unlink()
        await anext(reports)
        with pytest.raises(StopAsyncIteration):
            await anext(reports)
    assert load_listing(file) is None


async def test_a_failed_save_is_logged_and_delays_no_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = [SourceReport((P,)), SourceReport((P, D))]
    assert await watched(SavedListing(FakeSource(*said), tmp_path / "gone" / "x.json")) == said
    assert len(caplog.records) == 2
    assert "source fake" in caplog.text


async def test_a_failed_save_is_retried_with_the_next_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "later" / "source-0.json"
    source = SavedListing(FakeSource(*[SourceReport((P,))] * 4), file)
    async with contextlib.aclosing(source.watch()) as reports:
        for _ in range(3):
            await anext(reports)
        file.parent.mkdir()
        await anext(reports)
    assert load_listing(file) == (P,)
    assert len(caplog.records) == 1, "told once"


async def test_a_stuck_disk_delays_no_report(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One write waits; what came meanwhile is written with the first report after it."""
    gate, asked = threading.Event(), 0
    write: Callable[[Path, tuple[EngineSpec, ...]], None] = save_listing

    def stuck(file: Path, listed: tuple[EngineSpec, ...]) -> None:
        nonlocal asked
        asked += 1
        gate.wait(10)
        write(file, listed)

    monkeypatch.setattr(source_module, "SAVE_TIMEOUT_S", 0.02)
    monkeypatch.setattr(source_module, "save_listing", stuck)
    said = [SourceReport((P,)), SourceReport((D,)), SourceReport((P, D)), SourceReport((P, D))]
    async with contextlib.aclosing(SavedListing(FakeSource(*said), file).watch()) as reports:
        async with asyncio.timeout(5):
            for expected in said[:3]:
                assert await anext(reports) == expected
        assert asked == 1
        gate.set()
        await eventually(lambda: load_listing(file) == (P,))
        assert await anext(reports) == said[3]
        with pytest.raises(StopAsyncIteration):
            await anext(reports)
    assert load_listing(file) == (P, D)
