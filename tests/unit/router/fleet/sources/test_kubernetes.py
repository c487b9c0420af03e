"""Pods listed and watched, from an API server that fails in every way that one can."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from router.fleet.engine import EngineRole, Intent
from router.fleet.sources import kubernetes as kubernetes_module
from router.fleet.sources import pod_api, source
from router.fleet.sources.kubernetes import KubernetesSource
from router.fleet.sources.pod_api import LineSplitter, PodApi
from router.fleet.sources.source import SourceError, SourceReport
from router.settings import SettingsError
from tests.unit.router.fleet.sources.api_server import ApiServer, api_server, kubeconfig, pod
from tests.unit.router.harness import eventually


@dataclass
class Watched:
    """A source, and what it has reported."""

    server: ApiServer
    source: KubernetesSource
    token: Path
    reports: list[SourceReport] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def note(self, report: SourceReport) -> None:
        self.reports.append(report)
        if report.listed is not None:
            self.names = {str(one.address): str(one.intent) for one in report.listed}

    @property
    def problem(self) -> str:
        return self.reports[-1].problem if self.reports else "nothing"

    async def lists(self, *hosts: str) -> None:
        expected = {f"{host}:8000" for host in hosts}
        await eventually(lambda: self.names.keys() == expected and not self.problem)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(source, "MAX_PAUSE_S", 0.05)
    monkeypatch.setattr(pod_api, "WATCH_GRACE_S", 0.2)


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as made:
        yield made


@contextlib.asynccontextmanager
async def watching(
    server: ApiServer, tmp_path: Path, life: float = 40, **how: Any
) -> AsyncIterator[Watched]:
    """The server ends a watch after a twentieth of its life, so that seconds are not waited for."""
    token = tmp_path / "token"
    token.write_text(server.token)
    config = kubeconfig(tmp_path / "config", server.port, token)
    api = PodApi(config, None, "llm-d.ai/role=decode", life)
    watched = Watched(server, KubernetesSource(EngineRole.DECODE, "8000", api, **how), token)

    async def follow() -> None:
        async with contextlib.aclosing(watched.source.watch()) as reports:
            async for report in reports:
                watched.note(report)

    task = asyncio.create_task(follow())
    try:
        yield watched
    finally:
        assert not task.done(), task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_pods_come_become_ready_end_and_go(server: ApiServer, tmp_path: Path) -> None:
    for number in range(8):
        server.put(pod(f"d{number}", f"10.0.0.{number}"))
    async with watching(server, tmp_path) as watched:
        await watched.lists(*[f"10.0.0.{number}" for number in range(8)])
        assert server.asked[0]["path"] == "/api/v1/namespaces/inference/pods"
        assert server.asked[0]["labelSelector"] == "llm-d.ai/role=decode"
        assert [query.get("continue") for query in server.asked[:3]] == [None, "3", "6"]
        await eventually(lambda: server.watching)
        for number in range(1, 8):
            server.delete(f"d{number}")
        await watched.lists("10.0.0.0")
        server.put(pod("new", "10.0.0.9", ready=False))
        server.put(pod("d0", "10.0.0.0", terminating=True))
        await eventually(lambda: watched.names == {"10.0.0.0:8000": Intent.DRAINING})
        server.put(pod("new", "10.0.0.9"))
        await watched.lists("10.0.0.0", "10.0.0.9")
        server.delete("d0")
        await watched.lists("10.0.0.9")
        assert server.lists == 1, "all of that was watched"


async def test_unchanged_pods_cause_no_report(server: ApiServer, tmp_path: Path) -> None:
    server.put(pod("d1"))
    async with watching(server, tmp_path) as watched:
        await eventually(lambda: server.watching)
        before = len(watched.reports)
        for _ in range(5):
            server.put(pod("d1", annotations={"anything": "else"}))
        server.bookmark()
        server.put(pod("d2", "10.0.0.2"))
        await watched.lists("10.0.0.1", "10.0.0.2")
        assert len(watched.reports) == before + 1


async def test_watches_continue_and_pods_are_listed_periodically(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a watch has kept from us comes to light then."""
    monkeypatch.setattr(kubernetes_module, "WATCHES_PER_LIST", 3)
    server.put(pod("d1"))
    server.put(pod("d2", "10.0.0.2"))
    async with watching(server, tmp_path, life=1, min_watch=0) as watched:
        await watched.lists("10.0.0.1", "10.0.0.2")
        await eventually(lambda: server.watching)
        server.bookmark()
        version = str(server.version)
        await eventually(lambda: server.asked[-1].get("resourceVersion") == version)
        server.delete("d1", is_told=False)
        await watched.lists("10.0.0.2")
        watches = [query for query in server.asked if "watch" in query]
        assert len(watches) >= 3
        assert all(query["allowWatchBookmarks"] == "true" for query in watches)
        assert all(not report.problem for report in watched.reports)


