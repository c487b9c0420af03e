"""A stream of stock vLLM goes on at another engine: by the ids of its tokens."""

import functools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from msgspec.structs import astuple

from router.http_client.answer_limits import MemoryBudget
from router.proxy.id_resume import IdBuffer, may_continue
from router.telemetry.record import Record
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import PARAMS, running_engine
from tests.unit.router.proxy.streams import choices_of, chunks_of, is_broken

PROMPT = [1, 2, 70_000]
# The text of each token as it is sent: two tokens are one letter, and one has no text.
TEXTS = {100: "one ", 101: "two ", 102: "", 103: "é", 104: "four ", 105: "", 106: "six"}
ANSWER = [*TEXTS]
TEXT = "".join(TEXTS.values())
MESSAGES = [{"role": "user", "content": "a"}]
VERSION = b'{"version":"0.33.0+cpu"}'


def decoded(ids: Sequence[int]) -> str:
    text = "".join({**TEXTS, 102: "\ufffd", 105: "<call>"}[one] for one in ids)
    return text.replace("\ufffdé", "é")


@dataclass
class Faults:
    """The faults of the next streams, at whichever decode engine they are: each stream ends after
    this many tokens."""

    ends: list[int] = field(default_factory=list)
    has_usage: bool = True
    together: int = 1
    """Tokens in a chunk."""
    deltas: list[str] = field(default_factory=list)
    """The field of the text in the next chats."""
    streams: list[dict[str, Any]] = field(default_factory=list)
    """The bodies of all streams."""
    rendered: list[str] = field(default_factory=list)
    """Engines that render a chat's messages, whatever ids they are given."""
    firsts: list[int] = field(default_factory=list)
    """The first tokens of the next prefills."""
    asked: list[list[int]] = field(default_factory=list)
    """The ids whose text the router has asked for."""


@dataclass
class Stock:
    name: str
    faults: Faults

    async def script(self, request: Received, peer: Peer) -> None:
        body = request.json
        if request.path == "/tokenize":
            return await peer.answer({"tokens": PROMPT})
        if request.path == "/detokenize":
            self.faults.asked.append(body["tokens"])
            return await peer.answer({"prompt": decoded(body["tokens"])})
        if body.get("prompt") == [1]:  # it releases KV
            return await peer.answer({"choices": []})
        is_chat, params = "messages" in body, body.get("kv_transfer_params") or {}
        given = params.get("prompt_token_ids") if is_chat else body["prompt"]
        given = None if self.name in self.faults.rendered else given
        prompt = given if isinstance(given, list) else PROMPT
        begun = prompt[len(PROMPT) :]
        assert [*prompt[: len(PROMPT)], *begun] == PROMPT + ANSWER[: len(begun)]
        if not body.get("stream"):
            first: dict[str, Any] = {"text": "x", "message": {"content": "x"}}
            first["finish_reason"] = "length"
            usage = {"prompt_tokens": len(prompt)}
            content: dict[str, Any] = {"model": "m", "choices": [first], "usage": usage}
            if body.get("return_token_ids"):
                content["prompt_token_ids"] = prompt
            if self.faults.firsts:
                name = f"token_id:{self.faults.firsts.pop(0)}"
                listed = [{"token": one, "logprob": -9} for one in ("token_id:1", "token_id:2")]
                entry = {"token": name, "logprob": -0.1, "top_logprobs": listed}
                first["logprobs"] = {"content": [entry]}
            return await peer.answer(content | {"kv_transfer_params": PARAMS})
        self.faults.streams.append(body)
        ends = self.faults.ends.pop(0) if self.faults.ends else len(ANSWER)
        delta = self.faults.deltas.pop(0) if self.faults.deltas else "content"
        shown = body.get("return_token_ids") is True
        rest = ANSWER[len(begun) :]
        await peer.send(STREAM_HEAD)
        if is_chat:
            role = {"delta": {"role": "assistant", "content": ""}}
            await self._send(peer, [role], **({"prompt_token_ids": prompt} if shown else {}))
        for at in range(0, len(rest), self.faults.together):
            ids = rest[at : at + self.faults.together]
            if at + len(ids) > ends:
                return peer.reset()
            text = "".join(TEXTS[one] for one in ids)
            choice: dict[str, Any] = {"delta": {delta: text}} if is_chat else {"text": text}
            if delta == "tool_calls":
                choice = {"delta": {"tool_calls": [{"index": 0}]}}
            if not is_chat and body.get("logprobs") is not None:
                offset = sum(len(TEXTS[one]) for one in rest[:at])
                choice["logprobs"] = {"tokens": [text], "text_offset": [offset]}
            if at + len(ids) == len(rest):
                choice["finish_reason"] = "length"
            if shown and not is_chat:
                choice["prompt_token_ids"] = None if at else prompt
            retained = {"kv_transfer_params": PARAMS} if choice.get("finish_reason") else {}
            await self._send(peer, [choice | ({"token_ids": ids} if shown else {})], **retained)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(rest)}
        if self.faults.has_usage:
            await self._send(peer, [], usage=usage)
        await peer.send(chunk(DONE) + b"0\r\n\r\n")

    async def _send(self, peer: Peer, given: list[dict[str, Any]], **fields: Any) -> None:
        listed = [{"index": 0, "finish_reason": None, **choice} for choice in given]
        content = {"id": f"id-{self.name}", "created": ord(self.name), "choices": listed, **fields}
        written = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
        await peer.send(chunk(f"data: {written}\n\n".encode()))


