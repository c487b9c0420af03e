"""Requests with the router's own API keys: authentication, ownership and limits."""

import asyncio
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from router.auth.api_keys import ApiKey, digest_of
from router.auth.authenticator import INCORRECT
from router.proxy.dispatch import serve
from router.server.app import build
from router.server.client_connection import ResponseWriter
from router.settings import SettingsError
from router.telemetry.logs import AccessLine
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.engines import decoding, prefilling
from tests.unit.router.engine_scripts import answering, hanging, streaming, usual_decode
from tests.unit.router.harness import (
    Router,
    eventually,
    post,
    running_router,
    settings_for,
    status_of,
)
from tests.unit.router.mock_engine import USUAL, event
from tests.unit.router.processes import serving_router

KEY, OTHER = "sk-disagg-one", "sk-disagg-other"
BEARER = {"authorization": f"Bearer {KEY}"}
BODY = {"model": "m", "prompt": "hello", "max_tokens": 7}

WriteKeys = Callable[..., Path]


def entry(name: str, key: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": digest_of(key.encode()).hex(), **more}


@pytest.fixture
def keys(tmp_path: Path) -> WriteKeys:
    def write(*entries: dict[str, Any]) -> Path:
        path = tmp_path / "keys.yaml"
        fresh = tmp_path / "fresh"
        fresh.write_text(json.dumps({"keys": list(entries)}))
        fresh.replace(path)
        return path

    return write


@pytest.fixture
async def keyed(start_router: StartRouter, keys: WriteKeys) -> Router:
    """A router that knows KEY alone."""
    return await start_router(api_keys_file=keys(entry("one", KEY)))


async def ask_as(router: Router, key: str | None = KEY, **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await router.client.post("/v1/completions", json=BODY | fields, headers=headers)


def check_unauthorized(answer: httpx.Response) -> None:
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


# Who may come in.


async def test_who_shows_a_key_is_let_in_and_nobody_else(keyed: Router, p: MockEngine) -> None:
    assert (await ask_as(keyed)).status_code == 200
    asked = len(p.requests)
    for wrong in (None, OTHER, "x", KEY + "x", KEY[:-1], KEY.upper(), "a" * 5000):
        answer = await ask_as(keyed, wrong)
        check_unauthorized(answer)
        if wrong:
            assert answer.json()["error"]["message"].startswith("Incorrect API key provided")
            assert wrong not in answer.text
    assert "didn't provide an API key" in (await ask_as(keyed, None)).text
    assert len(p.requests) == asked


@pytest.mark.parametrize("line", [b"POST /v1/completions", b"GET /v1/models"])
async def test_key_in_a_trailer_is_no_key(keyed: Router, line: bytes) -> None:
    head = line + b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
    trailer = b"0\r\nauthorization: Bearer %b\r\n\r\n" % KEY.encode()
    async with keyed.socket() as client:
        content = chunk(json.dumps(BODY).encode())
        await client.send(head + b"content-type: application/json\r\n\r\n" + content + trailer)
        assert status_of(await client.head()) == 401


@pytest.mark.parametrize(
    "lines",
    [
        f"authorization: Bearer {OTHER}\r\nauthorization: Bearer {KEY}\r\n",
        f"authorization: Bearer {KEY}\r\nauthorization: Bearer {KEY}\r\n",
        f"authorization: Bearer {OTHER}\r\nx-api-key: {KEY}\r\n",
        f"authorization: Bearer {KEY}, Bearer {OTHER}\r\n",
        f"authorization: Basic {KEY}\r\n",
        f"proxy-authorization: Bearer {KEY}\r\n",
        f"cookie: authorization=Bearer {KEY}\r\n",
        f"Authorization : Bearer {KEY}\r\n",
        "authorization: Bearer \x00\r\n",
        "authorization: Bearer \u00e9\u00ff\r\n",
        "authorization: Bearer\r\n",
    ],
)
async def test_what_is_not_clearly_a_key_is_none(keyed: Router, p: MockEngine, lines: str) -> None:
    async with keyed.socket() as client:
        body = json.dumps(BODY).encode()
        await client.send(post(body, headers=lines.encode("latin-1")))
        head = await client.head()
    assert head.split(b" ", 2)[1] in (b"400", b"401")
    assert not p.requests


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/completions?api-version=1",
        "/v1/completions/",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models?x=1",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/responses",
        "//v1/completions",
        "/V1/completions",
        "/v1/%63ompletions",
        "/health/../v1/models",
        "/ui-not",
        "/anything",
    ],
)
async def test_every_page_that_is_not_listed_as_open_wants_a_key(
    keyed: Router, p: MockEngine, path: str
) -> None:
    body = json.dumps(BODY).encode()
    for method in (b"POST", b"GET"):
        async with keyed.socket() as client:
            await client.send(post(body, path).replace(b"POST", method, 1))
            head = await client.head()
            assert head.split(b" ", 2)[1] == b"401", (method, head)
    assert not p.requests


