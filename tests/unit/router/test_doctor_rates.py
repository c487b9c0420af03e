"""disagg-router doctor moves a prompt over each pair of engines, and compares the rates."""

import json
from collections import Counter
from typing import Any, cast

import pytest

from router.commands.doctor import rate_check
from router.commands.doctor.checks import Check, State
from router.commands.doctor.rate_check import MAX_PAIRS, choose_fitting_pairs
from router.fleet.engine import DECODE, PREFILL, Engine, EngineRole, EngineSpec, Health
from router.http_client.pool import EnginePool
from router.proxy.warmup import WARM_UP_TOKENS
from router.settings import Address
from router.ui.engine_reports import hash_request_id
from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.engine_scripts import usual_decode
from tests.unit.router.mock_engine import PARAMS, USUAL
from tests.unit.router.test_doctor import OWN_ID, at, examine, failed, found, settings_of

BYTES_PER_TOKEN = 1000
SLOW_S, USUAL_S = 0.1, 0.001


class MeasuredFleet:
    """Mock engines that report a transfer for each request. The first `num_slow` large prompts of
    `slow_pair` take SLOW_S. Prefill legs have token 7, and decode legs `decoders_token`."""

    def __init__(self) -> None:
        self.slow_pair, self.num_slow = (0, 0), 100
        self.decoders_token = 7
        self.logprobs = {7: -0.1, 8: -9.0}
        self.large: list[tuple[tuple[int, int], tuple[int, ...]]] = []
        """The large prompts, with the ports of the engines between which they moved."""

    def add(self, engine: MockEngine) -> None:
        transfers: list[dict[str, Any]] = []

        async def answer(request: Received, peer: Peer) -> None:
            prompt, params = request.json["prompt"], request.json["kv_transfer_params"]
            if params.get("do_remote_decode"):
                given = PARAMS | {"remote_engine_id": str(engine.port)}
                await peer.answer(self._answer(request, 7) | {"kv_transfer_params": given})
                return
            pair = int(params["remote_engine_id"]), engine.port
            if len(prompt) > WARM_UP_TOKENS:
                self.large.append((pair, tuple(prompt)))
            num_large = sum(one == pair for one, _ in self.large)
            is_slow = pair == self.slow_pair and num_large <= self.num_slow
            found = OWN_ID.search(request.header("x-request-id") or "")
            moved = {"what": "READ", "engine_id": "p", "blocks": 4, "age_seconds": 0}
            moved |= {"found_by": hash_request_id(found[0] if found else "")}
            moved |= {"bytes": len(prompt) * BYTES_PER_TOKEN}
            transfers.append(moved | {"seconds": SLOW_S if is_slow else USUAL_S})
            page = {"ranks": [{"transfers": transfers}]}
            engine.pages["/disagg/leases"] = json.dumps(page).encode()
            await peer.answer(self._answer(request, self.decoders_token))

        engine.identity, engine.usual = at(engine.port), answer

    def _answer(self, request: Received, token: int) -> dict[str, Any]:
        listed = {f"token_id:{one}": logprob for one, logprob in self.logprobs.items()}
        choice: dict[str, Any] = {"index": 0, "text": "x"}
        if request.json.get("logprobs"):
            logprobs: dict[str, Any] = {"tokens": [f"token_id:{token}"], "top_logprobs": [listed]}
            choice["logprobs"] = logprobs | {"token_logprobs": [self.logprobs[token]]}
        elif request.json.get("return_token_ids"):
            choice["token_ids"] = [token]
        return USUAL | {"choices": [choice]}


@pytest.fixture
def fleet(p: MockEngine, p2: MockEngine, d: MockEngine, d2: MockEngine) -> MeasuredFleet:
    made = MeasuredFleet()
    for engine in (p, p2, d, d2):
        made.add(engine)
    return made


def rates(checks: list[Check]) -> list[tuple[State, str]]:
    return [(check.state, check.text) for check in checks if check.name == rate_check.NAME]


