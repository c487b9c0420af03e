"""A greedy stream that no engine can continue is answered once more by another one."""

import functools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from router.http_client.answer_limits import MemoryBudget
from router.proxy.replay_buffer import ReplayBuffer, may_replay
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import PARAMS, running_engine
from tests.unit.router.proxy.streams import choices_of, chunks_of, is_broken

WORDS = ["one ", "twö ", "", "three ", "four"]
GREEDY = {"temperature": 0, "stop": ["x"]}
VERSION = b'{"version":"0.33.0"}'


@dataclass
class Plan:
    """The plan of the next streams, at whichever decode engine they are: each stream ends after
    this many chunks, and has this many words in a chunk, this kind of delta, and these words."""

    ends: list[int] = field(default_factory=list)
    together: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    words: list[list[str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)


def delta_of(kind: str, text: str, name: str, is_first: bool) -> dict[str, Any]:
    if kind != "call":
        return {kind: text}
    begin = {"id": f"call-{name}", "type": "function"} if is_first else {}
    called = {"name": "look", "arguments": text} if is_first else {"arguments": text}
    return {"tool_calls": [{"index": 0, **begin, "function": called}]}


async def stock(name: str, plan: Plan, request: Received, peer: Peer) -> None:
    body = request.json
    if not body.get("stream"):
        return await peer.answer({"choices": [{"text": "x"}], "kv_transfer_params": PARAMS})
    plan.bodies.append(body)
    ends = plan.ends.pop(0) if plan.ends else 99
    step = plan.together.pop(0) if plan.together else 1
    kind = plan.kinds.pop(0) if plan.kinds else "content"
    words = plan.words.pop(0) if plan.words else WORDS

    async def send(choices: list[dict[str, Any]], **fields: Any) -> None:
        content = {"id": f"id-{name}", "created": ord(name), "choices": choices, **fields}
        await peer.send(chunk(f"data: {json.dumps(content)}\n\n".encode()))

    await peer.send(STREAM_HEAD)
    role = {"role": "assistant", "content": ""}
    await send([{"index": 0, "delta": role, "finish_reason": None}])
    for number, at in enumerate(range(0, len(words), step)):
        if number >= ends:
            return peer.reset()
        part = words[at : at + step]
        choice = {"index": 0, "delta": delta_of(kind, "".join(part), name, not at)}
        choice["logprobs"] = {"content": [{"token": word, "logprob": -1.0} for word in part]}
        choice["finish_reason"] = "length" if at + step >= len(words) else None
        await send([choice])
    await send([], usage={"prompt_tokens": 3, "completion_tokens": 5})
    await peer.send(chunk(DONE) + b"0\r\n\r\n")


@pytest.fixture
async def d2() -> AsyncIterator[MockEngine]:
    async with running_engine(functools.partial(stock, "D", Plan())) as engine:
        yield engine


@pytest.fixture
def plan(p: MockEngine, d: MockEngine, d2: MockEngine) -> Plan:
    made = Plan()
    for name, engine in zip("pdD", (p, d, d2), strict=True):
        engine.usual = functools.partial(stock, name, made)
        engine.pages["/version"] = VERSION
    return made


@pytest.fixture
async def router(start_router: StartRouter, plan: Plan, d: MockEngine, d2: MockEngine) -> Router:
    return await start_router(ds=[d, d2], identified=True)


async def chat(router: Router, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "a"}]
    body = {"model": "m", "messages": messages, "stream": True, "max_tokens": 5, **GREEDY}
    return await router.client.post("/v1/chat/completions", json=body | fields)


@pytest.mark.parametrize("together", [(1, 1), (1, 2), (2, 1), (1, 9), (2, 3)])
@pytest.mark.parametrize("ends", [1, 2, 3, 4])
async def test_what_the_client_has_is_left_out(
    router: Router, plan: Plan, ends: int, together: tuple[int, int]
) -> None:
    plan.ends, plan.together = [min(ends, len(range(0, 5, together[0])) - 1)], [*together]
    answer = await chat(router)
    assert plan.bodies[0] | plan.bodies[1] == plan.bodies[1] | plan.bodies[0]
    assert [body["max_tokens"] for body in plan.bodies] == [5, 5]
    given = choices_of(answer)
    assert "".join(one["delta"].get("content", "") for one in given) == "".join(WORDS)
    assert sum("role" in one["delta"] for one in given) == 1
    tokens = [
        entry["token"] for one in given for entry in (one.get("logprobs") or {}).get("content", ())
    ]
    assert tokens == WORDS
    assert [one["finish_reason"] for one in given if one["finish_reason"]] == ["length"]
    assert chunks_of(answer)[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 5}
    assert router.metric("resumes_total", kind="broken_answer", outcome="resumed") == 1
    assert router.gateway.memory.resume_buffers.size == 0


async def test_call_of_a_tool_goes_on(router: Router, plan: Plan) -> None:
    plan.ends, plan.kinds = [2], ["call", "call"]
    fields = {"tools": [{"type": "function", "function": {"name": "look"}}]}
    answer = await chat(router, **fields, tool_choice="required")
    calls = [one for choice in choices_of(answer) for one in choice["delta"].get("tool_calls", ())]
    assert len([one["id"] for one in calls if "id" in one]) == 1
    assert "".join(one["function"].get("name", "") for one in calls) == "look"
    assert "".join(one["function"]["arguments"] for one in calls) == "".join(WORDS)


@pytest.mark.parametrize(
    "second", [{"words": ["one ", "two "]}, {"words": ["one "]}, {"kind": "reasoning"}]
)
async def test_engine_that_answers_otherwise_ends_the_stream(
    router: Router, plan: Plan, second: dict[str, Any]
) -> None:
    plan.ends = [4]
    plan.words = [WORDS, second.get("words", WORDS)]
    plan.kinds = ["content", second.get("kind", "content")]
    assert is_broken(await chat(router))
    assert len(plan.bodies) == 2


def test_error_that_comes_with_text_does_not_stop_the_replay() -> None:
    buffer = ReplayBuffer(MemoryBudget(0), 2)
    buffer.start_leg(None)
    said = b'data: {"id":"a","created":1,"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
    assert buffer.passing(said + b'data: {"error":{"message":"no"}}\n\n', False) == said
    assert buffer.is_cut
    assert b"no" in buffer.error
    assert buffer.can_resume


async def test_sampled_answer_is_not_repeated(router: Router, plan: Plan) -> None:
    plan.ends = [2]
    assert is_broken(await chat(router, temperature=0.5))
    assert len(plan.bodies) == 1


@pytest.mark.parametrize(
    ("fields", "may"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "n": 1}, True),
        ({"top_k": 1}, True),
        ({"seed": 0}, True),
        ({}, False),
        ({"temperature": 0.1}, False),
        ({"temperature": 0, "n": 2}, False),
        ({"temperature": 0, "echo": True}, False),
    ],
)
def test_answers_that_are_the_same_once_more(fields: dict[str, Any], may: bool) -> None:
    assert may_replay(fields) is may
