"""disagg-router why, and the router's memory of its last requests."""

import asyncio
import json
from typing import Any

import pytest

from router.commands.cli import main
from router.commands.why import TOKEN, story
from router.telemetry.record import Record
from router.ui.live_requests import MAX_RECENT, MAX_RECENT_SHOWN, RecentRequests, RequestFeed
from scripts.mock_engine import MockEngine
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import fails
from tests.unit.router.harness import Router

REQUEST: dict[str, Any] = {
    "id": "chatcmpl-1", "at": 1_700_000_000.0, "endpoint": "/v1/chat/completions", "flow": "turn",
    "outcome": "ok", "status": 200, "prefiller": "p:1", "decoder": "d:2", "model": "m",
    "retries": 1, "conversation": "hit", "reused_from": "d:2",
    "ms": {"queued": 1.0, "admitted": 6.0, "prefill_started": 6.0, "prefill_done": 106.0,
           "decode_started": 106.0, "first_byte": 126.0, "ended": 326.0},
    "prompt_tokens": 780, "completion_tokens": 11, "cached_tokens": 736,
    "failures": ["prefill at p:0 failed: refused; the next prefill engine is asked"], "error": "",
}  # fmt: skip


def test_the_story_has_each_phase_with_its_duration() -> None:
    lines = list(story(REQUEST))
    assert [line.strip() for line in lines if " ms  " in line] == [
        "1.0 ms  waited for a slot at an engine: 5.0 ms",
        "6.0 ms  prefill on p:1: 100.0 ms",
        "106.0 ms  decode on d:2, until its first byte: 20.0 ms",
        "126.0 ms  rest of the answer: 200.0 ms",
        "326.0 ms  ended",
    ]
    text = "\n".join(lines)
    for part in ("780 tokens, 736 of them from a cache", "11 tokens, one in 20.0 ms",
                 "hit, KV from d:2", "failed: prefill at p:0", "retries: 1"):  # fmt: skip
        assert part in text


def test_the_story_has_what_was_borrowed_from_another_cache() -> None:
    borrowed = {"borrowed_from": "p:3", "borrowed_tokens": 4096}
    text = "\n".join(story(REQUEST | borrowed))
    assert "borrowed: 4096 tokens from the prefix cache of p:3" in text
    assert "borrowed" not in "\n".join(story(REQUEST))


def test_the_story_names_what_a_client_changed_at_the_head_of_the_last_answer() -> None:
    text = "\n".join(story(REQUEST | {"answer_change": "line_break"}))
    assert "parts at the head of the last answer: its client put a line break" in text
    assert "parts" not in "\n".join(story(REQUEST))


def test_a_resumed_answer_has_its_phases_in_order() -> None:
    moments = {"queued": None, "admitted": None, "prefill_started": 2138.0, "prefill_done": 2242.5,
               "decode_started": 2242.7, "first_byte": 7.9, "ended": 8735.3}  # fmt: skip
    lines = [line.strip() for line in story(REQUEST | {"ms": moments}) if " ms  " in line]
    assert lines == [
        "7.9 ms  first part of the answer, from another engine: 2,130.1 ms",
        "2,138.0 ms  prefill on p:1: 104.5 ms",
        "2,242.7 ms  decode on d:2, the rest of the answer: 6,492.6 ms",
        "8,735.3 ms  ended",
    ]


def test_an_answer_that_comes_as_a_whole_has_no_pace() -> None:
    moments = REQUEST["ms"] | {"first_byte": 325.7}
    assert "one in" not in "\n".join(story(REQUEST | {"ms": moments}))


def test_a_running_request_is_a_story_without_an_end() -> None:
    moments = REQUEST["ms"] | {"first_byte": None, "ended": None}
    text = "\n".join(story(REQUEST | {"ms": moments, "outcome": "running", "status": 0}))
    assert "decode on d:2, until its first byte: still running" in text
    assert "no status yet" in text


def test_recent_requests_are_bounded_and_found_by_their_id() -> None:
    recent = RecentRequests()
    records = [Record("/x", float(n), f"id-{n}", transfer_params=b"x") for n in range(1500)]
    recent.add_records(records[:1000])
    recent.add_records(records[1000:])
    assert recent.find(f"id-{1500 - MAX_RECENT - 1}") is None
    assert recent.find(f"id-{1500 - MAX_RECENT}") is records[-MAX_RECENT]
    assert not records[-1].transfer_params
    feed = RequestFeed(recent.latest())
    assert feed.take(0.0) == (records[-MAX_RECENT_SHOWN:], 0)


async def test_why_tells_of_a_request_that_ended_before_anybody_looked(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = await start_router(ui=True, ui_token="a-token-of-16-bytes")
    d.scripts = [fails]
    answer = await router.complete()
    request_id = answer.headers["x-request-id"]
    monkeypatch.setenv(TOKEN, "a-token-of-16-bytes")
    for answer_id in (f"chatcmpl-{request_id}", f"cmpl-{request_id}.x7"):
        assert await asyncio.to_thread(main, ["why", answer_id, router.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["id"] == request_id
    command = ["why", request_id, router.url]
    assert await asyncio.to_thread(main, [*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["id"], found["flow"]) == (request_id, "pull")
    assert found["failures"]
    assert await asyncio.to_thread(main, command) == 0
    shown = capsys.readouterr().out
    assert f"prefill on 127.0.0.1:{p.port}" in shown
    assert f"decode on 127.0.0.1:{d.port}" in shown
    assert router.state.dashboard is not None
    with router.state.dashboard.source.reading() as take_snapshot:
        assert request_id in [one.id for one in take_snapshot().ended]

    monkeypatch.setenv(TOKEN, "another-token")
    assert await asyncio.to_thread(main, command) == 1
    assert "token" in capsys.readouterr().err
    monkeypatch.setenv(TOKEN, "a-token-of-16-bytes")
    assert await asyncio.to_thread(main, ["why", "unknown", router.url]) == 1
    assert "no request 'unknown' among the last 1000 that ended" in capsys.readouterr().err


async def test_why_names_the_part_in_which_two_prompts_part(
    start_router: StartRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent writes the folder of its project into a system prompt, and has too many tools."""
    router = await start_router(ui=True, prefill_policy="prefix")

    async def ask(folder: str, *more: str, **fields: Any) -> str:
        system = f"{'Be careful. ' * 270}Folder: {folder}. {'Use the tools. ' * 3000}"
        messages = [{"role": "system", "content": system}]
        messages += [{"role": "user", "content": one} for one in ("x" * 3000, *more)]
        answer = await router.client.post(
            "/v1/chat/completions", json={"model": "m", "messages": messages} | fields
        )
        command = ["why", answer.headers["x-request-id"], router.url]
        assert await asyncio.to_thread(main, command) == 0
        shown = capsys.readouterr().out
        return "".join(line for line in shown.splitlines() if "the prompt parts" in line)

    parts = "  the prompt parts from earlier ones in "
    assert await ask("/src/one") == ""
    assert await ask("/src/one") == "", "the same prompt"
    shown = await ask("/src/other")
    assert shown == parts + "the system prompt, after 768 to 1,024 of about 12,823 tokens"
    assert "message 3 of 3, after 12,800 to 13,056 of" in await ask("/src/one", "y" * 3000)
    assert await ask("/src/one", tools=[{"name": "z"}]) == "", "nothing known begins with tools"


async def test_why_says_that_the_router_keeps_no_requests(
    router: Router, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(main, ["why", "x", router.url]) == 1
    assert "start it with --ui" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["why", "a b"])
