"""Watched files: whatever happens to a file, the last good state stays."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.common.watched_file import WatchedFiles
from tests.unit.router.harness import eventually


class Taken:
    def __init__(self) -> None:
        self.good: list[bytes] = []
        self.said: list[str] = []

    def take(self, content: tuple[bytes, ...]) -> None:
        if content[0].startswith(b"bad"):
            raise ValueError("is bad")
        if content[0].startswith(b"fault"):
            raise KeyError("of ours")
        self.good.append(content[0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"first")
    return path


@contextlib.asynccontextmanager
async def watching(path: Path, taken: Taken) -> AsyncIterator[WatchedFiles]:
    made = WatchedFiles((path,), 1024, taken.take, taken.said.append, interval=0.01)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def spoil(path: Path, trouble: str) -> None:
    if trouble in ("bad", "fault"):
        path.write_text(trouble)
        return
    if trouble == "huge":
        path.write_bytes(b"x" * 2000)
        return
    path.unlink()
    if trouble == "a folder":
        path.mkdir()
    elif trouble == "a pipe":
        os.mkfifo(path)
    elif trouble == "a loop":
        path.symlink_to(path)


def mend(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(b"second")
    fresh.replace(path)


def move(path: Path, to: Path) -> None:
    path.rename(to)


@pytest.mark.parametrize(
    "trouble", ["gone", "bad", "fault", "huge", "a folder", "a pipe", "a loop"]
)
async def test_what_cannot_be_used_leaves_things_as_they_are_and_is_said_once(
    path: Path, trouble: str
) -> None:
    taken = Taken()
    async with watching(path, taken) as watched:
        spoil(path, trouble)
        await eventually(lambda: watched.trouble)
        assert taken.good == [b"first"]
        for _ in range(5):
            watched.check_soon()
            await asyncio.sleep(0.02)
        assert len(taken.said) == 1
        assert "\n" not in taken.said[0]
        mend(path)
        await eventually(lambda: taken.good == [b"first", b"second"])
        await eventually(lambda: not watched.trouble)
        assert taken.said[1:] == [""]


async def test_the_same_as_before_is_not_taken_twice_after_trouble(path: Path) -> None:
    taken = Taken()
    async with watching(path, taken) as watched:
        move(path, path.with_suffix(".away"))
        await eventually(lambda: watched.trouble)
        move(path.with_suffix(".away"), path)
        await eventually(lambda: not watched.trouble)
    assert taken.good == [b"first"]


def test_what_cannot_be_used_at_first_is_told(path: Path) -> None:
    path.write_bytes(b"bad")
    with pytest.raises(ValueError, match="is bad"):
        WatchedFiles((path,), 1024, Taken().take, print)
    path.unlink()
    with pytest.raises(ValueError, match="No such file"):
        WatchedFiles((path,), 1024, Taken().take, print)
