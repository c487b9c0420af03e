"""A file of engines: what is taken, what is refused and how, and how it may be replaced."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.engine import EngineRole, EngineSpec, Intent
from router.fleet.sources.file import MAX_FILE_BYTES, FileSource, address_of, parse
from router.fleet.sources.source import SourceError, SourceReport
from router.settings import Address

P1 = "engines: [{url: 'http://p1:8100', role: prefill}]\n"
D1 = "engines: [{url: 'http://d1:8200', role: decode}]\n"
LISTED_P1 = (EngineSpec(EngineRole.PREFILL, Address("p1", 8100)),)
LISTED_D1 = (EngineSpec(EngineRole.DECODE, Address("d1", 8200)),)
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def entry(fields: str) -> bytes:
    return f"engines: [{{url: 'http://h:1', role: decode, {fields}}}]".encode()


def test_all_fields_of_an_entry_are_read() -> None:
    text = """
    engines:
      - {url: http://P1:8100, role: prefill, models: [m, n], group: blue, weight: 2.5}
      - url: http://[2001:DB8::1]:8200/
        role: decode
        draining: true
      - {url: http://both, role: both, weight: 0}
    """
    p1 = EngineSpec(EngineRole.PREFILL, Address("p1", 8100), frozenset("mn"), "blue", 2.5)
    d1 = EngineSpec(EngineRole.DECODE, Address("2001:db8::1", 8200))
    both = EngineSpec(EngineRole.BOTH, Address("both", 80), weight=0.0)
    assert parse(text.encode()) == (
        p1,
        replace(d1, intent=Intent.DRAINING),
        both,
    )
    assert parse(b"engines: []") == ()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "has no list of engines"),
        (b"[]", "has no list of engines"),
        (b"engines: {}", "has no list of engines"),
        (b"engines: [", "line 2"),
        (b"\x00", "control characters"),
        (b"\xff\xfe\xfd", ""),
        (b"engines: []\nmodels: []", "unknown key 'models': the only key is engines"),
        (b"engines: [7]", "engine 1"),
        (b"engines: [{url: 'http://h:1'}]", "role"),
        (b"engines: [{role: decode}]", "url"),
        (b"engines: [{url: 'http://h:1', role: decoder}]", "decoder"),
        (entry("grup: x"), "grup"),
        (entry("models: m"), "models"),
        (entry("models: [1]"), "models"),
        (entry("models: ['']"), "models"),
        (entry("group: 'a b'"), "group"),
        (entry("group: ''"), "group"),
        (entry("weight: '1'"), "weight"),
        (entry("weight: -1"), "weight"),
        (entry("weight: .nan"), "weight"),
        (entry("weight: .inf"), "weight"),
        (entry("draining: 1"), "draining"),
        (entry("models: [[[[m]]]]"), "nested too deep"),
        (b"[" * 100_000, "nested too deep"),
        (BOMB.encode(), "anchors"),
        (b"engines: &e []", "anchors"),
        (b"engines: !!python/object:os.system {}", "python"),
        (b"engines: [{url: http://h:1, role: both}, {url: http://H:1/, role: both}]", "twice"),
    ],
)
def test_invalid_files_are_rejected_in_one_line(content: bytes, complaint: str) -> None:
    with pytest.raises(SourceError) as refused:
        parse(content)
    line = str(refused.value)
    assert complaint in line
    assert "\n" not in line
    assert len(line) < 400


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h:1",
        "HTTPS//h:1",
        "h:1",
        "//h:1",
        "http://h:1/v1",
        "http://h:1?x",
        "http://h:1?",
        "http://h:1#",
        "http://u@h:1",
        "http://:1",
        "http://h:0",
        "http://h:65536",
        "http://h:x",
        "http://h h:1",
        "http://h\n:1",
        "http://é:1",
        "http://[::1",
        "http://[1::2::3]:1",
        'http://[fe80::1%a"b]:1',
        "http://[v1.x]:1",
        "http://-h:1",
        "",
        "x" * 100_000,
    ],
)
def test_an_engine_is_a_plain_http_host_and_port(url: str) -> None:
    with pytest.raises(ValueError, match="url") as refused:
        address_of(url)
    assert len(str(refused.value)) < 400


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_no_bytes_break_the_reading(content: bytes) -> None:
    with contextlib.suppress(SourceError):
        parse(b"engines: " + content)


Ask = Callable[[], Awaitable[SourceReport]]


@contextlib.asynccontextmanager
async def watched(path: Path) -> AsyncIterator[tuple[FileSource, Ask]]:
    source = FileSource(path, interval=0.01)
    async with contextlib.aclosing(source.watch()) as reports:

        async def ask() -> SourceReport:
            return await asyncio.wait_for(anext(reports), 5)

        yield source, ask


async def test_each_way_to_replace_a_file_is_noticed(tmp_path: Path) -> None:
    """As editors do, as `mv` does, and as a ConfigMap's volume does."""
    path, other = tmp_path / "engines.yaml", tmp_path / "other"
    path.write_text(P1)
    async with watched(path) as (source, ask):
        assert source.first == SourceReport(LISTED_P1)
        assert (await ask()).listed is (await ask()).listed, "unchanged is the very same"
        stamps = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        path.write_text(P1.replace("p1", "p2"))
        os.utime(path, ns=stamps)  # as long and as old as before
        assert (await ask()).listed != LISTED_P1
        other.write_text(D1)
        other.rename(path)
        assert await ask() == SourceReport(LISTED_D1)


async def test_a_config_map_is_followed_through_its_links(tmp_path: Path) -> None:
    for name, content in (("..1", P1), ("..2", D1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engines.yaml").write_text(content)
    data, path = tmp_path / "..data", tmp_path / "engines.yaml"
    data.symlink_to("..1")
    path.symlink_to("..data/engines.yaml")
    async with watched(path) as (source, ask):
        assert source.first == SourceReport(LISTED_P1)
        (tmp_path / "..tmp").symlink_to("..2")
        (tmp_path / "..tmp").rename(data)
        assert await ask() == SourceReport(LISTED_D1)


async def test_an_unusable_file_removes_no_engines_and_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(P1)
    async with watched(path) as (_, ask):
        path.write_text("engines: [{url: 'http://p1:8100', role: prefil}]")
        broken = await ask()
        assert (broken.listed, "prefil" in broken.problem) == (None, True)
        assert broken.problem.startswith(f"{path}: engine 1: ")
        assert await ask() == broken
        path.write_text(P1)
        assert await ask() == SourceReport(LISTED_P1)
        path.unlink()
        assert await ask() == SourceReport(None, f"{path}: No such file or directory")
        path.mkdir()
        assert await ask() == SourceReport(None, f"{path}: Is a directory")
        path.rmdir()
        os.mkfifo(path)
        assert await ask() == SourceReport(None, f"{path}: is not a regular file")
        path.unlink()
        path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
        assert await ask() == SourceReport(None, f"{path}: is larger than 1 MiB")
        path.write_text(P1)
        assert await ask() == SourceReport(LISTED_P1)


async def test_a_file_that_is_being_written_is_read_once_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it is a list, too."""
    path = tmp_path / "engines.yaml"
    path.write_text(P1)
    whole = "engines:\n" + "- {url: http://a:1, role: both}\n- {url: http://b:1, role: both}\n"
    async with watched(path) as (_, ask):
        path.write_text(whole[:41])
        monkeypatch.setattr(
            "router.common.watched_file.time.sleep", lambda _: path.write_text(whole)
        )
        report = await ask()
        assert report.listed is not None
        assert {listed.address.host for listed in report.listed} == {"a", "b"}


async def test_a_watch_that_begins_again_has_the_latest_list(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(P1)
    async with watched(path) as (source, ask):
        path.write_text(D1)
        assert await ask() == SourceReport(LISTED_D1)
    async with contextlib.aclosing(source.watch()) as reports:
        assert await asyncio.wait_for(anext(reports), 5) == SourceReport(LISTED_D1)


async def test_a_stuck_disk_is_a_problem_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    path, gate, asked = tmp_path / "engines.yaml", threading.Event(), 0
    path.write_text(P1)

    def stuck(path: Path, max_bytes: int) -> bytes:
        nonlocal asked
        asked += 1
        gate.wait(10)
        return D1.encode()

    async with watched(path) as (_, ask):
        monkeypatch.setattr("router.common.watched_file.READ_TIMEOUT_S", 0.02)
        monkeypatch.setattr("router.common.watched_file.read_regular_file", stuck)
        for _ in range(3):
            assert await ask() == SourceReport(None, f"{path}: cannot be read within 0.02 s")
        assert asked == 1
        gate.set()
        monkeypatch.setattr("router.common.watched_file.READ_TIMEOUT_S", 5.0)
        assert await ask() == SourceReport(LISTED_D1)