@pytest.mark.parametrize(
    ("min_watch", "expected"),
    [(0.0, [0.5] * 6), (60.0, [0.5, 1.0, 2.0, 4.0, 4.0, 4.0])],
    ids=["after a while", "at once"],
)
async def test_pauses_stay_short_while_lists_are_read_and_watches_are_cut(
    server: ApiServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    min_watch: float,
    expected: list[float],
) -> None:
    pauses: list[float] = []

    async def note_pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(source, "FIRST_PAUSE_S", 0.5)
    monkeypatch.setattr(source, "MAX_PAUSE_S", 30.0)
    monkeypatch.setattr(kubernetes_module, "sleep", note_pause)
    how = {"min_watch": min_watch, "random_share": lambda: 1.0}
    async with watching(server, tmp_path, life=2000, **how) as watched:
        cuts: list[int] = []
        for number in range(6):
            await eventually(lambda: server.lists > len(cuts) and server.watching)
            server.put(pod("a", f"10.0.0.{number}"))
            await watched.lists(f"10.0.0.{number}")
            server.cut()
            cuts.append(number)
            await eventually(lambda: len(pauses) == len(cuts))
        assert pauses == expected


async def test_a_bookmark_spares_the_next_watch_what_is_known(
    server: ApiServer, tmp_path: Path
) -> None:
    server.put(pod("d1"))
    async with watching(server, tmp_path, life=1, min_watch=0) as watched:
        await eventually(lambda: server.watching)
        server.bookmark()
        version = str(server.version)
        await eventually(lambda: server.asked[-1].get("resourceVersion") == version)
        assert server.lists == 1
        assert not watched.problem


async def test_after_410_unseen_deletions_take_effect(server: ApiServer, tmp_path: Path) -> None:
    server.put(pod("d1"))
    async with watching(server, tmp_path, life=1, min_watch=0) as watched:
        await eventually(lambda: server.watching)
        server.delete("d1", is_told=False)
        server.put(pod("d2", "10.0.0.2"), is_told=False)
        server.oldest = server.version
        await watched.lists("10.0.0.2")
        assert all(not report.problem for report in watched.reports), "that is no problem"


async def test_an_unreachable_api_server_removes_no_engines(
    server: ApiServer, tmp_path: Path
) -> None:
    server.put(pod("d1"))
    server.put(pod("d2", "10.0.0.2"))
    async with watching(server, tmp_path) as watched:
        await watched.lists("10.0.0.1", "10.0.0.2")
        await eventually(lambda: server.watching)
        await server.stop()
        await eventually(lambda: watched.problem)
        assert "cannot be reached" in watched.problem
        assert len(watched.names) == 2
        count = len(watched.reports)
        await eventually(lambda: len(watched.reports) > count + 2)
        assert len(watched.names) == 2
        server.delete("d1", is_told=False)
        await server.start()
        await watched.lists("10.0.0.2")


async def test_an_api_server_that_is_unreachable_at_start_is_a_problem_until_it_answers(
    server: ApiServer, tmp_path: Path
) -> None:
    await server.stop()
    async with watching(server, tmp_path) as watched:
        await eventually(lambda: len(watched.reports) > 2)
        assert all(report.listed is None and report.problem for report in watched.reports)
        server.put(pod("d1"))
        await server.start()
        await watched.lists("10.0.0.1")


async def test_a_silently_lost_watch_is_noticed(server: ApiServer, tmp_path: Path) -> None:
    """Half open: nothing comes, not even the end that was asked for."""
    server.put(pod("d1"))
    async with watching(server, tmp_path, life=1) as watched:
        await eventually(lambda: server.watching)
        server.is_deaf = True
        server.delete("d1")
        server.put(pod("d2", "10.0.0.2"))
        await eventually(lambda: any("silent" in report.problem for report in watched.reports))
        server.is_deaf = False
        await watched.lists("10.0.0.2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ({"code": 403}, "returned 403 No not now"),
        ({"code": 500}, "returned 500"),
        ({"code": 410}, ""),
        ({"garbage": b"<html>"}, "cannot be parsed"),
        ({"garbage": b'{"items": [{"metadata": 7}]}'}, "cannot be parsed"),
        ({"garbage": b'{"metadata": {}, "items": [{"status": {}}]}'}, "cannot be parsed"),
        ({"garbage": b"\xff" * 100}, "cannot be parsed"),
        ({"garbage": b"[" * 100_000}, ""),
        ({"watch_garbage": b"<html>\n"}, "cannot be parsed"),
        ({"watch_garbage": b'{"type":"ADDED","object":7}\n'}, "cannot be parsed"),
        ({"watch_garbage": b'{"type":"EXPLODED","object":{}}\n'}, "cannot be parsed"),
        ({"watch_garbage": b'{"type":"ERROR","object":{"code":500}}\n'}, "returned 500"),
        ({"watch_garbage": b"x" * (pod_api.MAX_WATCH_EVENT_BYTES + 1)}, "too large"),
        ({"watch_garbage": b"\n"}, "ends each watch at once"),
    ],
)
async def test_no_answer_ends_the_watch_or_removes_engines(
    server: ApiServer, tmp_path: Path, how: dict[str, Any], complaint: str
) -> None:
    server.put(pod("d1"))
    async with watching(server, tmp_path, life=1, min_watch=0.02) as watched:
        await watched.lists("10.0.0.1")
        for name, value in how.items():
            setattr(server, name, value)
        asked = len(server.asked)
        await eventually(lambda: len(server.asked) > asked + 4)
        if complaint:
            await eventually(lambda: any(complaint in r.problem for r in watched.reports))
        assert all("\n" not in r.problem and len(r.problem) < 500 for r in watched.reports)
        assert set(watched.names) == {"10.0.0.1:8000"}
        server.code, server.garbage, server.watch_garbage = 200, b"", b""
        server.put(pod("d2", "10.0.0.2"), is_told=False)
        await watched.lists("10.0.0.1", "10.0.0.2")


