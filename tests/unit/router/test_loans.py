"""Legs name engines from whose prefix caches their engine can borrow. The engines are mock engines
with honest answers; real ones are in tests/vllm/test_loans.py."""

from time import monotonic as now
from typing import Any

import pytest

from router.fleet.engine import Intent
from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import fails
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import PARAMS, USUAL, LendingEngines

PROMPT = "".join(f"{number:06} and so on. " for number in range(500))  # 2,250 tokens
TOKENS = len(PROMPT) // 4
CHUNKED = TOKENS // 256 * 256
FAR_TOO_BUSY = 1_000_000


@pytest.fixture
def lending() -> LendingEngines:
    return LendingEngines()


@pytest.fixture
async def start_lending(
    start_router: StartRouter, lending: LendingEngines, p: MockEngine, p2: MockEngine, d: MockEngine
) -> StartRouter:
    """Start a router before two prefill engines that lend, of which the first holds PROMPT."""

    async def start(**changes: Any) -> Router:
        lending.add(p, "p-1")
        lending.add(p2, "p-2")
        policies = {"prefill_policy": "prefix", "decode_policy": "prefix"}
        router = await start_router(ps=[p, p2], **(policies | changes))
        await router.knows_its_engines()
        router.engine(p2).add_load(1, FAR_TOO_BUSY)
        assert (await router.complete(prompt=PROMPT)).status_code == 200
        router.engine(p2).add_load(-1, -FAR_TOO_BUSY)
        assert (len(p.requests), len(p2.requests)) == (1, 0)
        router.engine(p).add_load(1, FAR_TOO_BUSY)
        return router

    return start


def params_of(engine: MockEngine) -> dict[str, Any]:
    params: dict[str, Any] = engine.last.json["kv_transfer_params"]
    return params


def loans(router: Router, outcome: str) -> float:
    return router.metric("prefix_loans_total", outcome=outcome)


async def release(router: Router, engine: MockEngine) -> None:
    router.engine(engine).add_load(-1, -FAR_TOO_BUSY)
    await router.settled()


async def test_an_engine_that_lacks_a_prompt_is_named_the_one_that_holds_it(
    start_lending: StartRouter, p: MockEngine, p2: MockEngine, d: MockEngine
) -> None:
    router = await start_lending()
    await router.complete(prompt=PROMPT + "And now?")
    assert params_of(p2)["do_remote_decode"] is True
    assert params_of(p2)["holders"] == [
        {
            "remote_engine_id": "p-1",
            "remote_host": "10.9.8.7",
            "remote_port": 5600,
            "tp_size": 1,
            "expected_tokens": CHUNKED,
        }
    ]
    assert (loans(router, "granted"), loans(router, "refused")) == (1, 0)
    assert router.metric("prefix_loan_tokens_total") == TOKENS
    # The params reach the decode engine as they are, and the second engine holds the prompt now.
    assert params_of(d)["remote_engine_id"] == "p-2"
    await router.complete(prompt=PROMPT + "And now?")
    assert "holders" not in params_of(p2)
    await release(router, p)


async def test_what_is_borrowed_is_no_load_for_the_prefill_engine(
    start_lending: StartRouter, p: MockEngine, p2: MockEngine
) -> None:
    router = await start_lending()
    seen: list[int] = []
    answer = p2.usual

    async def look(request: Received, peer: Peer) -> None:
        seen.append(router.engine(p2).tokens_in_flight)
        await answer(request, peer)

    p2.usual = look
    await router.complete(prompt=PROMPT + "w " * 600)
    assert seen == [pytest.approx(TOKENS + 300 - CHUNKED, abs=50)]
    await release(router, p)


async def test_a_refusal_corrects_what_the_router_believes(
    start_lending: StartRouter, lending: LendingEngines, p: MockEngine, p2: MockEngine
) -> None:
    router = await start_lending()
    lending.prompts["p-1"].clear()  # evicted
    await router.complete(prompt=PROMPT)
    assert (loans(router, "granted"), loans(router, "refused")) == (0, 1)
    router.gateway.fleet.on_lost(router.engine(p2))
    await router.complete(prompt=PROMPT)
    assert len(p2.requests) == 2
    assert "holders" not in params_of(p2)
    await release(router, p)


async def test_a_holder_that_lends_a_part_is_believed_to_hold_the_rest(
    start_lending: StartRouter, lending: LendingEngines, p: MockEngine, p2: MockEngine
) -> None:
    """An engine lends an eighth of its cache at most."""
    router = await start_lending()
    lending.most = TOKENS // 3
    await router.complete(prompt=PROMPT)
    assert loans(router, "granted") == 1
    router.gateway.fleet.on_lost(router.engine(p2))
    lending.prompts["p-2"].clear()
    await router.complete(prompt=PROMPT)
    assert [one["expected_tokens"] for one in params_of(p2)["holders"]] == [CHUNKED]
    assert loans(router, "granted") == 2
    await release(router, p)