@pytest.fixture
async def d2() -> AsyncIterator[MockEngine]:
    async with running_engine(Stock("D", Faults()).script) as engine:
        yield engine


@pytest.fixture
async def d4() -> AsyncIterator[MockEngine]:
    async with running_engine(Stock("4", Faults()).script) as engine:
        yield engine


@pytest.fixture
def faults(p: MockEngine, d: MockEngine, d2: MockEngine) -> Faults:
    made = Faults()
    for name, engine in zip("pdD", (p, d, d2), strict=True):
        engine.usual, engine.pages["/version"] = Stock(name, made).script, VERSION
    return made


@pytest.fixture
def start_router(
    start_router: StartRouter, faults: Faults, d: MockEngine, d2: MockEngine
) -> StartRouter:
    return functools.partial(start_router, ds=[d, d2], identified=True)


async def no_models(request: Received, peer: Peer) -> None:
    await peer.answer({"detail": "Not Found"}, 404)


async def chat(router: Router, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": MESSAGES, "stream": True, "max_tokens": 7, **fields}
    return await router.client.post("/v1/chat/completions", json=body)


def text_in(answer: httpx.Response) -> str:
    deltas = [one.get("delta", one) for one in choices_of(answer)]
    return "".join(one.get("content") or one.get("text") or "" for one in deltas)


def resumed(router: Router) -> float:
    return router.metric("resumes_total", kind="broken_answer", outcome="resumed")


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("ends", [1, 2, 4, 5])
async def test_another_engine_continues_a_chat(
    start_router: StartRouter, p: MockEngine, faults: Faults, ends: int, shows: bool
) -> None:
    router = await start_router()
    faults.ends = [ends]
    answer = await chat(router, min_tokens=6, **({"return_token_ids": True} if shows else {}))
    assert text_in(answer) == TEXT
    assert sum("role" in one["delta"] for one in choices_of(answer)) == 1
    assert [one["finish_reason"] for one in choices_of(answer)][-1] == "length"
    assert chunks_of(answer)[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 7}
    ids = [token for one in choices_of(answer) for token in one.get("token_ids") or ()]
    prompts = [one["prompt_token_ids"] for one in chunks_of(answer) if "prompt_token_ids" in one]
    assert (ids, prompts) == ((ANSWER, [PROMPT]) if shows else ([], []))
    assert resumed(router) == 1
    _, second = faults.streams
    assert (second["max_tokens"], second["min_tokens"]) == (7 - ends, 6 - ends)
    params = second["kv_transfer_params"]
    assert params["prompt_token_ids"] == PROMPT + ANSWER[:ends]
    assert params["remote_host"] == PARAMS["remote_host"]
    assert p.last.json["kv_transfer_params"]["prompt_token_ids"] == PROMPT + ANSWER[:ends]
    assert p.last.json["max_tokens"] == 1
    assert router.gateway.memory.resume_buffers.size == 0


async def test_another_engine_continues_a_completion(
    start_router: StartRouter, p: MockEngine, faults: Faults
) -> None:
    router = await start_router()
    faults.ends = [2]
    answer = await router.stream(logprobs=1)
    assert text_in(answer) == TEXT
    offsets = [one["logprobs"]["text_offset"][0] for one in choices_of(answer)]
    assert offsets == [sum(len(TEXTS[one]) for one in ANSWER[:at]) for at in range(7)]
    assert [body["prompt"] for body in faults.streams] == ["hello", PROMPT + ANSWER[:2]]
    assert p.last.json["prompt"] == PROMPT + ANSWER[:2]


# Within a letter, and behind a token without a text.
@pytest.mark.parametrize(("ends", "kept"), [(3, 2), (6, 5)])
async def test_tokens_without_a_text_are_computed_again(
    start_router: StartRouter, faults: Faults, ends: int, kept: int
) -> None:
    router = await start_router()
    faults.ends = [ends]
    answer = await chat(router)
    assert text_in(answer) == TEXT
    assert chunks_of(answer)[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 7}
    assert faults.streams[1]["kv_transfer_params"]["prompt_token_ids"] == PROMPT + ANSWER[:kept]
    assert resumed(router) == 1


@pytest.mark.parametrize("fields", [{"return_token_ids": True}, {"logprobs": True}])
async def test_client_does_not_get_a_token_twice(
    start_router: StartRouter, faults: Faults, fields: dict[str, Any]
) -> None:
    router = await start_router()
    faults.ends = [3]
    assert is_broken(await chat(router, **fields))
    assert len(faults.streams) == 1


async def test_client_does_not_get_the_logprob_of_a_token_twice(
    start_router: StartRouter, faults: Faults
) -> None:
    router = await start_router()
    faults.ends = [3]
    assert is_broken(await router.stream(logprobs=0))


@pytest.mark.parametrize("ends", [[2, 0], [2, 1], [2, 2], [1, 3], [2, 0, 0]])
async def test_stream_goes_on_after_several_failures(
    start_router: StartRouter, faults: Faults, d: MockEngine, d2: MockEngine, d3: MockEngine,
    d4: MockEngine, ends: list[int],
) -> None:  # fmt: skip
    for name, engine in zip("34", (d3, d4), strict=True):
        engine.usual, engine.pages["/version"] = Stock(name, faults).script, VERSION
    router = await start_router(ds=[d, d2, d3, d4], max_resumes=3)
    faults.ends = [*ends]
    answer = await router.stream(logprobs=1 if ends != [2, 1] else None, max_tokens=7)
    assert text_in(answer) == TEXT
    if ends != [2, 1]:
        offsets = [one["logprobs"]["text_offset"][0] for one in choices_of(answer)]
        assert offsets == [sum(len(TEXTS[one]) for one in ANSWER[:at]) for at in range(7)]
    assert chunks_of(answer)[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 7}
    assert router.gateway.memory.resume_buffers.size == 0


@pytest.mark.parametrize("with_usage", [False, True])
async def test_tokens_are_counted_as_those_of_one_stream(
    start_router: StartRouter, faults: Faults, with_usage: bool
) -> None:
    router = await start_router()
    ended: list[Record] = []
    router.gateway.records.add_reader(ended.extend)
    faults.ends, faults.has_usage = [4], with_usage
    assert text_in(await chat(router)) == TEXT
    await eventually(lambda: ended)
    assert astuple(ended[0].tokens)[:2] == (3, 7 if with_usage else None)


@pytest.mark.parametrize(
    ("path", "fields", "most"),
    [
        ("completions", {}, 14),  # vLLM's default is 16
        ("completions", {"max_tokens": None}, None),
        ("completions", {"max_tokens": 7.0}, 5),
        ("completions", {"max_tokens": 7, "max_completion_tokens": 1}, 5),
        ("chat/completions", {}, None),
        ("chat/completions", {"max_tokens": 1, "max_completion_tokens": 9}, 1),
    ],
)
async def test_answer_is_no_longer_than_without_a_failure(
    start_router: StartRouter, faults: Faults, path: str, fields: dict[str, Any], most: int | None
) -> None:
    router = await start_router()
    faults.ends = [2]
    body = {"prompt": "hello"} if path == "completions" else {"messages": MESSAGES}
    answer = await router.client.post(f"/v1/{path}", json={**body, "stream": True, **fields})
    assert text_in(answer) == TEXT
    _, second = faults.streams
    assert second.get("max_tokens") == most
    if path != "completions" and fields:
        assert second["max_completion_tokens"] == 7


async def test_engine_that_renders_the_messages_instead_does_not_continue(
    start_router: StartRouter, faults: Faults
) -> None:
    router = await start_router()
    faults.ends, faults.rendered = [2], ["D"]
    answer = await chat(router)
    assert is_broken(answer)
    assert answer.text.count("one ") == 1
    assert router.metric("resumes_total", kind="broken_answer", outcome="resumed") == 1


@pytest.mark.parametrize("pieces", [1, 2])
async def test_list_behind_the_ids_is_none_of_them(
    start_router: StartRouter, d: MockEngine, pieces: int
) -> None:
    router = await start_router()
    memory = router.gateway.memory.resume_buffers
    buffer = IdBuffer(memory, router.engine(d), max_resumes=1, hides_ids=True)
    buffer.passing(b'data: {"choices":[],"prompt_token_ids":[1]}\n\n', last=False)
    event = b'data: {"choices":[{"text":"a","token_ids":[7],"experts":[8]}]}\n\n'
    for _ in range(2):
        passed = buffer.passing(event * pieces, last=False)
        assert passed == event.replace(b',"token_ids":[7]', b"") * pieces
    assert buffer.continuing_ids() == b"[1%b]" % (b",7" * 2 * pieces)
    buffer.close()
    assert memory.size == 0


async def test_stream_continues_without_prefix_caches_after_wrong_kv(
    start_router: StartRouter, faults: Faults
) -> None:
    router = await start_router(kv_canary=1e-9)
    faults.firsts, faults.ends = [7], [len(ANSWER), 2]
    assert text_in(await chat(router, temperature=0)) == TEXT
    assert router.metric("kv_canary_total", outcome="disagreed") == 1
    salts = [one.get("cache_salt") for one in faults.streams]
    assert len(salts) == 3
    assert salts[0] is None
    assert salts[1] == salts[2] is not None


@pytest.mark.parametrize("ends", [2, 3])
@pytest.mark.parametrize("fields", [{}, {"cache_hit_threshold": 0.5}])
async def test_turn_is_kept_with_the_ids_of_both_engines(
    start_router: StartRouter,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    ends: int,
    fields: dict[str, Any],
) -> None:
    router = await start_router(conversation_unproven="tokens")
    kept: list[Any] = []
    conversations = router.gateway.conversations
    assert conversations is not None
    keep = conversations.keep

    async def note(*given: Any) -> Any:
        kept.append(given[-1])
        return await keep(*given)

    monkeypatch.setattr(conversations, "keep", note)
    faults.ends = [ends]
    answer = await chat(router, conversation_id="c", **fields)
    assert text_in(answer) == TEXT
    assert "token_ids" not in answer.text
    await router.settled()
    assert kept == [PROMPT + ANSWER]
    # The next turn offers nothing of it for a prompt with a part of an answer.
    faults.ends = [2]
    said = [{"role": "assistant", "content": TEXT}, *MESSAGES]
    answer = await chat(router, messages=MESSAGES + said, conversation_id="c", **fields)
    assert text_in(answer) == TEXT


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_prefill_engine_joins_when_a_lone_decode_engine_has_failed(
    start_router: StartRouter, faults: Faults, p: MockEngine, d: MockEngine, d2: MockEngine,
    path: str,
) -> None:  # fmt: skip
    for engine in (p, d, d2):
        engine.listing = no_models  # so requests need not name one
    router = await start_router()
    faults.ends = [2]
    body: dict[str, Any] = {"prompt": "hello"}
    if path != "completions":
        body = {"messages": MESSAGES}
    body |= {"cache_hit_threshold": 0.5, "stream": True, "max_tokens": 7}
    assert text_in(await router.client.post(f"/v1/{path}", json=body)) == TEXT
    assert p.requests
    first, second = faults.streams
    assert "kv_transfer_params" not in first
    assert second["max_tokens"] == 5


async def test_several_tokens_in_a_chunk(start_router: StartRouter, faults: Faults) -> None:
    router = await start_router()
    faults.ends, faults.together = [4], 3
    assert text_in(await chat(router)) == TEXT
    prompt = faults.streams[1]["kv_transfer_params"]["prompt_token_ids"]
    assert prompt == PROMPT + ANSWER[:2]  # the first three have the text of two


@pytest.mark.parametrize(
    ("deltas", "streams"),
    [(["tool_calls"], 1), (["reasoning", "content"], 2), (["content", "reasoning"], 2)],
)
async def test_parser_whose_state_is_unknown_ends_the_stream(
    start_router: StartRouter, faults: Faults, deltas: list[str], streams: int
) -> None:
    router = await start_router(max_resumes=1)
    faults.ends, faults.deltas = [2], deltas
    assert is_broken(await chat(router))
    assert len(faults.streams) == streams


async def test_reasoning_goes_on(start_router: StartRouter, faults: Faults) -> None:
    router = await start_router()
    faults.ends, faults.deltas = [2], ["reasoning", "reasoning"]
    answer = await chat(router)
    assert "".join(one["delta"].get("reasoning", "") for one in choices_of(answer)) == TEXT


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["x"]},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"n": 2},
        {"include_reasoning": False},
        {"echo": True},
        {"bad_words": ["x"]},
    ],
)
def test_requests_that_no_other_engine_could_continue(fields: dict[str, Any]) -> None:
    assert not may_continue({"messages": MESSAGES, **fields})
    plain = {"stop": [], "presence_penalty": 0, "tool_choice": "auto", "tools": [{}], "n": 1}
    assert may_continue({"messages": MESSAGES, **plain, "response_format": {"type": "text"}})


