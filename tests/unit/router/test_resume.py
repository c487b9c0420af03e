"""A decoder dies, freezes or is stopped in mid-stream, and another one goes on."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine_ext.common.resume_payload import decode_token_ids, encode_token_ids, token_id_comment
from router.auth.api_keys import digest_of
from router.fleet import probes
from router.http_client.answer_limits import MemoryBudget
from router.http_client.sse import MAX_EVENT_BYTES
from router.proxy import resume_buffer as resume_module
from router.proxy.kv_params import KvParams
from router.proxy.resume_buffer import ResumeBuffer
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, Script, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answer_after, fails, refuses, usual_decode
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import PARAMS, running_engine

RENDERS = {"model": "1", "tokenizer": "2", "chat_template": "3"}
CAPABILITIES = ["prefix_proof", "turns", "release", "hand_over", "begun", "tell_token_ids"]
OURS = {"capabilities": CAPABILITIES, "renders": RENDERS}
PROVEN = PARAMS | {"prefix_proof": {"version": 1}}
PROMPT = [1, 2, 70_000]
# The whole answer: one token a word.
WORDS = ["one ", "two ", "three ", "four ", "five"]
LAST = "stop"


def word_event(request: Received, number: int, finish: str | None = None) -> bytes:
    """The event that says the word of that number, which is its token, too."""
    content = {
        "id": f"cmpl-{request.header('x-request-id')}",
        "object": "text_completion",
        "created": 100 + request.connection,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": WORDS[number],
                "finish_reason": finish,
                "stop_reason": None,
            }
        ],
    }
    if request.json.get("stream_options", {}).get("continuous_usage_stats"):
        content["usage"] = {"prompt_tokens": 3, "completion_tokens": 100 * (number + 1)}
    asked = request.json.get("kv_transfer_params", {}).get("tell_token_ids")
    names_prompt = asked == "all" and number == 0
    comments = token_id_comment([number], PROMPT if names_prompt else ()) if asked else ""
    return f"{comments}data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


async def from_the_beginning_to(last: int, request: Received, peer: Peer) -> None:
    """Where the request says it begins, up to that word."""
    begun = request.json.get("kv_transfer_params", {}).get("begun", {})
    first = begun.get("spoken", 0)
    ids = decode_token_ids(begun.get("output_token_ids", ""))
    assert ids == tuple(range(len(ids)))
    assert not ids or list(decode_token_ids(begun["prompt_token_ids"])) == PROMPT
    await peer.send(STREAM_HEAD)
    for number in range(first, last):
        finish = LAST if number == len(WORDS) - 1 else None
        await peer.send(chunk(word_event(request, number, finish)))


async def to_the_end(request: Received, peer: Peer) -> None:
    if not request.json.get("stream"):
        return await usual_decode(request, peer)
    await from_the_beginning_to(len(WORDS), request, peer)
    await peer.send(chunk(DONE) + b"0\r\n\r\n")


def dies_after(number: int, how: str = "reset") -> Script:
    async def script(request: Received, peer: Peer) -> None:
        await from_the_beginning_to(number, request, peer)
        if how == "half":  # an event's first bytes, which no client may see
            await peer.send(chunk(word_event(request, number)[:-9]))
        if how == "error":
            await peer.send(chunk(b'data: {"error": {"message": "no KV"}}\n\n' + DONE))
        if how == "abort":
            await peer.send(chunk(word_event(request, number, "abort") + DONE))
        if how == "finish":  # its end was on its way
            await peer.send(chunk(word_event(request, number, LAST)))
        if how == "large":
            await peer.send(chunk(b"data: " + b"x" * MAX_EVENT_BYTES))
        if how in ("error", "abort", "ends"):
            await peer.send(b"0\r\n\r\n")
        elif how in ("frozen", "large"):
            await peer.wait_left()
        else:
            peer.reset()

    return script


async def computes(request: Received, peer: Peer) -> None:
    params = request.json["kv_transfer_params"]
    begun = {
        "prompt_token_ids": encode_token_ids(PROMPT),
        "output_token_ids": encode_token_ids([0]),
    }
    handed = {"begun": begun} if params.get("hand_over") else {}
    choice = {"index": 0, "text": WORDS[0], "finish_reason": "length"}
    content = {"object": "text_completion", "choices": [choice]}
    await peer.answer(content | {"kv_transfer_params": PROVEN | handed})


@pytest.fixture
async def d2() -> AsyncIterator[MockEngine]:
    async with running_engine(to_the_end) as engine:
        engine.identity = OURS
        yield engine


@pytest.fixture
def start_router(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> StartRouter:
    p.identity, d.identity, d2.identity = p.identity or OURS, d.identity or OURS, OURS
    p.usual, d.usual = computes, to_the_end

    return functools.partial(start_router, ds=[d, d2], identified=True)


def texts_of(answer: str) -> list[str]:
    events = [event.removeprefix("data: ") for event in answer.strip().split("\n\n")]
    assert events[-1] == "[DONE]", answer
    contents = [json.loads(event) for event in events[:-1]]
    assert len({content["id"] for content in contents}) == 1, answer
    assert len({content["created"] for content in contents}) == 1, answer
    finishes = [content["choices"][0]["finish_reason"] for content in contents]
    assert finishes == [None] * (len(contents) - 1) + [LAST], answer
    return [content["choices"][0]["text"] for content in contents]


def error_in(answer: str) -> dict[str, Any]:
    """That the stream ends with."""
    last = answer.strip().split("\n\n")[-1]
    error: dict[str, Any] = json.loads(last.removeprefix("data: "))["error"]
    return error


def legs(*engines: MockEngine) -> list[Received]:
    return [one for engine in engines for one in engine.requests if one.path.startswith("/v1/")]


KINDS = ("broken_answer", "status_5xx")
HOWS = ["reset", "half", "error", "abort", "ends", "frozen", "large"]


@pytest.mark.parametrize("conversation", [{}, {"conversation_id": "c"}])
async def test_tokens_of_a_stream_are_counted_by_their_ids(
    start_router: StartRouter, d: MockEngine, conversation: dict[str, str]
) -> None:
    """Also those that another decoder sends."""
    d.scripts = [dies_after(3)]
    router = await start_router(ui=True)
    answer = await router.stream(**conversation)
    await router.settled()
    assert texts_of(answer.text) == WORDS
    hub = router.state.dashboard
    assert hub is not None
    known = hub.source.find(answer.headers["x-request-id"])
    assert known is not None
    assert (known.completion_tokens, known.counted) == (len(WORDS), "token ids")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("number", [1, 3])
async def test_another_decoder_goes_on(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    d2: MockEngine,
    number: int,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="disagg_router.access")
    router = await start_router(stream_idle_timeout=0.5 if how == "frozen" else 60)
    d.scripts = d2.scripts = [dies_after(number, how)]  # whoever is asked first
    answer = await router.stream(seed=3)
    assert answer.status_code == 200
    assert texts_of(answer.text) == WORDS
    assert "token_ids" not in answer.text
    _, again = legs(p)
    assert again.json["max_tokens"] == number + 1
    assert again.json["seed"] == 3
    begun = {
        "prompt_token_ids": encode_token_ids(PROMPT),
        "output_token_ids": encode_token_ids(list(range(number))),
        "spoken": number,
    }
    assert again.json["kv_transfer_params"]["begun"] == begun
    assert again.json["kv_transfer_params"]["do_remote_decode"] is True
    second = next(one for one in legs(d, d2) if "spoken" in one.json["kv_transfer_params"]["begun"])
    assert second.json["kv_transfer_params"]["begun"] == begun
    assert second.json["kv_transfer_params"]["remote_host"] == PARAMS["remote_host"]
    assert second.json["max_tokens"] == 7
    broken = dict.fromkeys(("reset", "half", "large"), "broken_answer")
    kind = {"frozen": "timeout", **broken}.get(how)
    assert router.metric("resumes_total", kind=kind or "status_5xx", outcome="resumed") == 1
    assert router.metric("requests_total", **_ended(router)) == 1
    assert router.gateway.memory.resume_buffers.size == 0
    router.gateway.records.flush()
    (line,) = (line for one in caplog.records for line in getattr(one, "lines", []))
    assert line.content()["retries"] == line.content()["resumes"] == 1
    assert "resumed once" in line.short()


async def test_a_request_that_is_wrong_is_refused_once(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    """In mid-stream, too: every engine would refuse it, and none is at fault."""
    router, is_seen = await start_router(), asyncio.Event()

    async def refuses_midway(request: Received, peer: Peer) -> None:
        await from_the_beginning_to(2, request, peer)
        await is_seen.wait()
        wrong = {"message": "no such grammar", "type": "BadRequestError", "code": 400}
        await peer.send(chunk(b"data: " + json.dumps({"error": wrong}).encode() + b"\n\n" + DONE))
        await peer.send(b"0\r\n\r\n")

    d.usual = d2.usual = refuses_midway
    body = {"model": "m", "prompt": "a", "max_tokens": 7, "stream": True}
    seen = ""
    async with router.client.stream("POST", "/v1/completions", json=body) as answer:
        async for text in answer.aiter_text():
            seen += text
            is_seen.set()
    assert error_in(seen)["message"] == "the decode engine ended the answer: no such grammar"
    assert len(legs(d, d2)) == 1
    await router.settled()
    assert router.engine(d).breaker.failures == router.engine(d2).breaker.failures == 0


async def test_a_load_that_fails_behind_the_first_token_speaks_against_the_pair(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    """A decoder that goes on from a prefiller's token says that before it has loaded anything."""
    failure = {"scope": "pair", "reason": "no handshake"}
    error = {"error": {"message": "not loaded", "kv_load_failure": failure}}

    async def fails_to_load(request: Received, peer: Peer) -> None:
        await from_the_beginning_to(1, request, peer)
        await peer.send(chunk(b"data: " + json.dumps(error).encode() + b"\n\n" + DONE))
        await peer.send(b"0\r\n\r\n")

    names = [*CAPABILITIES, "load_failures"]
    d.identity = OURS | {"capabilities": names}
    router = await start_router(decode_policy="round_robin")
    d.usual = fails_to_load
    for _ in range(4):
        answer = await router.stream()
        assert texts_of(answer.text) == WORDS
        assert "kv_load_failure" not in answer.text
    assert len(legs(d)) == 1
    engine = router.engine(d)
    labels = {"prefiller": router.engine(p).name, "decoder": engine.name}
    assert router.metric("pair_avoided", **labels) == 1
    assert router.metric("upstream_errors_total", role="decode", kind="kv_load") == 1
    assert router.metric("upstream_errors_total", role="decode", kind="status_5xx") == 0


