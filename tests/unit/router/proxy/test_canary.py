"""The canary: KV that was transferred wrongly shows in the first token of the decode engine, and no
client gets the answer."""

import asyncio
import json
from itertools import count
from typing import Any

import pytest

from router.commands.status import lines, parse_metrics
from router.openai.answers import parse_object
from router.proxy.canary import GREEDY_BOUND, LOGPROB_BOUND, Canary, FirstToken, difference
from scripts.mock_engine import DONE, MockEngine, Peer, Received, Script
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answer_after
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import PARAMS

RIGHT, WRONG = {11: -0.1, 12: -3.0, 13: -4.0}, {77: -0.2, 12: -2.5, 13: -4.0}
"""The likeliest tokens of a prompt, with the KV of this prompt and with other KV."""
GREEDY: dict[str, Any] = {"temperature": 0}
ALWAYS: dict[str, Any] = {"kv_canary": 1}
ALONE: dict[str, Any] = {**ALWAYS, "without_prefiller": "decode"}
CHAT = "/v1/chat/completions"
BOTH_APIS = pytest.mark.parametrize("path", ["/v1/completions", CHAT])
STREAMED_OR_WHOLE = pytest.mark.parametrize("stream", [False, True])


def choice_of(request: Received, tops: dict[int, float], text: str) -> dict[str, Any]:
    """Return the choice of one token, with what the request asks for, as vLLM writes it."""
    body, is_chat = request.json, request.path == CHAT
    first = max(tops, key=tops.__getitem__)
    names = {one: f"token_id:{one}" for one in tops}
    if not body.get("return_tokens_as_token_ids"):
        names = {one: f"<{one}>" for one in tops}
    logprobs: dict[str, Any] | None = None
    if body.get("logprobs") and is_chat:
        listed = [{"token": names[one], "logprob": p} for one, p in tops.items()]
        listed = listed[: body.get("top_logprobs", 0)]
        entry = {"token": names[first], "logprob": tops[first], "top_logprobs": listed}
        logprobs = {"content": [entry]}
    elif body.get("logprobs") is not None and not is_chat:
        listed_tops = {names[one]: p for one, p in tops.items()}
        logprobs = {
            "tokens": [names[first]],
            "token_logprobs": [tops[first]],
            "top_logprobs": [listed_tops],
        }
    ids = {"token_ids": [first]} if body.get("return_token_ids") else {}
    content: dict[str, Any] = {"text": text}
    if is_chat:
        content = {("delta" if body.get("stream") else "message"): {"content": text}}
    return {"index": 0, **content, "logprobs": logprobs, "finish_reason": None, **ids}


def answering(tops: dict[int, float], text: str) -> Script:
    """Return a script that answers as vLLM does, with this distribution of the first token."""

    async def answer(request: Received, peer: Peer) -> None:
        choice = choice_of(request, tops, text)
        if request.json.get("stream"):
            chunk: dict[str, Any] = {"id": "c", "object": "x", "choices": [choice]}
            if request.json.get("return_token_ids"):
                chunk["prompt_token_ids"] = [1, 2]
            end = {**chunk, "choices": [{**choice, "finish_reason": "stop"}]}
            events = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in (chunk, end)]
            await peer.stream(*events, DONE)
            return
        content = {"id": "c", "choices": [{**choice, "finish_reason": "length"}]}
        await peer.answer(content)

    return answer


def setting(event: asyncio.Event, script: Script) -> Script:
    """Return a script that answers as `script` does, and then sets `event`."""

    async def answer(request: Received, peer: Peer) -> None:
        await script(request, peer)
        event.set()

    return answer


right, wrong = answering(RIGHT, "right"), answering(WRONG, "wrong")


class Pairs:
    """Prefill and decode engines, of which pairs in `broken` transfer wrong KV."""

    def __init__(self, ps: list[MockEngine], ds: list[MockEngine]) -> None:
        self.ps, self.ds = ps, ds
        self.broken = {(0, 0)}
        self.used: list[tuple[int, int]] = []
        self.bad_caches: set[tuple[int, str, object]] = set()
        """Decode engines with wrong blocks in their prefix caches, and the prompts and salts."""
        for number, engine in enumerate(ps):
            engine.usual = self._prefilling(number)
        for number, engine in enumerate(ds):
            engine.usual = self._decoding(number)

    def _prefilling(self, number: int) -> Script:
        async def answer(request: Received, peer: Peer) -> None:
            choice = choice_of(request, RIGHT, "right")
            params = PARAMS | {"remote_engine_id": f"p-{number}"}
            await peer.answer(
                {"id": "c", "choices": [{**choice, "finish_reason": "length"}]}
                | {"kv_transfer_params": params}
            )

        return answer

    def _decoding(self, number: int) -> Script:
        async def answer(request: Received, peer: Peer) -> None:
            source = (request.json.get("kv_transfer_params") or {}).get("remote_engine_id")
            prompt = str(request.json.get("messages") or request.json["prompt"])
            place = number, prompt, request.json.get("cache_salt")
            if source is not None:
                pair = int(source.removeprefix("p-")), number
                self.used.append(pair)
                if pair in self.broken:
                    self.bad_caches.add(place)
            await (wrong if place in self.bad_caches else right)(request, peer)

        return answer