async def test_the_holder_that_has_lent_is_recorded_and_the_others_are_corrected(
    start_lending: StartRouter,
    lending: LendingEngines,
    p: MockEngine,
    p2: MockEngine,
    d: MockEngine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="disagg_router.access")
    lending.add(d, "d-1")
    router = await start_lending(target_itl=0)
    lending.prompts["p-1"].clear()
    lending.most = TOKENS // 3
    await router.complete(prompt=PROMPT)
    named = [one["remote_engine_id"] for one in params_of(p2)["holders"]]
    assert sorted(named) == ["d-1", "p-1"]
    router.gateway.records.flush()
    lines = [line for one in caplog.records for line in getattr(one, "lines", [])]
    assert lines[-1].content()["borrowed_from"] == router.engine(d).name
    router.gateway.fleet.on_lost(router.engine(p2))
    lending.prompts["p-2"].clear()
    await router.complete(prompt=PROMPT)
    assert [one["remote_engine_id"] for one in params_of(p2)["holders"]] == ["d-1"]
    await release(router, p)


async def test_a_holder_that_answers_too_late_is_not_believed_to_have_evicted_the_prompt(
    start_lending: StartRouter, lending: LendingEngines, p: MockEngine, p2: MockEngine
) -> None:
    router = await start_lending()
    lending.silent = True
    await router.complete(prompt=PROMPT)
    assert [loans(router, one) for one in ("granted", "refused", "failed")] == [0, 0, 1]
    router.gateway.fleet.on_lost(router.engine(p2))
    lending.silent = False
    await router.complete(prompt=PROMPT)
    assert "holders" in params_of(p2)
    await release(router, p)


@pytest.mark.parametrize(
    ("report", "outcome", "counted"),
    [(10**8, "granted", TOKENS), (-5, "refused", 0), (1e30, "refused", 0), ("9", "refused", 0)],
)
async def test_absurd_reports_of_borrowed_tokens_are_bounded_or_count_as_none(
    start_lending: StartRouter,
    p: MockEngine,
    p2: MockEngine,
    report: Any,
    outcome: str,
    counted: int,
) -> None:
    async def lies(request: Received, peer: Peer) -> None:
        params = PARAMS | {"borrowed_tokens": report}
        await peer.answer(
            USUAL | {"usage": {"prompt_tokens": TOKENS}, "kv_transfer_params": params}
        )

    router = await start_lending()
    p2.usual = lies
    assert (await router.complete(prompt=PROMPT)).status_code == 200
    assert loans(router, outcome) == 1
    assert router.metric("prefix_loan_tokens_total") == counted
    await release(router, p)


@pytest.mark.parametrize(
    ("rank", "changes"),
    [
        ({}, {"share_prefix_cache": False}),
        ({"lends": False}, {}),
        ({"borrows": False}, {}),
        ({"borrows": "yes"}, {}),
    ],
)
async def test_nothing_is_named_without_the_setting_or_the_capabilities(
    start_lending: StartRouter,
    lending: LendingEngines,
    p: MockEngine,
    p2: MockEngine,
    rank: dict[str, object],
    changes: dict[str, Any],
) -> None:
    lending.rank |= rank
    router = await start_lending(**changes)
    await router.complete(prompt=PROMPT)
    assert len(p2.requests) == 1
    assert "holders" not in params_of(p2)
    await release(router, p)


async def test_a_holder_that_drains_still_lends(
    start_lending: StartRouter, p: MockEngine, p2: MockEngine
) -> None:
    """The engines that take over need not compute the prefixes that it leaves."""
    router = await start_lending()
    router.gateway.fleet.set_intent(router.engine(p), Intent.DRAINING)
    await router.complete(prompt=PROMPT)
    assert [one["remote_engine_id"] for one in params_of(p2)["holders"]] == ["p-1"]
    assert (loans(router, "granted"), router.engine(p).in_flight) == (1, 1)
    await release(router, p)


@pytest.mark.parametrize("state", ["short", "lost", "unreachable", "other keys"])
async def test_holders_that_cannot_lend_are_not_named(
    start_lending: StartRouter, lending: LendingEngines, p: MockEngine, p2: MockEngine, state: str
) -> None:
    lending.rank["loan_scheme"] = "vllm 0.33 sha256 16"
    router = await start_lending()
    known, holder = router.gateway.fleet, router.engine(p)
    if state == "lost":
        known.note_unreachable(holder, "gone")
    elif state == "unreachable":
        known.unreachable_pairs.record_failure(holder.name, router.engine(p2).name, now())
    elif state == "other keys":
        holder.capabilities.loan_scheme = "vllm 0.33 sha256 32"
    prompt = PROMPT[:4000] if state == "short" else PROMPT
    await router.complete(prompt=prompt)
    assert "holders" not in params_of(p2)
    await release(router, p)


async def test_a_prefix_that_the_engine_has_got_meanwhile_is_no_refusal(
    start_lending: StartRouter, lending: LendingEngines, p: MockEngine, p2: MockEngine
) -> None:
    """As in a burst of prompts with one prefix: the first one borrows for all."""
    router = await start_lending()
    lending.prompts["p-2"].append(PROMPT)
    await router.complete(prompt=PROMPT + "And now?")
    assert "holders" in params_of(p2)
    assert [loans(router, one) for one in ("granted", "refused", "cached")] == [0, 0, 1]
    await release(router, p)