@pytest.mark.parametrize(
    "path",
    ["/v1/messages", "/v1/messages?beta=true", "/v1/messages/count_tokens", "/v1/messages/x"],
)
@pytest.mark.parametrize("is_slow", [False, True])
async def test_unauthorized_requests_to_anthropics_api_get_anthropics_error_and_an_access_line(
    keyed: Router, path: str, is_slow: bool
) -> None:
    lines: list[str] = []
    keyed.gateway.records.add_reader(
        lambda ended: lines.extend(AccessLine(r, 0).json() for r in ended)
    )
    sent = post(json.dumps(BODY).encode(), path, b"x-api-key: %b\r\n" % OTHER.encode())
    async with keyed.socket() as client:
        await client.send(sent[:-1] if is_slow else sent)  # the key is wrong whatever follows
        head, body = await client.answer()
    assert head.split(b" ", 2)[1] == b"401"
    assert b"www-authenticate: bearer" in head.lower()
    error = {"type": "authentication_error", "message": "Incorrect API key provided."}
    assert json.loads(body) == {"type": "error", "error": error}
    if path != "/v1/messages/x":  # the application's requests have no access lines
        keyed.gateway.records.flush()
        (line,) = (json.loads("{" + line + "}") for line in lines)
        assert (line["endpoint"], line["status"]) == (path.partition("?")[0], 401)


@pytest.mark.parametrize("path", ["/v1/responses", "/tokenize"])
async def test_unauthorized_requests_to_other_apis_get_openais_error(
    keyed: Router, path: str
) -> None:
    check_unauthorized(await keyed.client.post(path, json=BODY))
    assert keyed.metric("unauthorized_total", reason="missing") == 1


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("key", [KEY, OTHER])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/messages", "/tokenize", "/v1/models", "/anything"]
)
async def test_api_key_is_looked_up_once_for_each_request(
    keyed: Router, monkeypatch: pytest.MonkeyPatch, path: str, key: str, is_slow: bool
) -> None:
    authenticator = keyed.gateway.authenticator
    assert authenticator is not None
    identify, lookups = authenticator.identify, 0

    def count(headers: Sequence[tuple[bytes, bytes]]) -> ApiKey | str:
        nonlocal lookups
        lookups += 1
        return identify(headers)

    monkeypatch.setattr(authenticator, "identify", count)
    sent = post(json.dumps(BODY).encode(), path, b"authorization: Bearer %b\r\n" % key.encode())
    async with keyed.socket() as client:
        if is_slow:
            await client.send(sent[:-1])
            await eventually(lambda: lookups)
            await client.send(sent[-1:])
        else:
            await client.send(sent)
        head = await client.head()
    assert (b" 401 " in head.split(b"\r\n")[0]) is (key == OTHER)
    assert lookups == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