@pytest.mark.parametrize(
    "page", [b'{"version":"0.30.2"}', b'{"version":"0.33.0","x":1}', b"[]", b'{"version":7}', b""]
)
async def test_engines_that_take_no_ids_are_not_asked_for_them(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, faults: Faults, page: bytes
) -> None:
    d.pages["/version"] = d2.pages["/version"] = page
    router = await start_router()
    faults.ends = [2]
    assert is_broken(await chat(router))
    assert [one.get("return_token_ids") for one in faults.streams] == [None]


async def test_engine_with_another_tokenizer_does_not_continue(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, faults: Faults
) -> None:
    versions = {"versions": {"vllm": "0.33.0"}, "capabilities": []}
    d.identity = versions | {"renders": {"tokenizer": "1"}}
    d2.identity = versions | {"renders": {"tokenizer": "2"}}
    router = await start_router()
    faults.ends = [2]
    assert is_broken(await chat(router))
    assert len(faults.streams) == 1


@pytest.mark.parametrize("cause", ["gone", "other text", "no page"])
async def test_text_that_is_not_proven_is_not_continued(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, faults: Faults, cause: str
) -> None:
    async def script(stock: Stock, request: Received, peer: Peer) -> None:
        if request.path != "/detokenize":
            await stock.script(request, peer)
        elif cause == "gone":
            peer.reset()
        else:
            page = {"prompt": "other "} if cause == "other text" else {"detail": "Not Found"}
            await peer.answer(page, 200 if cause == "other text" else 404)

    router = await start_router()
    for name, engine in zip("dD", (d, d2), strict=True):
        engine.usual = functools.partial(script, Stock(name, faults))
    faults.ends = [2]
    assert is_broken(await chat(router))
    assert router.metric("resumes_total", kind="broken_answer", outcome="given_up") == 1


