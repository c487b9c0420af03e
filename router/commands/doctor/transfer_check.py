"""The check of a transfer: a prompt goes through a pair of engines, and its KV must have moved.

The first tokens of both engines are compared, as the running router's canary does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping, Sequence
from time import monotonic as now
from typing import NamedTuple

from router.commands.doctor.checks import (
    KV_CONTENT,
    Findings,
    cure_of,
    failure_text,
    timeout_text,
)
from router.fleet.engine import Engine, EngineRole, Health
from router.fleet.fleet import facts_of
from router.fleet.kv_facts import Difference
from router.fleet.kv_protocol import SGLANG, TRTLLM
from router.fleet.metrics_page import METRICS_PATH
from router.fleet.pair_rates import TransferTotals, stock_totals
from router.fleet.partners import find_difference
from router.fleet.probes import json_of
from router.fleet.unreachable_pairs import WRONG_KV_CURE
from router.http_client.errors import UpstreamError
from router.openai.errors import EngineError, EngineRejectedError, KvDiffersError, RequestError
from router.proxy.canary import make_test_canary
from router.proxy.gateway import Gateway
from router.proxy.warmup import PairAnswer, send_test_request
from router.ui.engine_reports import (
    LEASES_PATH,
    Transfer,
    get_page,
    hash_request_id,
    parse_transfers,
)

# An engine reports a transfer a moment after the answer.
TRANSFER_REPORT_TIMEOUT_S = 2.0
REPORT_POLL_S = 0.1
LOADED_METRIC = "vllm:prompt_tokens_by_source_total"
LOADED_TOKENS = re.compile(
    rb'^%b\{[^}]*source="external_kv_transfer"[^}]*\} (\S{1,32})$' % LOADED_METRIC.encode(), re.M
)


def healthy_engines(engines: Sequence[Engine], role: EngineRole) -> list[Engine]:
    found = [engine for engine in engines if engine.health is Health.HEALTHY]
    return [engine for engine in found if engine.role.plays(role)]


class CheckedPair(NamedTuple):
    prefiller: Engine
    decoder: Engine

    def __str__(self) -> str:
        return f"{self.prefiller.name} -> {self.decoder.name}"

    @property
    def difference(self) -> Difference | None:
        return find_difference(facts_of(self.prefiller), facts_of(self.decoder))


class MovedKv(NamedTuple):
    """The KV of one prompt that has moved. The figures are 0 if no engine reports them."""

    bytes: float = 0.0
    seconds: float = 0.0
    has_agreed: bool = False
    """Both engines have computed the same first token."""


class StockCounts(NamedTuple):
    """The counters of a stock engine's metrics page: the KV that it has loaded since its start."""

    tokens: float | None = None
    """Prompt tokens, by whatever connector; None without such a metric."""
    totals: TransferTotals | None = None
    """The transfers of a NixlConnector; None without one."""


async def check_transfer(
    gateway: Gateway,
    found: Findings,
    name: str,
    pair: CheckedPair,
    timeout_s: float,
    prompt: Sequence[int],
) -> MovedKv | None:
    """Send a prompt through a pair, and report whether KV moved. Return what moved, None if nothing
    is known to have moved."""
    has_page = pair.decoder.capabilities.kv.has_page
    before = None if has_page else await stock_counts(pair.decoder)
    try:
        async with asyncio.timeout(timeout_s):
            answer, has_agreed = await _send(gateway, pair, prompt)
    except TimeoutError:
        cure = "look at the logs of both engines, or set --timeout"
        found.fail(name, timeout_text(pair, timeout_s), cure)
    except KvDiffersError as error:
        found.fail(KV_CONTENT, f"wrong KV: {error}", WRONG_KV_CURE)
    except (UpstreamError, EngineError, RequestError) as error:
        cure = f"look at the log of {pair.decoder.name}: can it reach the side channel and UCX "
        cure += f"port of {pair.prefiller.name}?"
        found.fail(name, f"no: {failure_text(pair, error, timeout_s)}", cure_of(error, cure))
    else:
        moved = await _find_moved(found, name, pair, answer, before, len(prompt))
        return None if moved is None else moved._replace(has_agreed=has_agreed)
    return None