async def test_key_that_is_revoked_before_the_body_has_arrived_is_refused(
    start_router: StartRouter, keys: WriteKeys, path: str
) -> None:
    file = keys(entry("one", KEY))
    router = await start_router(api_keys_file=file)
    authenticator = router.gateway.authenticator
    assert authenticator is not None
    credential = [(b"authorization", b"Bearer " + KEY.encode())]
    sent = post(json.dumps(BODY).encode(), path, b"authorization: Bearer %b\r\n" % KEY.encode())
    async with router.socket() as client:
        await client.send(sent[:-1])
        await eventually(lambda: router.metric("client_connections") == 1)
        keys(entry("two", OTHER))
        await eventually(lambda: authenticator.identify(credential) == INCORRECT)
        await client.send(sent[-1:])
        assert b" 401 " in (await client.head()).split(b"\r\n")[0]


async def test_application_refuses_requests_that_the_server_has_not_authenticated(
    keyed: Router,
) -> None:
    transport = httpx.ASGITransport(keyed.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        check_unauthorized(await client.get("/v1/models", headers=BEARER))
        assert (await client.get("/health", headers=BEARER)).status_code == 200


async def test_proxy_refuses_requests_that_the_server_has_not_authenticated(
    keyed: Router, p: MockEngine
) -> None:
    sent: list[bytes] = []
    connection: Any = SimpleNamespace(
        send=sent.append, common_lines=lambda writer: b"", finish_answer=lambda writer: None
    )
    headers = [(b"authorization", b"Bearer %b" % KEY.encode())]
    loop, body = asyncio.get_running_loop(), json.dumps(BODY).encode()
    writer = ResponseWriter(loop, connection, 0.0, "/v1/completions", headers, body)
    await serve(writer, keyed.gateway)
    assert sent[0].startswith(b"HTTP/1.1 401 ")
    assert not p.requests


async def test_what_machines_ask_stays_open(start_router: StartRouter, keys: WriteKeys) -> None:
    router = await start_router(api_keys_file=keys(entry("one", KEY)), ui=True)
    for path in ("/health", "/ready", "/metrics", "/version", "/", "/ui/"):
        assert (await router.client.get(path)).status_code == 200, path
    assert (await router.client.options("/v1/models")).status_code != 401


async def test_without_a_file_everybody_may_come_in_and_engines_see_what_clients_show(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    assert (await ask_as(router, "whatever")).status_code == 200
    assert p.last.header("authorization") == d.last.header("authorization") == "Bearer whatever"
    answer = await ask_as(router)
    assert not any(name.startswith("x-ratelimit") for name in answer.headers)


async def test_a_stranger_is_counted_and_its_key_is_nowhere(
    keyed: Router, caplog: pytest.LogCaptureFixture
) -> None:
    await ask_as(keyed, OTHER)
    await ask_as(keyed, None)
    await keyed.client.get("/v1/models")
    await ask_as(keyed)
    keyed.gateway.records.flush()
    assert keyed.metric("unauthorized_total", reason="incorrect") == 1
    assert keyed.metric("unauthorized_total", reason="missing") == 2
    metrics = (await keyed.client.get("/metrics")).text
    for secret in (KEY, OTHER, digest_of(KEY.encode()).hex()):
        assert secret not in caplog.text
        assert secret not in metrics


async def test_the_access_line_says_whose_request_it_was(keyed: Router) -> None:
    lines: list[str] = []

    keyed.gateway.records.add_reader(
        lambda ended: lines.extend(AccessLine(r, 0).json() for r in ended)
    )
    await ask_as(keyed)
    keyed.gateway.records.flush()
    (line,) = lines
    assert json.loads("{" + line + "}")["key"] == "one"


# What is shown to whom.


async def test_engines_never_see_what_clients_show(
    keyed: Router, p: MockEngine, d: MockEngine
) -> None:
    headers = BEARER | {"x-api-key": KEY, "x-other": "passes"}
    assert (await keyed.client.post("/v1/completions", json=BODY, headers=headers)).is_success
    for engine in (p, d):
        assert KEY not in str(engine.last.headers)
        assert engine.last.header("authorization") is None
        assert engine.last.header("x-other") == "passes"


async def test_engines_are_shown_their_own_key_by_whatever_the_router_asks_them(
    start_router: StartRouter, keys: WriteKeys, p: MockEngine, d: MockEngine
) -> None:
    seen: list[tuple[str, str | None]] = []
    for engine in (p, d):
        engine.answer = _noting(engine, seen)  # type: ignore[method-assign]
    router = await start_router(
        api_keys_file=keys(entry("one", KEY)), engine_api_key="of-the-engines", warm_up="eager"
    )
    # A client that asks for its hop headers to be dropped does not get rid of ours.
    headers = BEARER | {"connection": "authorization, keep-alive"}
    assert (await router.client.post("/v1/completions", json=BODY, headers=headers)).is_success
    assert (await router.client.get("/v1/models", headers=BEARER)).is_success
    paths = {path for path, _ in seen}
    assert {"/health", "/v1/models", "/v1/completions", "/disagg/identity"} <= paths
    assert {shown for _, shown in seen} == {"Bearer of-the-engines"}


def _noting(engine: MockEngine, seen: list[tuple[str, str | None]]) -> Any:
    answer = engine.answer

    async def note(request: Received, peer: Peer) -> None:
        seen.append((request.path, request.header("authorization")))
        await answer(request, peer)

    return note


async def test_the_engines_key_takes_the_place_of_the_clients_without_keys_of_ours_too(
    start_router: StartRouter, p: MockEngine, d: MockEngine, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text("of-the-engines\n")
    router = await start_router(engine_api_key_file=file)
    assert (await ask_as(router, OTHER)).status_code == 200
    assert p.last.header("authorization") == d.last.header("authorization")
    assert d.last.header("authorization") == "Bearer of-the-engines"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_engine_that_tells_what_it_was_shown_tells_no_client(
    start_router: StartRouter, d: MockEngine, is_streamed: bool
) -> None:
    async def tells(request: Received, peer: Peer) -> None:
        shown = request.header("authorization") or ""
        assert shown == "Bearer of-the-engines"
        headers = {"authorization": shown, "x-api-key": shown, "proxy-authenticate": shown}
        await peer.answer(USUAL, headers=headers)

    router = await start_router(engine_api_key="of-the-engines")
    d.scripts.append(tells)
    answer = await ask_as(router, stream=is_streamed)
    assert answer.status_code == 200
    assert "of-the-engines" not in str(answer.headers) + answer.text


async def test_an_engine_that_refuses_the_routers_key_is_no_fault_of_the_clients(
    start_router: StartRouter, p: MockEngine
) -> None:
    router = await start_router(engine_api_key="an-old-one")
    p.scripts.append(answering(401, {"error": "Unauthorized"}))
    answer = await ask_as(router)
    assert answer.status_code == 502
    assert answer.json()["error"]["message"] == "an engine rejected the router's API key"
    assert "an-old-one" not in answer.text


# Tenants.


@pytest.mark.parametrize("tenant_header", ["authorization", "x-tenant"])
async def test_a_conversation_is_its_keys_tenants_whatever_the_client_says(
    start_router: StartRouter, keys: WriteKeys, p: MockEngine, d: MockEngine, tenant_header: str
) -> None:
    """Two keys of one tenant share it, another one's does not; nor does a header say it."""
    p.usual, d.usual = prefilling(), decoding()
    router = await start_router(
        tenant_header=tenant_header,
        api_keys_file=keys(
            entry("one", KEY, tenant="t"), entry("two", "second", tenant="t"), entry("three", OTHER)
        ),
    )

    async def is_offered(key: str, tenant: str, messages: list[Any]) -> bool:
        body = {"model": "m", "messages": messages, "conversation_id": "c"}
        headers = {"authorization": f"Bearer {key}", "x-tenant": tenant}
        answer = await router.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200
        return p.last.json["kv_transfer_params"]["remote_block_ids"] is not None

    asked = [{"role": "user", "content": "how are you?"}]
    said = {"role": "assistant", "content": "fine"}
    again = [*asked, said, {"role": "user", "content": "and now?"}]
    assert not await is_offered(KEY, "a", asked)
    assert not await is_offered(OTHER, "key of t", again)
    assert await is_offered("second", "b", again)


# Models.


async def test_a_key_is_served_those_models_that_it_may_ask_for(
    start_router: StartRouter, keys: WriteKeys, p: MockEngine
) -> None:
    router = await start_router(api_keys_file=keys(entry("one", KEY, models=["other"])))
    listed = (await router.client.get("/v1/models", headers=BEARER)).json()
    assert [model["id"] for model in listed["data"]] == ["other"]
    assert (await ask_as(router, model="other")).status_code == 200
    for model in ("m", None, "Other"):
        answer = await ask_as(router, model=model)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
    for unreadable in (5, ["other"]):
        assert (await ask_as(router, model=unreadable)).status_code == 400
    assert len(p.requests) == 1


# The file changes.


async def test_the_file_is_read_again_and_a_broken_one_changes_nothing(
    start_router: StartRouter, keys: WriteKeys, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys(entry("one", KEY))
    router = await start_router(api_keys_file=path)
    authenticator = router.gateway.authenticator
    assert authenticator is not None

    async def look() -> None:
        authenticator.keyring.file.check_soon()

    keys(entry("two", OTHER))
    await look()
    await eventually(lambda: authenticator.keyring.find(OTHER.encode()))
    check_unauthorized(await ask_as(router, KEY))
    for broken in ("keys: [", "", "keys:\n- {name: a}"):
        path.write_text(broken)
        await look()
        await eventually(lambda: authenticator.keyring.file.trouble)
        assert (await ask_as(router, OTHER)).status_code == 200
        assert router.metric("file_trouble", file="api_keys") == 1
        keys(entry("two", OTHER))
        await look()
        await eventually(lambda: not authenticator.keyring.file.trouble)
        assert router.metric("file_trouble", file="api_keys") == 0
    path.unlink()
    await look()
    await eventually(lambda: authenticator.keyring.file.trouble)
    assert (await ask_as(router, OTHER)).status_code == 200
    assert "API keys stay as they are" in caplog.text


# Limits.


async def test_requests_per_minute_are_told_and_kept(
    start_router: StartRouter, keys: WriteKeys, p: MockEngine
) -> None:
    router = await start_router(
        api_keys_file=keys(entry("one", KEY, requests_per_minute=2), entry("two", OTHER))
    )
    left = []
    for is_streamed in (False, True):
        answer = await ask_as(router, stream=is_streamed)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
        assert "x-ratelimit-limit-tokens" not in answer.headers
        left.append(answer.headers["x-ratelimit-remaining-requests"])
    assert left == ["1", "0"]
    asked = len(p.requests)
    answer = await ask_as(router)
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert "Please try again in" in error["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert 1 <= int(answer.headers["retry-after-ms"]) <= 30_000
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(p.requests) == asked
    assert router.metric("rate_limited_total", key="one", limit="requests") == 1
    assert (await ask_as(router, OTHER)).status_code == 200


def telling(prompt: int, completion: int) -> Any:
    async def answer(request: Received, peer: Peer) -> None:
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        await peer.answer(USUAL | {"usage": usage})

    return answer


def debt(router: Router) -> float:
    """Tokens that were taken of a limit of 6000 in a minute."""
    assert router.gateway.authenticator is not None
    authenticator = router.gateway.authenticator
    account = authenticator._ledger._usage["one"]
    return (account.tokens_full_at - authenticator._clock()) * 100


async def test_tokens_are_charged_as_the_engine_tells_them(
    start_router: StartRouter, keys: WriteKeys, d: MockEngine
) -> None:
    router = await start_router(api_keys_file=keys(entry("one", KEY, tokens_per_minute=6000)))
    d.scripts.append(telling(1000, 2000))
    answer = await ask_as(router, max_tokens=100)
    assert answer.headers["x-ratelimit-limit-tokens"] == "6000"
    assert 5800 <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 5900
    await eventually(lambda: 2800 < debt(router) <= 3000)
    d.scripts.append(telling(10_000, 20_000))
    assert (await ask_as(router)).status_code == 200
    await eventually(lambda: debt(router) > 30_000)
    answer = await ask_as(router)
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "tokens"
    assert int(answer.headers["retry-after"]) > 200


async def test_what_comes_to_nothing_costs_no_tokens(
    start_router: StartRouter, keys: WriteKeys, p: MockEngine
) -> None:
    router = await start_router(api_keys_file=keys(entry("one", KEY, tokens_per_minute=6000)))
    for _ in range(5):
        p.scripts.append(answering(400, {"error": {"message": "no"}}))
        assert (await ask_as(router, max_tokens=5000)).status_code == 400
    assert (await ask_as(router, model="none such", max_tokens=5000)).status_code == 404
    assert (await ask_as(router, max_tokens=5000)).status_code == 200


async def test_a_stream_that_tells_no_usage_is_charged_by_what_passed(
    start_router: StartRouter, keys: WriteKeys, d: MockEngine
) -> None:
    router = await start_router(api_keys_file=keys(entry("one", KEY, tokens_per_minute=6000)))
    d.scripts.append(streaming(*[event("x")] * 500, DONE))
    answer = await ask_as(router, stream=True)
    assert answer.text.count("data: {") == 500
    await eventually(lambda: 480 < debt(router) < 530)


def choice_of(number: int, text: str, finish: str | None = None) -> dict[str, Any]:
    """A choice that both a chat and a completion can have."""
    return {"index": number, "text": text, "delta": {"content": text}, "finish_reason": finish}


def streams_tokens(*counts: tuple[int, int], is_cut: bool = False) -> Any:
    """Return a script of a stream whose events have many tokens each. `counts`: for each event its
    choice, and the tokens of the choice so far. Usage is as vLLM reports it."""

    async def answer(request: Received, peer: Peer) -> None:
        options = request.json["stream_options"]
        assert options["include_usage"] is True
        sent = []
        for place, (number, tokens) in enumerate(counts):
            is_end = not is_cut and number not in [later for later, _ in counts[place + 1 :]]
            usage = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
            more = {"usage": usage} if options.get("continuous_usage_stats") else {}
            choice = choice_of(number, f"{tokens} tokens", "stop" if is_end else None)
            sent.append({"choices": [choice], **more})
        if not is_cut:
            total = sum(dict(counts).values())
            usage = {"prompt_tokens": 10, "completion_tokens": total, "total_tokens": 10 + total}
            sent.append({"choices": [], "usage": usage})
        head = {"id": "1", "object": "chunk", "created": 1, "model": "m"}
        lines = [b"data: %b\n\n" % json.dumps(head | one).encode() for one in sent]
        await peer.send(STREAM_HEAD + b"".join(map(chunk, lines)))
        if is_cut:
            await peer.wait_left()
        else:
            await peer.send(chunk(DONE) + b"0\r\n\r\n")

    return answer


STREAM_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7,
    },
    "/v1/responses": {"model": "m", "input": "hi"},
}  # fmt: skip


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("heartbeat", [0, 60])
@pytest.mark.parametrize("path", STREAM_BODIES)
async def test_stream_is_charged_by_its_tokens_however_many_an_event_has(
    start_router: StartRouter,
    keys: WriteKeys,
    d: MockEngine,
    path: str,
    heartbeat: float,
    is_cut: bool,
) -> None:
    """`is_cut`: the client disconnects in mid-stream."""
    file = keys(entry("one", KEY, tokens_per_minute=6000))
    router = await start_router(api_keys_file=file, stream_heartbeat=heartbeat)
    d.scripts.append(streams_tokens((0, 2000), (0, 4000), is_cut=is_cut))
    body = {**STREAM_BODIES[path], "stream": True}
    seen = ""
    async with router.client.stream("POST", path, json=body, headers=BEARER) as answer:
        async for text in answer.aiter_text():
            seen += text
            if is_cut and "4000 tokens" in seen:
                break
    await router.settled()
    await eventually(lambda: 3900 < debt(router) < 4200)
    if path in ("/v1/completions", "/v1/chat/completions"):
        assert "usage" not in seen
        assert seen.count("data: {") == 2
    elif not is_cut:
        assert '"output_tokens":4000' in seen


@pytest.mark.parametrize("is_cut", [False, True])
async def test_stream_of_several_answers_is_charged_for_all_of_them(
    start_router: StartRouter, keys: WriteKeys, d: MockEngine, is_cut: bool
) -> None:
    router = await start_router(api_keys_file=keys(entry("one", KEY, tokens_per_minute=6000)))
    counts = ((0, 1000), (1, 500), (0, 1500), (1, 2500))
    d.scripts.append(streams_tokens(*counts, is_cut=is_cut))
    body = {**BODY, "stream": True, "n": 2}
    seen = ""
    async with router.client.stream("POST", "/v1/completions", json=body, headers=BEARER) as answer:
        async for text in answer.aiter_text():
            seen += text
            if is_cut and "2500 tokens" in seen:
                break
    assert "usage" not in seen
    await router.settled()
    await eventually(lambda: 3950 < debt(router) < 4100)


async def test_stream_that_its_engine_breaks_off_is_charged(
    start_router: StartRouter, keys: WriteKeys, d: MockEngine
) -> None:
    async def breaks(request: Received, peer: Peer) -> None:
        usage = {"prompt_tokens": 10, "completion_tokens": 3000}
        said = {"choices": [choice_of(0, "x")], "usage": usage}
        await peer.send(STREAM_HEAD + chunk(b"data: %b\n\n" % json.dumps(said).encode()))
        peer.reset()

    router = await start_router(api_keys_file=keys(entry("one", KEY, tokens_per_minute=6000)))
    d.scripts.append(breaks)
    assert "error" in (await ask_as(router, stream=True)).text
    await eventually(lambda: 2900 < debt(router) < 3100)


async def test_engine_is_asked_for_usage_only_for_keys_with_a_limit_on_tokens(
    start_router: StartRouter, keys: WriteKeys, d: MockEngine
) -> None:
    file = keys(entry("one", KEY, requests_per_minute=9), entry("two", OTHER))
    router = await start_router(api_keys_file=file)
    for key in (KEY, OTHER):
        assert (await ask_as(router, key, stream=True)).status_code == 200
        assert "stream_options" not in d.last.json


async def test_concurrency_is_given_back_however_a_request_ends(
    start_router: StartRouter, keys: WriteKeys, p: MockEngine, d: MockEngine
) -> None:
    router = await start_router(api_keys_file=keys(entry("one", KEY, concurrency=1)))
    authenticator = router.gateway.authenticator
    assert authenticator is not None
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def waits(request: Received, peer: Peer) -> None:
        entered.set()
        await go_on.wait()
        await usual_decode(request, peer)

    d.scripts.append(waits)
    first = asyncio.create_task(ask_as(router))
    await entered.wait()
    answer = await ask_as(router)
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "concurrency"
    assert answer.headers["retry-after"] == "1"
    go_on.set()
    assert (await first).status_code == 200
    await eventually(lambda: not authenticator.running("one"))

    # A client that leaves.
    entered.clear()
    p.scripts.append(hanging(asked=entered))
    async with router.socket() as client:
        shown = f"authorization: Bearer {KEY}\r\n".encode()
        await client.send(post(json.dumps(BODY).encode(), headers=shown))
        await entered.wait()
        assert authenticator.running("one") == 1
    await eventually(lambda: not authenticator.running("one"))

    # An engine that breaks off a stream.
    async def breaks(_: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(event("x")))
        peer.reset()

    d.scripts.append(breaks)
    await ask_as(router, stream=True)
    await eventually(lambda: not authenticator.running("one"))
    assert (await ask_as(router)).status_code == 200
    assert (await ask_as(router, prompt=None, model=["?"])).status_code != 429
    await eventually(lambda: not authenticator.running("one"))


async def test_limits_are_told_beside_heartbeats_too(
    start_router: StartRouter, keys: WriteKeys
) -> None:
    path = keys(entry("one", KEY, requests_per_minute=10, tokens_per_minute=6000))
    router = await start_router(api_keys_file=path, stream_heartbeat=5.0)
    answer = await ask_as(router, stream=True)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers["x-ratelimit-remaining-requests"] == "9"


@pytest.mark.parametrize("wanted", [10**30, -5, True, "7", 1.5, None, [7]])
async def test_absurd_lengths_are_charged_as_far_as_they_make_sense(
    start_router: StartRouter, keys: WriteKeys, wanted: object
) -> None:
    router = await start_router(api_keys_file=keys(entry("one", KEY, tokens_per_minute=6000)))
    answer = await ask_as(router, max_tokens=wanted, n=wanted)
    assert answer.status_code == 200
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) >= 0


async def test_an_engines_own_limits_are_not_told_beside_the_keys(
    start_router: StartRouter, keys: WriteKeys, d: MockEngine
) -> None:
    async def limited(_: Received, peer: Peer) -> None:
        await peer.answer(USUAL, headers={"x-ratelimit-limit-requests": "77"})

    router = await start_router(api_keys_file=keys(entry("one", KEY, requests_per_minute=9)))
    d.scripts.append(limited)
    assert (await ask_as(router)).headers.get_list("x-ratelimit-limit-requests") == ["9"]


# Settings.


async def test_several_workers_count_no_limits_without_a_store_they_share(
    keys: WriteKeys, p: MockEngine, d: MockEngine
) -> None:
    path = keys(entry("one", KEY, concurrency=1))
    given: dict[str, Any] = {"workers": 2, "conversation_store": "off", "api_keys_file": path}
    with pytest.raises(SettingsError, match="--key-limits-store"):
        build(settings_for(p=[p], d=[d], **given))
    build(settings_for(p=[p], d=[d], **given, key_limits_store="redis://127.0.0.1:1"))
    keys(entry("one", KEY))
    build(settings_for(p=[p], d=[d], **given))


async def test_a_file_that_is_broken_at_start_is_one_line(
    tmp_path: Path, p: MockEngine, d: MockEngine
) -> None:
    for content, why in ((None, "No such file"), ("keys: 5", "has no list of keys")):
        path = tmp_path / "keys.yaml"
        if content is not None:
            path.write_text(content)
        with pytest.raises(SettingsError, match=why) as caught:
            build(settings_for(p=[p], d=[d], api_keys_file=path))
        assert str(caught.value).startswith(f"--api-keys-file {path}: ")
        assert "\n" not in str(caught.value)


async def test_without_keys_nothing_is_looked_at(p: MockEngine, d: MockEngine) -> None:
    async with running_router(settings_for(p=[p], d=[d])) as router:
        assert router.gateway.authenticator is None
        assert not router.gateway.hides_credentials
        assert router.gateway.engine_line == b""


async def test_who_reloads_hears_at_once_that_the_file_is_broken(
    p: MockEngine, d: MockEngine, keys: WriteKeys
) -> None:
    path = keys(entry("one", KEY))
    given = [f"--api-keys-file={path}", "--admin-port=0"]
    async with (
        serving_router(p, d, *given) as router,
        httpx.AsyncClient(base_url=router.url, headers=BEARER) as client,
    ):
        line = next(line for line in router.lines if "admin API on" in line)
        admin = line.split()[-1]
        path.write_text("keys: [")
        told = await client.post(f"{admin}/admin/reload")
        assert told.status_code == 400
        assert "--api-keys-file" in told.json()["error"]["message"]
        router.process.send_signal(signal.SIGHUP)
        await router.until("settings are unchanged: --api-keys-file")
        assert (await client.get("/v1/models")).status_code == 200
        keys(entry("two", OTHER))
        assert (await client.post(f"{admin}/admin/reload")).status_code == 200
        async with asyncio.timeout(10):
            while (await client.get("/v1/models")).status_code != 401:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