def _ended(router: Router) -> dict[str, str]:
    return {"endpoint": "/v1/completions", "flow": "pull", "status": "200", "outcome": "ok"}


@pytest.mark.parametrize("flow", ["alone", "push", "first", "turn"])
async def test_in_every_plan(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine, flow: str
) -> None:
    plans: dict[str, dict[str, Any]] = {
        "alone": {"min_remote_prefill_tokens": 1000},
        "push": {"transfer_mode": "push"},
        "first": {"decode_first_threshold": 0.5},
        "turn": {"conversation_store": "memory"},
    }
    fields = {"conversation_id": "c"} if flow == "turn" else {}
    if flow == "push":
        rank = {"remote_engine_id": "e", "remote_host": "h", "remote_port": 1}
        p.identity = d.identity = OURS | {"transfer_modes": ["push"], "ranks": [rank]}
    router = await start_router(**plans[flow])
    d.scripts = d2.scripts = [dies_after(2)]
    assert texts_of((await router.stream(**fields)).text) == WORDS
    begun = [one.json["kv_transfer_params"].get("begun", {}) for one in legs(d, d2)]
    assert [one.get("spoken") for one in begun if "spoken" in one] == [2]


async def test_what_is_computed_for_a_move_is_held_until_it_is_read(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    """Whether or not the decoder that failed had read some."""
    router, goes_on = await start_router(min_remote_prefill_tokens=1000), asyncio.Event()
    scripts = iter([dies_after(2), answer_after(goes_on, to_the_end)])
    d.usual = d2.usual = lambda request, peer: next(scripts)(request, peer)
    asking = asyncio.create_task(router.stream())
    await eventually(lambda: len(legs(d, d2)) == 2)
    assert router.engine(p).kv_leases == 1
    goes_on.set()
    await asking
    await router.settled()
    assert router.engine(p).kv_leases == 0


async def test_no_prefiller_is_needed(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(health_interval=60)

    async def last_words(request: Received, peer: Peer) -> None:
        await p.stop()
        await dies_after(2)(request, peer)

    d.scripts = d2.scripts = [last_words]
    assert texts_of((await router.stream()).text) == WORDS
    (second,) = [one for one in legs(d, d2) if '"spoken"' in one.body.decode()]
    assert "remote_host" not in second.json["kv_transfer_params"]


async def test_again_and_again_but_not_for_ever(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    async with running_engine(to_the_end) as d3, running_engine(to_the_end) as d4:
        d3.identity = d4.identity = OURS
        router = await start_router(ds=[d, d2, d3, d4])
        deaths = [dies_after(1), dies_after(3), dies_after(4)]
        d.scripts = d2.scripts = d3.scripts = d4.scripts = deaths[:2]
        assert texts_of((await router.stream()).text) == WORDS
        d.scripts = d2.scripts = d3.scripts = d4.scripts = deaths
        answer = await router.stream()
        assert error_in(answer.text)["code"] == 502
        assert answer.text.count('"text"') == 4
        outcomes = {"kind": "broken_answer"}
        assert router.metric("resumes_total", outcome="resumed", **outcomes) == 4
        assert router.metric("resumes_total", outcome="given_up", **outcomes) == 1
        assert router.gateway.memory.resume_buffers.size == 0


async def test_only_who_goes_on_is_counted(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    async with running_engine(to_the_end) as d3:
        d3.identity = OURS
        router = await start_router(ds=[d, d2, d3])
        d.scripts = d2.scripts = d3.scripts = [dies_after(2), fails]
        assert texts_of((await router.stream()).text) == WORDS
        outcomes = [router.metric("resumes_total", kind=kind, outcome="resumed") for kind in KINDS]
        assert sum(outcomes) == 1


async def test_what_was_computed_for_a_move_that_fails_is_given_back(
    router: Router, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    d.scripts = d2.scripts = [dies_after(2), fails]
    p.scripts = [computes, computes]
    assert error_in((await router.stream()).text)["code"] == 502
    await router.settled()
    # Of what was computed for each move, and not of what the first decoder has read.
    paths = [one.path for one in p.requests]
    assert (paths.count("/v1/completions"), paths.count("/disagg/release")) == (3, 2)


@pytest.mark.parametrize(("said", "released"), [(1, 1), (2, 0)])
async def test_a_token_that_was_handed_over_shows_no_reading(
    router: Router, p: MockEngine, d: MockEngine, d2: MockEngine, said: int, released: int
) -> None:
    """A decoder says it before it has any of the blocks."""
    d.scripts = d2.scripts = [dies_after(said)]
    assert texts_of((await router.stream()).text) == WORDS
    await router.settled()
    paths = [one.path for one in p.requests]
    assert (paths.count("/v1/completions"), paths.count("/disagg/release")) == (2, released)


async def test_what_was_computed_for_a_move_to_nobody_is_given_back(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_router(ds=[d])
    d.scripts = [dies_after(2)]
    p.scripts = [computes, computes]
    assert error_in((await router.stream()).text)["code"] in (502, 503)
    await router.settled()
    paths = [one.path for one in p.requests]
    assert (paths.count("/v1/completions"), paths.count("/disagg/release")) == (2, 1)
    counts = router.gateway.metrics.resumes.counts()
    assert counts == {("broken_answer", "given_up"): 1}


async def test_engines_that_tell_not_what_they_render_are_like_nobody(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    untold = {"capabilities": CAPABILITIES}
    async with running_engine(to_the_end) as other:
        d.identity = other.identity = untold
        router = await start_router(ds=[d, other])
        d.scripts = other.scripts = [dies_after(2)]
        assert error_in((await router.stream()).text)["code"] == 502


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_who_is_to_go_on_may_refuse(
    router: Router, p: MockEngine, d: MockEngine, d2: MockEngine, role: str
) -> None:
    d.scripts = d2.scripts = [dies_after(2)]
    if role == "prefill":
        p.scripts = [computes, refuses]
    else:
        d.scripts.append(refuses)
    answer = await router.stream()
    assert error_in(answer.text)["code"] == 502
    assert answer.text.count('"text"') == 2
    assert router.metric("resumes_total", kind="status_400", outcome="refused") == 1


async def test_streams_of_a_decoder_that_is_taken_away_move(
    router: Router, d: MockEngine, d2: MockEngine
) -> None:
    """As its drain's deadline does."""
    d.scripts = d2.scripts = [dies_after(2, "frozen")]
    asking = asyncio.create_task(router.stream())
    await eventually(lambda: router.gateway.memory.resume_buffers.size > 4 * len(PROMPT) + 4)
    first = next(one for one in (d, d2) if legs(one))
    router.gateway.fleet.remove(router.engine(first).name)
    assert texts_of((await asking).text) == WORDS
    assert router.metric("resumes_total", kind="engine_lost", outcome="resumed") == 1


async def test_a_decoder_that_has_left_and_says_nothing_loses_its_streams_soon(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's server without its core."""
    monkeypatch.setattr(probes, "STREAM_GRACE_S", 0.3)
    router = await start_router()
    d.scripts = d2.scripts = [dies_after(2, "frozen")]
    asking = asyncio.create_task(router.stream())
    await eventually(lambda: router.gateway.memory.resume_buffers.size > 4 * len(PROMPT) + 4)
    first = next(one for one in (d, d2) if legs(one))
    first.stop_listening()
    assert texts_of((await asking).text) == WORDS
    assert router.metric("resumes_total", kind="engine_lost", outcome="resumed") == 1


async def test_a_prefiller_that_fails_does_not_end_the_only_move(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(max_resumes=1)
    p.scripts, d.scripts = [computes, fails], [dies_after(2)]
    d2.scripts = d.scripts
    assert texts_of((await router.stream()).text) == WORDS
    second = next(one for one in legs(d, d2) if b'"spoken"' in one.body)
    assert "remote_host" not in second.json["kv_transfer_params"]


async def test_an_end_that_was_on_its_way_comes_once(
    router: Router, d: MockEngine, d2: MockEngine
) -> None:
    d.scripts = d2.scripts = [dies_after(4, "finish")]
    assert texts_of((await router.stream()).text) == WORDS


@pytest.mark.parametrize(
    "changes",
    [
        {"max_resumes": 0},
        {"max_resume_memory": 10},
        {"of_others": CAPABILITIES[:-1]},
        {"of_others": CAPABILITIES[:-2]},
        {"renders": RENDERS | {"model": "9"}},
    ],
)
async def test_where_nobody_can_go_on_the_stream_ends_with_an_error(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, changes: dict[str, Any]
) -> None:
    token_id_comment = OURS | {"capabilities": changes.get("of_others", CAPABILITIES)}
    limits = {name: value for name, value in changes.items() if name.startswith("max")}
    async with running_engine(to_the_end) as other:
        other.identity = token_id_comment | {"renders": changes.get("renders", RENDERS)}
        d.identity = token_id_comment
        router = await start_router(ds=[d, other], **limits)
        d.scripts = other.scripts = [dies_after(2)]
        answer = await router.stream()
        assert error_in(answer.text)["code"] == 502
        assert answer.text.count('"text"') == 2
        assert router.gateway.memory.resume_buffers.size == 0


@pytest.mark.parametrize("fields", [{"n": 2}, {"suffix": "x"}, {"stream": False}])
async def test_of_some_requests_nothing_is_asked(
    router: Router, d: MockEngine, d2: MockEngine, fields: dict[str, Any]
) -> None:
    answer = await router.complete(**({"stream": True} | fields))
    assert answer.status_code == 200
    assert all(b"tell_token_ids" not in one.body for one in legs(d, d2))


async def test_a_client_that_leaves_leaves_nothing(
    router: Router, d: MockEngine, d2: MockEngine
) -> None:
    d.scripts = d2.scripts = [dies_after(2, "frozen")]
    body = json.dumps({"model": "m", "prompt": "x", "stream": True}).encode()
    async with router.socket() as client:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        await client.send(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await eventually(lambda: router.gateway.memory.resume_buffers.size > 0)
    await eventually(lambda: router.gateway.memory.resume_buffers.size == 0)
    assert (await router.stream()).status_code == 200


async def test_many_at_once_are_each_their_own(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    """A third of them lose a decoder, none of them two."""
    left = [dies_after(1 + i % 4) for i in range(10)]

    async def dies_at_most_once(request: Received, peer: Peer) -> None:
        begun = request.json.get("kv_transfer_params", {}).get("begun", {})
        script = left.pop() if left and not begun.get("spoken") else to_the_end
        await script(request, peer)

    router = await start_router()
    d.usual = d2.usual = dies_at_most_once
    answers = await asyncio.gather(*(router.stream() for _ in range(30)))
    assert all(texts_of(answer.text) == WORDS for answer in answers)
    assert not left
    assert router.gateway.memory.resume_buffers.size == 0


# The resume buffer by itself.


def event(text: bytes, ids: str = "") -> bytes:
    comment = f": token_ids {ids}\n".encode() if ids else b""
    return comment + b'data: {"id":"a","created":1,"t":"%s"}\n\n' % text


FINISH = b'data: {"id":"a","created":1,"finish_reason":"stop"}\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_however_it_is_cut_into_blocks(size: int) -> None:
    """Blocks are whole events, some at once."""
    buffer = ResumeBuffer(MemoryBudget(0), {}, 2)
    events = [event(b"x", "AQAA"), event(b"y", "AgAAAwAA"), event(b"z"), FINISH + DONE]
    buffer.start_leg(None)
    passed = b""
    for at in range(0, 4, size):
        passed += buffer.passing(b"".join(events[at : at + size]), at + size >= 4)
    assert passed + buffer.last == event(b"x") + event(b"y") + event(b"z") + FINISH + DONE
    assert buffer.num_tokens == 3
    assert not buffer.is_cut


def test_what_waits_behind_a_finish_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_module, "MAX_ENDING_BYTES", 1000)
    buffer = ResumeBuffer(MemoryBudget(0), {}, 2)
    buffer.start_leg(None)
    more = event(b"x" * 600)
    assert buffer.passing(event(b"y", "AQAA") + FINISH + more, False) == event(b"y")
    assert buffer.passing(more, False) == FINISH + more + more
    assert not buffer.can_resume


def test_what_waits_behind_a_finish_takes_room() -> None:
    room = MemoryBudget(1000)
    buffer = ResumeBuffer(room, {}, 2)
    buffer.start_leg(None)
    buffer.passing(event(b"y", "AQAA") + FINISH, False)
    assert room.size == 4 + len(FINISH)
    more = event(b"x" * 990)
    assert buffer.passing(more, False) == FINISH + more
    assert not buffer.can_resume
    assert room.size == 4
    buffer.start_leg(None)
    buffer.passing(FINISH, False)
    buffer.close()
    assert room.size == 0


def test_what_looks_like_a_comment_inside_a_text_is_text() -> None:
    buffer = ResumeBuffer(MemoryBudget(0), {}, 2)
    buffer.start_leg(None)
    block = event(rb"\n: token_ids AQAA\n\"finish_reason\":\"stop\"", "AQAA")
    assert buffer.passing(block, False) == event(rb"\n: token_ids AQAA\n\"finish_reason\":\"stop\"")
    assert buffer.num_tokens == 1


def test_there_is_room_for_so_many() -> None:
    room = MemoryBudget(16)
    one, other = ResumeBuffer(room, {}, 2), ResumeBuffer(room, {}, 2)
    for buffer in (one, other):
        buffer.keep_prompt(KvParams(b'{"begun":{"prompt_token_ids": "AQAA"}}'))
        buffer.start_leg(None)
        buffer.passing(event(b"x", "AQAA"), False)
        assert buffer.can_resume
    one.passing(event(b"x", "AQAA"), False)
    assert one.is_full
    assert not one.can_resume
    other.close()
    one.passing(event(b"x", "AQAA"), False)
    assert not one.can_resume  # it lacks one in the middle
    one.close()
    assert room.size == 0


async def test_stream_with_an_unreadable_event_is_not_resumed_behind_it(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    """The router has the ids of the event's tokens, and the client of a dialect has no text."""
    is_seen = asyncio.Event()

    async def breaks(request: Received, peer: Peer) -> None:
        first = {"choices": [{"index": 0, "delta": {"content": "one "}}]}
        comment = token_id_comment([0], PROMPT)
        await peer.send(STREAM_HEAD + chunk(f"{comment}data: {json.dumps(first)}\n\n".encode()))
        await is_seen.wait()
        await peer.send(chunk(f"{token_id_comment([1])}data: two\n\n".encode()))
        await peer.wait_left()

    router = await start_router()
    d.usual = d2.usual = breaks
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    seen = ""
    async with router.client.stream("POST", "/v1/messages", json={**body, "stream": True}) as got:
        async for text in got.aiter_text():
            seen += text
            if "one " in seen:
                is_seen.set()
    assert "event: error" in seen
    assert "message_stop" not in seen
    assert len([leg for leg in (*d.requests, *d2.requests) if leg.json.get("stream")]) == 1


async def test_resumed_stream_is_charged_for_the_tokens_of_both_engines(
    start_router: StartRouter, d: MockEngine, tmp_path: Path
) -> None:
    key = "sk-disagg-one"
    entry = {"name": "one", "sha256": digest_of(key.encode()).hex(), "tokens_per_minute": 600}
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": [entry]}))
    router = await start_router(api_keys_file=keys)
    d.usual = dies_after(3)
    left = []
    for prompt in ("hi", "ho"):
        body = {"model": "m", "prompt": prompt, "stream": True}
        headers = {"authorization": f"Bearer {key}"}
        answer = await router.client.post("/v1/completions", json=body, headers=headers)
        assert texts_of(answer.text) == WORDS
        assert "usage" not in answer.text
        await router.settled()
        left.append(int(answer.headers["x-ratelimit-remaining-tokens"]))
        d.usual = to_the_end
    assert left[0] > 550
    assert left[1] < 400, "a word is 100 tokens"