@pytest.fixture
def fleet(p: MockEngine, d: MockEngine, p2: MockEngine, d2: MockEngine) -> Pairs:
    return Pairs([p, p2], [d, d2])


async def started(start: StartRouter, fleet: Pairs, **changes: Any) -> Router:
    router = await start(ps=fleet.ps, ds=fleet.ds, **{**ALWAYS, **changes})
    await router.knows_its_engines()
    return router


def canaries(router: Router, outcome: str) -> float:
    return router.metric("kv_canary_total", outcome=outcome)


numbers = count()


async def ask(router: Router, path: str = "/v1/completions", **fields: Any) -> str:
    """Send a prompt that no cache holds."""
    prompt = f"prompt {next(numbers)}"
    asked: dict[str, Any] = {"prompt": prompt}
    if path == CHAT:
        asked = {"messages": [{"role": "user", "content": prompt}]}
    answer = await router.client.post(path, json={"max_tokens": 5, **asked, **fields})
    assert answer.status_code == 200, answer.text
    await router.settled()
    return answer.text


@BOTH_APIS
@STREAMED_OR_WHOLE
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
async def test_wrong_kv_is_found_and_client_gets_right_answer(
    start_router: StartRouter, fleet: Pairs, path: str, stream: bool, kind: str
) -> None:
    router = await started(start_router, fleet, kv_canary=1e-9 if kind == "greedy" else 1)
    fields = GREEDY if kind == "greedy" else {}
    for _ in range(8):
        text = await ask(router, path, stream=stream, **fields)
        assert "right" in text
        assert "wrong" not in text
        text = text.replace(" ", "")
        assert not any(one in text for one in ("token_id:", 'token_ids":[', '"logprobs":{'))
    assert fleet.used.count((0, 0)) == 1
    assert canaries(router, "disagreed") == 1
    assert canaries(router, "agreed") == 8
    prefiller, decoder = router.engine(fleet.ps[0]).name, router.engine(fleet.ds[0]).name
    assert router.metric("pair_avoided", prefiller=prefiller, decoder=decoder) == 1
    assert router.metric("kv_load_failures_total", scope="pair") == 0
    status = parse_metrics(router.gateway.metrics.exposition().decode())
    assert "1 disagreed" in "\n".join(lines(status, None, 0))


@pytest.mark.parametrize("broken", [{(0, 0), (0, 1)}, {(0, 0), (1, 0)}])
async def test_engine_whose_pairs_all_transfer_wrongly_is_not_used(
    start_router: StartRouter, fleet: Pairs, broken: set[tuple[int, int]]
) -> None:
    fleet.broken = broken
    router = await started(start_router, fleet)
    for _ in range(30):
        assert "right" in await ask(router, **GREEDY)
    assert all(fleet.used.count(pair) == 1 for pair in broken)
    used = {pair for pair in fleet.used if pair not in broken}
    assert used == {(0, 0), (0, 1), (1, 0), (1, 1)} - broken


async def test_prefix_cache_with_wrong_blocks_is_found_through_all_pairs(
    start_router: StartRouter, fleet: Pairs
) -> None:
    router = await started(start_router, fleet)
    for _ in range(20):
        assert "right" in await ask(router, prompt="always the same", **GREEDY)
    assert fleet.used.count((0, 0)) == fleet.used.count((1, 0)) == 1


async def test_only_decode_engine_computes_prompt_alone_without_its_prefix_cache(
    start_router: StartRouter, fleet: Pairs
) -> None:
    router = await start_router(
        ps=fleet.ps[:1], ds=fleet.ds[:1], without_prefiller="decode", **ALWAYS
    )
    await router.knows_its_engines()
    assert "right" in await ask(router, **GREEDY)
    salts = [request.json.get("cache_salt") for request in fleet.ds[0].requests]
    assert salts[0] is None
    assert salts[-1]
    assert canaries(router, "disagreed") == 1
    assert canaries(router, "agreed") == 1, "the decode engine alone computes the same token"


