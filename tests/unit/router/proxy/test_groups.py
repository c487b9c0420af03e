"""KV moves only within a group, whichever source names the groups and whatever fails."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest

from router.fleet.engine import DEFAULT_GROUP, Intent
from router.routing.prefix_cache import PrefixAffinity
from scripts.mock_engine import MockEngine, Peer, Received, Script
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.engines import decoding, prefilling
from tests.unit.router.conversations.test_releases import CAPABLE
from tests.unit.router.conversations.test_turns import AGAIN, ASKED, chat, offered, turns
from tests.unit.router.engine_scripts import answering
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import PARAMS, running_engine

BLUE, GREEN = "b" * 64, "a" * 64
NAMES = "default-bbbbbbbb", "default-aaaaaaaa"


def identity(compatibility: str) -> dict[str, Any]:
    return {"capabilities": [], "ranks": [{"dp_rank": 0, "compatibility_hash": compatibility}]}


def name_groups(blue: Iterable[MockEngine], green: Iterable[MockEngine]) -> None:
    for mocks, name in ((blue, BLUE), (green, GREEN)):
        for mock in mocks:
            mock.identity = identity(name)


def prefill_of(name: str) -> Script:
    prefill = answering(200, {"kv_transfer_params": {**PARAMS, "remote_engine_id": name}})
    return prefill


def sources(decoder: MockEngine) -> set[str]:
    """Whose KV it was told to read."""
    legs = [r.json.get("kv_transfer_params") for r in decoder.requests if "x" in r.json]
    return {params["remote_engine_id"] for params in legs if params}


async def sources_after(router: Router, *decoders: MockEngine) -> tuple[set[str], ...]:
    """Whose KV each decode engine has been offered in thirty requests."""
    for _ in range(30):
        assert (await router.complete(x=1)).status_code == 200
    return tuple(map(sources, decoders))


async def grouped(router: Router, *names: str) -> Router:
    await eventually(lambda: router.gateway.fleet.groups == set(names))
    return router


def regroup(router: Router, mock: MockEngine, group: str) -> None:
    """As a source does that lists it anew."""
    engine = router.engine(mock)
    router.gateway.fleet.change_spec(engine, replace(engine.spec, group=group))


async def test_one_hash_and_engines_without_one_are_one_group(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.identity = identity(BLUE)
    router = await start_router()
    await router.knows_its_engines()
    assert router.gateway.fleet.groups == {"default-bbbbbbbb"}
    assert (await router.complete()).status_code == 200
    assert d.requests


def configured(digest: str | None) -> dict[str, Any]:
    """An engine of a release before the digest has none."""
    page = {**identity(BLUE), "versions": {"extension": "2"}}
    page["ranks"][0]["compatibility_factors"] = {"configuration": digest} if digest else {}
    return page


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (identity(BLUE), identity(GREEN)),
        (configured("c1"), {**configured("c1"), "versions": {"extension": "3"}}),
        (configured("c1"), configured("c2")),
        (configured("c1"), configured(None)),
    ],
    ids=["hash", "version", "configuration", "no configuration"],
)
async def test_engines_pair_by_what_they_say_of_themselves(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    p2: MockEngine,
    d2: MockEngine,
    ours: dict[str, Any],
    theirs: dict[str, Any],
) -> None:
    p.identity = d.identity = ours
    p2.identity = d2.identity = theirs
    p.usual, p2.usual = prefill_of("one"), prefill_of("two")
    router = await start_router(ps=[p, p2], ds=[d, d2])
    await eventually(lambda: len(router.gateway.fleet.groups) == 2)
    assert await sources_after(router, d, d2) == ({"one"}, {"two"})


async def test_the_dead_move_nobody(
    start_router: StartRouter, p: MockEngine, d: MockEngine, p2: MockEngine
) -> None:
    p.identity = d.identity = identity(BLUE)
    p2.identity = identity(GREEN)
    router = await start_router(ps=[p, p2])
    await grouped(router, *NAMES)
    p2.healthy = False
    await eventually(lambda: not router.engine(p2).is_usable)
    await grouped(router, *NAMES)
    for _ in range(5):
        assert (await router.complete()).status_code == 200
    assert not [r for r in p2.requests if r.path != "/health"]


async def test_hashes_that_begin_alike_are_groups_all_the_same(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.identity, d.identity = identity("sha256:" + BLUE), identity("sha256:" + "b" * 63 + "c")
    router = await start_router()
    await router.knows_its_engines()
    assert len(router.gateway.fleet.groups) == 2
    assert all(name.startswith("default-sha256:b-") for name in router.gateway.fleet.groups)


async def test_who_comes_back_without_a_name_is_not_in_the_group_of_who_was_there_before(
    start_router: StartRouter, p: MockEngine, d: MockEngine, p2: MockEngine, d2: MockEngine
) -> None:
    name_groups((p, d), (p2, d2))
    router = await start_router(ps=[p, p2], ds=[d, d2])
    await grouped(router, *NAMES)
    d.healthy = False
    await eventually(lambda: not router.engine(d).is_usable)
    assert router.engine(d).group == "default-bbbbbbbb"
    d.identity, d.healthy = None, True
    await eventually(lambda: router.engine(d).is_usable)
    await eventually(lambda: router.engine(d).group == DEFAULT_GROUP)


async def test_a_group_that_has_too_much_to_do_costs_no_request_while_there_is_another(
    start_router: StartRouter, p: MockEngine, d: MockEngine, p2: MockEngine, d2: MockEngine
) -> None:
    name_groups((p, d), (p2, d2))
    router = await start_router(ps=[p, p2], ds=[d, d2])
    await router.knows_its_engines()
    d2.usual = answering(503, {}, retry_after="20")
    for _ in range(30):
        assert (await router.complete()).status_code == 200
    assert len(d2.requests) <= 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_leaves_a_group_where_nobody_is_left(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    p2: MockEngine,
    d2: MockEngine,
    role: str,
) -> None:
    """And what was prefilled in it is released, not read in another one."""
    name_groups((p, d), (p2, d2))
    p.usual, p2.usual = prefill_of("blue"), prefill_of("green")
    router = await start_router(ps=[p, p2], ds=[d, d2])
    await grouped(router, *NAMES)
    router.gateway.fleet.set_group_weights({"default-aaaaaaaa": 0})
    failing = p if role == "prefill" else d
    failing.usual = answering(500, {})
    for _ in range(3):
        assert (await router.complete(x=1)).status_code == 200
    assert sources(d2) == {"green"}
    assert len([r for r in d2.requests if "x" in r.json]) == 3
    await router.settled()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("asked", [{"n": 2}, {}, {"stream": True}])
async def test_a_request_that_fails_in_every_group_comes_to_an_end(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    p2: MockEngine,
    d2: MockEngine,
    role: str,
    asked: dict[str, Any],
) -> None:
    """It goes on to each group once. Without an end the event loop would stand still."""
    name_groups((p, d), (p2, d2))
    router = await start_router(ps=[p, p2], ds=[d, d2])
    await grouped(router, *NAMES)
    for mock in (p, p2) if role == "prefill" else (d, d2):
        mock.usual = answering(500, {})
    alone = role == "prefill" and "n" in asked
    assert (await router.complete(**asked)).status_code == (200 if alone else 502)
    assert all(len(mock.requests) <= 2 for mock in (p, p2, d, d2))
    await router.settled()


async def test_kv_is_not_read_by_a_decoder_that_changed_its_group_meanwhile(
    start_router: StartRouter, p: MockEngine, d: MockEngine, p2: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(ps=[p, p2], ds=[d, d2])
    for mock, group in ((p, "blue"), (d, "blue"), (p2, "green"), (d2, "green")):
        regroup(router, mock, group)
    router.gateway.fleet.set_group_weights({"green": 0})

    async def prefill(request: Received, peer: Peer) -> None:
        regroup(router, d, "green")
        await prefill_of("blue")(request, peer)

    p.usual, p2.usual = prefill, prefill_of("green")
    assert (await router.complete(x=1)).status_code == 200
    assert sources(d) | sources(d2) == {"green"}
    await router.settled()


async def test_weights_change_while_it_runs(
    start_router: StartRouter, p: MockEngine, d: MockEngine, p2: MockEngine, d2: MockEngine
) -> None:
    name_groups((p, d), (p2, d2))
    router = await start_router(ps=[p, p2], ds=[d, d2])
    await grouped(router, *NAMES)
    for weights, sent in (({"default-aaaaaaaa": 0}, d), ({"default-bbbbbbbb": 0}, d2)):
        router.gateway.fleet.set_group_weights(weights)
        d.requests.clear()
        d2.requests.clear()
        await asyncio.gather(*(router.complete() for _ in range(10)))
        assert (len(sent.requests), len(d.requests) + len(d2.requests)) == (10, 10)


async def test_a_conversation_stays_in_its_group_until_that_is_gone(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """Then it begins anew elsewhere: its KV is offered to nobody who cannot read it."""
    async with running_engine(prefilling()) as p2, running_engine(decoding()) as d2:
        p.usual, d.usual = prefilling(), decoding()
        for mock, name in ((p, BLUE), (d, BLUE), (p2, GREEN), (d2, GREEN)):
            mock.identity = identity(name) | {"capabilities": CAPABLE["capabilities"]}
        router = await start_router(ps=[p, p2], ds=[d, d2])
        await grouped(router, *NAMES)
        fleet = router.gateway.fleet
        fleet.set_group_weights({"default-aaaaaaaa": 0})
        await chat(router, ASKED)
        fleet.set_group_weights({"default-bbbbbbbb": 0})
        await chat(router, AGAIN)
        assert turns(router, "hit") == 1
        assert not p2.requests
        fleet.set_intent(router.engine(p), Intent.DRAINING)
        await chat(router, [*AGAIN, *AGAIN[1:]])
        assert p2.requests
        assert offered(p2) is None


async def test_nothing_is_remembered_of_groups_that_are_gone(
    start_router: StartRouter, p: MockEngine, d: MockEngine, p2: MockEngine, d2: MockEngine
) -> None:
    """Engines that are updated unseen, again and again, are new groups each time."""
    changes = {"prefill_policy": "prefix", "decode_policy": "prefix"}
    router = await start_router(ps=[p, p2], ds=[d, d2], **changes)
    await router.knows_its_engines()
    fleet = router.gateway.fleet
    router.engine(d2).capabilities.compatibility = "other"
    for number in range(10):
        for mock in (p, p2, d):
            router.engine(mock).capabilities.compatibility = f"{number:08x}"
            fleet.note_identity(router.engine(mock))
        await grouped(router, "default-other", f"default-{number:08x}")
        assert (await router.complete(prompt="x" * 50_000)).status_code == 200
    for policies in (router.gateway.routes.prefill, router.gateway.routes.decode):
        assert policies.keys() <= fleet.groups


async def test_a_policy_is_told_how_it_ended_in_the_group_where_it_did(
    start_router: StartRouter, p: MockEngine, d: MockEngine, p2: MockEngine, d2: MockEngine
) -> None:
    name_groups((p, d), (p2, d2))
    # So that even one decoder is remembered for what it holds.
    changes = {"decode_policy": "prefix", "min_remote_prefill_tokens": 1}
    router = await start_router(ps=[p, p2], ds=[d, d2], **changes)
    await grouped(router, *NAMES)
    d.usual = d2.usual = answering(500, {})
    assert (await router.complete(prompt="x" * 50_000)).status_code == 502
    policies = router.gateway.routes.decode.values()
    assert len(router.gateway.routes.index), "the decode engines were noted for the prompt"
    assert not any(cast(PrefixAffinity, policy).num_unanswered for policy in policies)