async def test_an_endless_list_is_rejected(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = {"metadata": {"resourceVersion": "1", "continue": "again"}, "items": []}
    server.garbage = json.dumps(endless).encode()
    monkeypatch.setattr(pod_api, "MAX_PAGES", 5)
    async with watching(server, tmp_path) as watched:
        await eventually(lambda: "more than 500 pods" in watched.problem)
        monkeypatch.setattr(pod_api, "MAX_PAGE_BYTES", 10)
        await eventually(lambda: "too long" in watched.problem)


async def test_a_silent_server_times_out(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_api, "API_TIMEOUT_S", 0.1)
    server.is_mute = True
    async with watching(server, tmp_path) as watched:
        await eventually(lambda: "no list of pods within 0.1 s" in watched.problem)
        server.is_mute = False
        server.put(pod("d1"))
        await watched.lists("10.0.0.1")


async def test_a_token_that_was_replaced_is_read_again(server: ApiServer, tmp_path: Path) -> None:
    server.put(pod("d1"))
    async with watching(server, tmp_path, life=1, min_watch=0) as watched:
        await watched.lists("10.0.0.1")
        server.token = "newer"
        await eventually(lambda: "returned 401" in watched.problem)
        watched.token.write_text("newer")
        server.put(pod("d2", "10.0.0.2"), is_told=False)
        await watched.lists("10.0.0.1", "10.0.0.2")


async def test_invalid_pods_are_reported_beside_valid_ones(
    server: ApiServer, tmp_path: Path
) -> None:
    server.put(pod("d0"))
    for number in range(5):
        wrong = {"disagg-router.io/weight": "heavy"}
        server.put(pod(f"x{number}", f"10.0.1.{number}", annotations=wrong))
    async with watching(server, tmp_path) as watched:
        await eventually(lambda: watched.reports)
        assert set(watched.names) == {"10.0.0.1:8000"}
        assert watched.problem.count("weight") == 3
        assert watched.problem.endswith("and 2 more")
        await eventually(lambda: server.watching)
        for number in range(5):
            server.delete(f"x{number}")
        await watched.lists("10.0.0.1")


async def test_a_source_can_be_watched_again(server: ApiServer, tmp_path: Path) -> None:
    server.put(pod("d1"))
    async with watching(server, tmp_path) as watched:
        await watched.lists("10.0.0.1")
    async with contextlib.aclosing(watched.source.watch()) as reports:
        report = await asyncio.wait_for(anext(reports), 5)
    assert report.problem == ""
    assert report.listed


@pytest.mark.parametrize(
    "content", ["", "{}", "clusters: 7", "[", "current-context: x\nclusters: []\ncontexts: []"]
)
def test_a_kubeconfig_that_cannot_be_used_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    for given in (path, tmp_path / "missing"):
        with pytest.raises(SettingsError) as refused:
            PodApi(given, None, "a=b")
        (line,) = refused.value.problems
        assert line.startswith("--kubernetes-config: ")
        assert "\n" not in line


def test_lines_are_complete_however_they_are_cut() -> None:
    text = b'{"a": 1}\n\n{"b": 2}\r\n{"c'
    for size in (1, 3, 100):
        lines = LineSplitter()
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        found = [line for piece in pieces for line in lines.feed(piece)]
        assert found == [b'{"a": 1}', b'{"b": 2}\r']
    with pytest.raises(SourceError):
        LineSplitter().feed(b"x" * (pod_api.MAX_WATCH_EVENT_BYTES + 1))