async def test_a_slow_pair_is_named_with_the_rate_of_its_neighbours(
    fleet: MeasuredFleet, p: MockEngine, p2: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    fleet.slow_pair = p.port, d2.port
    checks = await examine(settings_of([p, p2], [d, d2]))
    name = f"127.0.0.1:{p.port} -> 127.0.0.1:{d2.port}"
    text = f"{name} moves KV at 41 MB/s, its neighbours at 4.1 GB/s"
    assert rates(checks) == [(State.FAIL, text)]
    assert failed(checks) == {rate_check.NAME: text}
    assert found(checks, "KV content").text.endswith(", 4 of 4 pairs compared")


async def test_all_pairs_are_measured_and_a_prefill_engine_computes_one_prompt(
    fleet: MeasuredFleet, p: MockEngine, p2: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    checks = await examine(settings_of([p, p2], [d, d2]))
    text = "4.1 GB/s or more, 4 of 4 pairs measured with prompts of 4096 tokens"
    assert rates(checks) == [(State.OK, text)]
    pairs = sorted(pair for pair, _ in fleet.large)
    assert pairs == sorted((a.port, b.port) for a in (p, p2) for b in (d, d2))
    assert len({prompt for _, prompt in fleet.large}) == 2


async def test_a_pair_that_was_slow_once_is_measured_again(
    fleet: MeasuredFleet, p: MockEngine, p2: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    fleet.slow_pair, fleet.num_slow = (p.port, d2.port), 1
    checks = await examine(settings_of([p, p2], [d, d2]))
    assert [state for state, _ in rates(checks)] == [State.OK]


async def test_prompts_fit_into_contexts_and_caches(
    fleet: MeasuredFleet, p: MockEngine, p2: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    d.contexts = {"m": 2000}
    assert "prompts of 1999 tokens" in rates(await examine(settings_of([p, p2], [d])))[0][1]
    assert isinstance(p.identity, dict)
    p.identity["ranks"][0] |= {"num_blocks": 500, "block_size": 16}
    assert "prompts of 1000 tokens" in rates(await examine(settings_of([p, p2], [d])))[0][1]
    d.contexts = {"m": 100}
    text = "0 of 2 pairs measured: contexts or KV caches have no room for 256 tokens"
    assert rates(await examine(settings_of([p, p2], [d]))) == [(State.SKIPPED, text)]


async def test_another_first_token_than_the_prefill_engines_is_wrong_kv(
    fleet: MeasuredFleet, p: MockEngine, d: MockEngine
) -> None:
    fleet.decoders_token = 8
    (text,) = failed(await examine(settings_of([p], [d]))).values()
    assert text.startswith("wrong KV: the decode engine's first token is not the one")
    assert len(d.requests) == 2, "by token ids and by log-probabilities; not repeated, nor measured"


async def test_another_first_token_that_is_as_likely_is_no_failure(
    fleet: MeasuredFleet, p: MockEngine, d: MockEngine
) -> None:
    fleet.decoders_token, fleet.logprobs = 8, {7: -3.0, 8: -3.1}
    checks = await examine(settings_of([p], [d]))
    assert failed(checks) == {}
    assert found(checks, "KV content").text.endswith(", 1 of 1 pairs compared")


async def test_equal_first_tokens_need_no_log_probabilities(
    fleet: MeasuredFleet, p: MockEngine, d: MockEngine
) -> None:
    checks = await examine(settings_of([p], [d]))
    assert found(checks, "KV content").text.endswith(", 1 of 1 pairs compared")
    assert not any("logprobs" in one.json for one in (*p.requests, *d.requests))


async def test_an_engine_that_refuses_log_probabilities_is_measured(
    fleet: MeasuredFleet, p: MockEngine, d: MockEngine
) -> None:
    prefill = p.usual

    async def refuse(request: Received, peer: Peer) -> None:
        if "logprobs" in request.json:
            await peer.answer({"error": {"message": "no logprobs"}}, 400)
        else:
            await prefill(request, peer)

    p.usual, fleet.decoders_token = refuse, 8
    checks = await examine(settings_of([p], [d]))
    assert [state for state, _ in rates(checks)] == [State.OK]
    assert not [check for check in checks if check.name == "KV content"]


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (0, "8.19 GB/s or more, 1 of 1 pairs measured with prompts of 4096 tokens"),
        (16, "0 of 1 pairs measured"),
    ],
)
async def test_a_stock_engine_is_measured_by_its_metrics(
    p: MockEngine, d: MockEngine, others: int, text: str
) -> None:
    """`others` are tokens that other requests load at the same time."""
    tokens = transfers = 0

    def count(num_tokens: int) -> None:
        nonlocal tokens, transfers
        tokens, transfers = tokens + num_tokens + others, transfers + 1
        samples = (
            ('prompt_tokens_by_source_total{source="external_kv_transfer"}', tokens),
            ("nixl_xfer_time_seconds_sum", transfers * 0.5),
            ("nixl_xfer_time_seconds_count", transfers),
            ("nixl_bytes_transferred_sum", tokens * 1_000_000),
        )
        d.pages["/metrics"] = "".join(f"vllm:{name} {value}\n" for name, value in samples).encode()

    async def decode(request: Received, peer: Peer) -> None:
        count(len(request.json["prompt"]))
        await usual_decode(request, peer)

    count(0)
    d.usual = decode
    assert rates(await examine(settings_of([p], [d])))[0][1] == text


async def test_engines_that_report_no_times_get_no_further_requests(
    p: MockEngine, d: MockEngine
) -> None:
    checks = await examine(settings_of([p], [d]))
    text = "0 of 1 pairs measured: no times of transfers are reported by "
    assert rates(checks) == [(State.SKIPPED, f"{text}127.0.0.1:{d.port}")]
    assert len(d.requests) == 1


async def test_measuring_ends_in_time(
    fleet: MeasuredFleet,
    p: MockEngine,
    p2: MockEngine,
    d: MockEngine,
    d2: MockEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rate_check, "MAX_SECONDS", -1.0)
    checks = await examine(settings_of([p, p2], [d, d2]))
    assert rates(checks) == [(State.SKIPPED, "0 of 4 pairs measured, at most 64 in -1 s")]


def engines(role: EngineRole, count: int) -> list[Engine]:
    specs = (EngineSpec(role, Address(f"{role}-{n}", 1)) for n in range(count))
    found = [Engine(spec, cast(EnginePool, None)) for spec in specs]
    for engine in found:
        engine.health = Health.HEALTHY
    return found


def test_all_pairs_of_a_small_fleet_are_measured() -> None:
    pairs, count = choose_fitting_pairs([*engines(PREFILL, 2), *engines(DECODE, 3)])
    assert len(set(pairs)) == count == 6


@pytest.mark.parametrize(("num_p", "num_d"), [(64, 64), (8, 30), (1, 100)])
def test_each_engine_of_a_large_fleet_is_measured_before_any_pair_more(
    num_p: int, num_d: int
) -> None:
    pairs, count = choose_fitting_pairs([*engines(PREFILL, num_p), *engines(DECODE, num_d)])
    assert len(set(pairs)) == MAX_PAIRS
    assert count == min(num_p, MAX_PAIRS) * min(num_d, MAX_PAIRS)
    assert len({pair.decoder for pair in pairs}) == min(num_d, MAX_PAIRS)
    uses = Counter(pair.prefiller for pair in pairs)
    assert len(uses) == num_p
    assert max(uses.values()) - min(uses.values()) <= 1