@STREAMED_OR_WHOLE
async def test_wrong_kv_of_a_store_is_found(
    start_router: StartRouter, p: MockEngine, d: MockEngine, stream: bool
) -> None:
    """The legs of a store name no engine: only the first decode leg finds wrong KV there."""
    p.usual = right
    first = iter([wrong])

    async def decode(request: Received, peer: Peer) -> None:
        await next(first, right)(request, peer)

    d.usual = decode
    router = await start_router(kv_protocol="store", **ALONE)
    await router.knows_its_engines()
    text = await ask(router, stream=stream, **GREEDY)
    assert "right" in text
    assert "token_ids" not in text.replace('"token_ids": null', "").replace('"token_ids":null', "")
    assert canaries(router, "disagreed") == canaries(router, "agreed") == 1
    assert router.metric("decode_only_total", reason="no_pair") == 1


async def test_log_probability_that_is_no_number_is_not_comparable(
    start_router: StartRouter, fleet: Pairs
) -> None:
    fleet.broken.clear()
    for engine in fleet.ds:
        engine.usual = answering({11: float("nan"), 12: float("nan")}, "right")
    router = await started(start_router, fleet)
    await ask(router, temperature=1)
    assert canaries(router, "not_comparable") == 1


async def test_engines_that_never_compute_alike_are_not_compared_again(
    start_router: StartRouter, fleet: Pairs
) -> None:
    fleet.ds[0].usual = wrong
    router = await start_router(
        ps=fleet.ps[:1], ds=fleet.ds[:1], without_prefiller="decode", **ALWAYS
    )
    await router.knows_its_engines()
    for _ in range(4):
        assert "wrong" in await ask(router, **GREEDY)
    assert canaries(router, "disagreed") == 1
    assert canaries(router, "engines_differ") == 1
    assert not router.gateway.fleet.unreachable_pairs


async def test_only_compared_load_clears_pair(
    start_router: StartRouter, fleet: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.unreachable_pairs.FIRST_AVOIDANCE_S", 0.02)
    router = await started(start_router, fleet)
    pairs = router.gateway.fleet.unreachable_pairs
    while not pairs:
        await ask(router, **GREEDY)
    fleet.used.clear()
    while fleet.used.count((0, 0)) < 2:
        await ask(router, min_tokens=1)  # not compared
    assert pairs
    fleet.broken.clear()
    fleet.bad_caches.clear()
    while pairs:
        await ask(router)


@STREAMED_OR_WHOLE
async def test_client_keeps_logprobs_and_ids_that_it_asked_for(
    start_router: StartRouter, fleet: Pairs, stream: bool
) -> None:
    router = await started(start_router, fleet)
    while not canaries(router, "disagreed"):
        text = await ask(router, stream=stream, logprobs=3, return_token_ids=True, **GREEDY)
        assert "right" in text
        assert "<11>" in text
        assert "token_ids" in text
    asked = {one.json.get("return_tokens_as_token_ids") for e in fleet.ds for one in e.requests}
    assert asked == {None}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**GREEDY, "n": 2},
        {**GREEDY, "min_tokens": 1},
        {**GREEDY, "response_format": {"type": "json_object"}},
        {**GREEDY, "logit_bias": {"1": 5}},
        {**GREEDY, "repetition_penalty": 1.1},
        {**GREEDY, "logprobs": None},
        {**GREEDY, "tool_choice": "required"},
    ],
)
async def test_other_requests_are_sent_as_they_are(
    start_router: StartRouter, fleet: Pairs, fields: dict[str, Any]
) -> None:
    fleet.broken.clear()
    router = await started(start_router, fleet, kv_canary=1e-9)
    await ask(router, **fields)
    for engine in (*fleet.ps, *fleet.ds):
        for request in engine.requests:
            assert not {"top_logprobs", "return_token_ids", "return_tokens_as_token_ids"} & set(
                request.json
            )
    assert canaries(router, "agreed") == 0