async def test_clients_cannot_name_holders(
    start_lending: StartRouter, p: MockEngine, p2: MockEngine
) -> None:
    router = await start_lending(share_prefix_cache=False)
    forged = {"holders": [{"remote_engine_id": "p-1", "remote_host": "6.6.6.6"}]}
    await router.complete(prompt=PROMPT, kv_transfer_params=forged)
    assert "holders" not in params_of(p2)
    await router.complete(prompt=PROMPT, vllm_xargs={"kv_transfer_params": forged})
    assert b"6.6.6.6" not in p2.last.body
    await release(router, p)


async def test_a_leg_that_is_tried_again_names_no_holders(
    start_lending: StartRouter, p: MockEngine, p2: MockEngine
) -> None:
    router = await start_lending()
    answer, p2.usual = p2.usual, fails
    assert (await router.complete(prompt=PROMPT)).status_code == 200
    assert (loans(router, "failed"), loans(router, "granted")) == (1, 0)
    assert "holders" not in params_of(p)
    p2.usual = answer
    await release(router, p)


async def test_the_decode_engine_that_answered_lends_the_prompt_to_a_new_prefill_engine(
    start_router: StartRouter, lending: LendingEngines, p: MockEngine, d: MockEngine
) -> None:
    """One prefill and one decode engine: the prefill engine has restarted with an empty cache."""
    lending.add(p, "p-1")
    lending.add(d, "d-1")
    router = await start_router(prefill_policy="prefix", decode_policy="prefix", target_itl=0)
    await router.knows_its_engines()
    await router.complete(prompt=PROMPT)
    lending.add(p, "p-2")
    router.gateway.fleet.note_unreachable(router.engine(p), "restarted")
    await eventually(lambda: router.engine(p).capabilities.borrows)
    await router.complete(prompt=PROMPT)
    assert [one["remote_engine_id"] for one in params_of(p)["holders"]] == ["d-1"]
    assert loans(router, "granted") == 1
    await router.settled()


@pytest.mark.parametrize("scope", ["pair", "request"])
async def test_a_loan_that_cannot_be_read_is_no_fault_of_the_engine(
    start_lending: StartRouter, p: MockEngine, p2: MockEngine, scope: str
) -> None:
    """The leg is tried again without holders, and a pair that cannot exchange KV is avoided."""
    router = await start_lending()
    answer, reader = p2.usual, router.engine(p2)

    async def cannot_read(request: Received, peer: Peer) -> None:
        failure = {"remote_engine_id": "p-1", "remote_host": "10.9.8.7", "remote_port": 5600}
        failure |= {"scope": scope, "reason": "it took too long"}
        await peer.answer({"error": {"message": "no", "kv_load_failure": failure}}, 500)

    p2.usual = cannot_read
    assert (await router.complete(prompt=PROMPT[: len(PROMPT) // 2])).status_code == 200
    assert (len(p2.requests), loans(router, "failed")) == (1, 1)
    assert "holders" not in params_of(p)
    assert reader.is_available
    assert not reader.failed_recently
    p2.usual = answer
    pairs, name = router.gateway.fleet.unreachable_pairs, router.engine(p).name
    assert pairs.is_avoided(name, reader.name, now()) == (scope == "pair")
    await router.complete(prompt=PROMPT)
    assert ("holders" in params_of(p2)) == (scope == "request")
    await release(router, p)


@pytest.mark.parametrize(
    ("is_stream", "text"), [(False, ""), (False, "long" * 200_000), (True, "")]
)
async def test_a_decode_engine_that_works_alone_borrows_and_its_client_sees_nothing_of_it(
    start_router: StartRouter,
    lending: LendingEngines,
    p: MockEngine,
    d: MockEngine,
    d2: MockEngine,
    is_stream: bool,
    text: str,
) -> None:
    for engine, name in ((p, "p-1"), (d, "d-1"), (d2, "d-2")):
        lending.add(engine, name)
    router = await start_router(
        ds=[d, d2], prefill_policy="prefix", decode_policy="prefix", without_prefiller="decode"
    )
    await router.knows_its_engines()
    router.engine(d2).add_load(20, FAR_TOO_BUSY)
    await router.complete(prompt=PROMPT)
    router.engine(d2).add_load(-20, -FAR_TOO_BUSY)
    router.gateway.fleet.set_intent(router.engine(p), Intent.DRAINING)
    router.engine(d).add_load(20, FAR_TOO_BUSY)
    lending.text = text
    answer = await router.complete(prompt=PROMPT + "And now?", stream=is_stream)
    router.engine(d).add_load(-20, -FAR_TOO_BUSY)
    assert answer.status_code == 200
    assert "borrowed_tokens" not in answer.text
    assert not text or answer.json()["choices"][0]["text"] == text
    assert {one["remote_engine_id"] for one in params_of(d2)["holders"]} == {"d-1", "p-1"}
    assert "do_remote_decode" not in params_of(d2)
    assert (loans(router, "granted"), loans(router, "refused")) == (1, 0)
    assert router.metric("prefix_loan_tokens_total") == TOKENS
    await router.settled()