def buffered(*blocks: bytes, hides_ids: bool = True) -> tuple[IdBuffer, bytes]:
    engine = SimpleNamespace(
        capabilities=SimpleNamespace(render_hashes={}), spec=SimpleNamespace(group="")
    )
    buffer = IdBuffer(MemoryBudget(0), engine, 2, hides_ids)  # type: ignore[arg-type]
    buffer.start_leg(None)
    return buffer, b"".join(buffer.passing(block, False) for block in blocks)


def event(ids: str | None, text: str = "x", **fields: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None}
    written = json.dumps({"id": "a", "created": 1, "choices": [choice | fields]})
    written = written.replace(", ", ",").replace(": ", ":")
    if ids is not None:
        written = written.removesuffix("}]}") + f',"token_ids":{ids}}}]}}'
    return f"data: {written}\n\n".encode()


BEGIN = event("[7]", prompt_token_ids=[1, 2])
QUOTES = ("x", 'a"b', "\\", '\\"', ',"token_ids":[5]}]}', "")


@pytest.mark.parametrize(
    ("blocks", "ids"),
    [
        ([event("[8]"), event("[9,10]")], b"[1,2,7,8,9,10]"),
        ([event("[8]") + event("[9]")], b"[1,2,7,8,9]"),
        ([event("[]", ""), event("[8]")], b"[1,2,7,8]"),
        ([event("[8]") + event("[]", "")], b"[1,2,7,8]"),
        ([event("null", ""), event("[ 8 , 9 ]")], b"[1,2,7, 8 , 9 ]"),
        ([event("[8]").replace(b"\n", b"\r\n")], b"[1,2,7,8]"),
        ([event("[8]", ',"token_ids":[5]}]}')], b"[1,2,7,8]"),
        # Most chunks differ in their text and their id alone.
        ([event(f"[{8 + n}]", text) for n, text in enumerate(QUOTES)], b"[1,2,7,8,9,10,11,12,13]"),
        ([event("[8]"), event("[9]") + event("[10]"), event("[11]")], b"[1,2,7,8,9,10,11]"),
        ([event("[8]"), event("[9,10]"), event("[]", ""), event("[11]")], b"[1,2,7,8,9,10,11]"),
        ([event("[8]", index=1), event("[9]", "\n", x="y"), event("[10]")], b"[1,2,7,8,9,10]"),
    ],
)
def test_ids_are_kept_and_taken_out(blocks: list[bytes], ids: bytes) -> None:
    buffer, passed = buffered(BEGIN, *blocks)
    assert buffer.can_resume
    assert buffer.continuing_ids() == ids
    assert buffer.num_tokens == len(json.loads(ids)) - 2
    assert b'token_ids":' not in passed
    shown = buffered(BEGIN, *blocks, hides_ids=False)[1]
    assert shown == b"".join((BEGIN, *blocks))


@pytest.mark.parametrize(
    "gap", [event(None), event("[]"), event("null"), event("[8]") + event(None)]
)
def test_text_without_ids_is_a_gap(gap: bytes) -> None:
    for blocks in ((gap,), (event("[8]"), gap), (event("[8]"), event("[8]", "\\"), gap)):
        assert not buffered(BEGIN, *blocks, event("[9]"))[0].can_resume