async def _send(
    gateway: Gateway, pair: CheckedPair, prompt: Sequence[int]
) -> tuple[PairAnswer, bool]:
    """Return whether both engines have the same first token as well."""
    canary = make_test_canary(has_logprobs=False)
    answer = await send_test_request(gateway, *pair, prompt, canary)
    if canary.is_unsure:
        # The decode engine now has the KV in its cache, right or wrong.
        canary = make_test_canary(has_logprobs=True)
        with contextlib.suppress(EngineRejectedError):  # they may refuse log-probabilities
            await send_test_request(gateway, *pair, prompt, canary)
    return answer, canary.has_agreed


async def _find_moved(
    found: Findings,
    name: str,
    pair: CheckedPair,
    answer: PairAnswer,
    before: StockCounts | None,
    num_tokens: int,
) -> MovedKv | None:
    """`before`: the counts of a stock decode engine before the request of `num_tokens` tokens."""
    if not answer.offers_kv:
        text = f"no: {pair.prefiller.name} sends no kv_transfer_params"
        found.fail(name, text, "start it with --kv-transfer-config (docs/engine-configuration.md)")
        return None
    transfer, tells = await find_transfer(pair, answer.request_id)
    if transfer is not None:
        blocks = f"{transfer.blocks} block{'' if transfer.blocks == 1 else 's'}"
        found.ok(name, f"yes, {blocks} in {transfer.seconds * 1000:.1f} ms")
        return MovedKv(transfer.bytes, transfer.seconds)
    if tells:
        text = f"no: {pair.decoder.name} has computed the prompt itself"
        found.fail(name, text, "look at its log for the reason")
    elif pair.prefiller.kv_protocol in (SGLANG, TRTLLM):
        found.ok(name, "yes: the decode engine has answered, and computes no such prompt itself")
        return MovedKv()
    elif before is None or before.tokens is None:
        text = "answered, but the engines do not report transfers: no page /disagg/leases, nor "
        found.skip(name, text + "vLLM's metric of loaded prompt tokens")
    elif (loaded := await _wait_for_loads(pair.decoder, before)).tokens:
        found.ok(name, f"yes, {loaded.tokens:.0f} tokens")
        if loaded.totals is None or loaded.tokens > num_tokens:
            return MovedKv()  # other requests have loaded KV meanwhile, maybe from other engines
        return MovedKv(loaded.totals.bytes, loaded.totals.seconds)
    else:
        text = f"answered, but {LOADED_METRIC} has not grown at the decode engine: it may have "
        found.skip(name, text + "computed the prompt itself")
    return None


async def _wait_for_loads(engine: Engine, before: StockCounts) -> StockCounts:
    """Return what a stock engine counts more than before; no tokens if none in time."""
    latest = now() + TRANSFER_REPORT_TIMEOUT_S
    while True:
        counts = await stock_counts(engine)
        tokens = (counts.tokens or 0.0) - (before.tokens or 0.0)
        if tokens > 0 or now() >= latest:
            old, new = before.totals, counts.totals
            return StockCounts(max(tokens, 0.0), new and old and new.plus(old, -1.0))
        await asyncio.sleep(REPORT_POLL_S)


async def stock_counts(engine: Engine) -> StockCounts:
    answer = await get_page(engine, METRICS_PATH)
    if answer is None:
        return StockCounts()
    found = LOADED_TOKENS.findall(answer.body)
    return StockCounts(sum(map(float, found)) if found else None, stock_totals(answer.body))


async def find_transfer(engines: Sequence[Engine], request_id: str) -> tuple[Transfer | None, bool]:
    """Return a request's transfer, if an engine reports it in time; and whether engines report
    transfers at all."""
    digest, latest = hash_request_id(request_id), now() + TRANSFER_REPORT_TIMEOUT_S
    while True:
        pages = await asyncio.gather(*map(_transfers_of, engines))
        for page in pages:
            for operation in ("READ", "WRITE"):
                if page is not None and (operation, digest) in page:
                    return page[operation, digest], True
        tells = any(page is not None for page in pages)
        if not tells or now() >= latest:
            return None, tells
        await asyncio.sleep(REPORT_POLL_S)


async def _transfers_of(engine: Engine) -> Mapping[tuple[str, str], Transfer] | None:
    answer = await get_page(engine, LEASES_PATH)
    content = None if answer is None else json_of(answer)
    return None if content is None else parse_transfers(content, now()).transfers