@STREAMED_OR_WHOLE
async def test_pushed_kv_is_compared_with_a_later_answer_of_its_prefill_engine(
    start_router: StartRouter, fleet: Pairs, stream: bool
) -> None:
    """The decode engine's answer is complete before the prefill engine answers."""
    decoded = asyncio.Event()
    for number, engine in enumerate(fleet.ps):
        address = {"remote_host": "h", "remote_port": 5600, "tp_size": 1, "pp_size": 1}
        rank = {"dp_rank": 0, "remote_engine_id": f"p-{number}", **address}
        engine.identity = {"transfer_modes": ["push"], "capabilities": [], "ranks": [rank]}
        engine.usual = answer_after(decoded, engine.usual)
    for engine in fleet.ds:
        engine.identity = {"transfer_modes": ["push"], "capabilities": []}
        engine.usual = setting(decoded, engine.usual)
    router = await started(start_router, fleet, identified=True)
    for _ in range(4):
        decoded.clear()
        assert "right" in await ask(router, stream=stream, **GREEDY)
    assert (0, 0) in fleet.used
    assert canaries(router, "disagreed") == 1
    assert canaries(router, "agreed") == 4
    assert canaries(router, "not_comparable") == 0


async def test_canary_is_off_with_share_of_zero(start_router: StartRouter, fleet: Pairs) -> None:
    router = await started(start_router, fleet, kv_canary=0)
    assert "wrong" in await ask(router, **GREEDY)
    assert "logprobs" not in fleet.ps[0].requests[-1].json


async def test_engine_that_refuses_logprobs_gets_request_without_them(
    start_router: StartRouter, fleet: Pairs
) -> None:
    fleet.broken.clear()
    before = fleet.ps[0].usual

    async def refuse(request: Received, peer: Peer) -> None:
        if request.json.get("logprobs"):
            await peer.answer({"error": {"message": "too many logprobs"}}, 400)
        else:
            await before(request, peer)

    fleet.ps[0].usual = refuse
    router = await start_router(ps=fleet.ps[:1], ds=fleet.ds[:1], **ALWAYS)
    await router.knows_its_engines()
    for _ in range(3):
        await ask(router, **GREEDY)
    sent = ["logprobs" in one.json for one in fleet.ps[0].requests]
    assert sent == [True, False, False, False]


async def test_engine_that_reports_no_ids_is_not_comparable(
    start_router: StartRouter, fleet: Pairs
) -> None:
    async def ignores(request: Received, peer: Peer) -> None:
        content = {"id": "c", "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}
        await peer.answer(content)

    fleet.ds[0].usual = fleet.ds[1].usual = ignores
    router = await started(start_router, fleet)
    await ask(router, **GREEDY)
    assert canaries(router, "not_comparable") == 1
    assert not router.gateway.fleet.unreachable_pairs


def token(name: str, rest: float | None = None, **logprobs: float) -> FirstToken:
    return FirstToken(name, logprobs, rest)


@pytest.mark.parametrize(
    ("prefilled", "decoded", "is_greedy", "differs"),
    [
        # Only the decode engine's token is known.
        (token("a", -3, a=-0.1, b=-2), token("a"), True, False),
        (token("a", -3, a=-0.1, b=-0.1 - 2 * GREEDY_BOUND), token("b"), True, True),
        (token("a", -3, a=-0.1, b=-0.1 - 0.5 * GREEDY_BOUND), token("b"), True, False),
        (token("a", -5, a=-0.1, b=-5), token("z"), True, True),
        # A flat distribution: a token outside of the list may be nearly as likely.
        (token("a", -4.1, a=-4.0, b=-4.1), token("z"), True, False),
        # A sampled token says nothing of itself.
        (token("b", -3, a=-0.1, b=-2), token("a", -3, a=-0.1, b=-2), False, False),
        (token("a", -9, a=-0.1, b=-2), token("c", -9, a=-0.1 - 2 * LOGPROB_BOUND), False, True),
        (token("a", -9, a=-0.1), token("c", -6, c=-0.1, b=-6), False, True),
        (token("a", -6, a=-5, b=-6), token("c", -5.5, c=-0.1, b=-5.5), False, False),
    ],
)
def test_difference_is_judged_by_bounds(
    prefilled: FirstToken, decoded: FirstToken, is_greedy: bool, differs: bool
) -> None:
    worst = difference(prefilled, decoded, is_greedy)
    assert worst is not None
    assert (worst > 1) is differs


def test_tokens_without_lists_are_not_comparable() -> None:
    assert difference(token("a", a=-0.1), token("b", b=-0.1), True) is None
    assert difference(token("a"), token("b", -2, b=-0.1), False) is None


def test_bodies_of_both_legs_are_json() -> None:
    for fields in (b'"a":1', b""):
        start, end = Canary(True, fields, fields).decode_body((b'{"model":"m"', b"}"))
        assert parse_object(bytes(start) + end) is not None
