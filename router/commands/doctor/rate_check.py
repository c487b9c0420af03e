"""The check of rates: the doctor moves a prompt over each pair of engines, and names slow pairs.

A running fleet must not suffer from that, so the work is bounded: MAX_PAIRS pairs, one prompt at a
time, MAX_ROUNDS times for pairs that were slow or failed, and MAX_SECONDS in all. A prefill engine
computes one prompt in a round, because its prefix cache has the prompt for its further partners.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from random import Random
from time import monotonic as now

from router.commands.doctor.checks import KV_CONTENT, Check, Findings, State, is_repeated
from router.commands.doctor.transfer_check import (
    CheckedPair,
    check_transfer,
    healthy_engines,
    stock_counts,
)
from router.fleet.engine import LEGS, Engine
from router.fleet.pair_rates import SLOW_CURE, Pair, PairRate, find_slow, rate_text
from router.proxy.gateway import Gateway
from router.proxy.warmup import PROMPT_TOKEN_IDS, WARM_UP_TOKENS, can_pair

NAME = "KV rate"
MAX_PAIRS = 64
# Of each role. More could not all be in one of MAX_PAIRS pairs.
MAX_ENGINES = MAX_PAIRS
MAX_SECONDS = 60.0
MAX_ROUNDS = 3
# The prompt, if contexts and caches allow it. A smaller one than MIN_TOKENS shows no rate.
MAX_TOKENS, MIN_TOKENS = 4096, 256
# The largest share of an engine's KV cache that the prompt may take.
CACHE_SHARE = 8


def choose_fitting_pairs(engines: Sequence[Engine]) -> tuple[list[CheckedPair], int]:
    """Return up to MAX_PAIRS pairs of engines that fit, and how many there are. Each engine is in
    one pair before any is in two, as far as its partners allow it."""
    sides = (healthy_engines(engines, role)[:MAX_ENGINES] for role in LEGS)
    possible = [CheckedPair(p, d) for p, d in product(*sides) if p is not d and can_pair(p, d)]
    possible = [pair for pair in possible if pair.difference is None]
    num_pairs, uses = len(possible), Counter[Engine]()
    chosen: list[CheckedPair] = []
    while possible and len(chosen) < MAX_PAIRS:
        least = min(possible, key=lambda pair: sorted(uses[engine] for engine in pair))
        possible.remove(least)
        uses.update(least)
        chosen.append(least)
    return chosen, num_pairs


async def check_rates(
    gateway: Gateway,
    pairs: Sequence[CheckedPair],
    num_pairs: int,
    timeout_s: float,
    progress: Callable[[str], None],
) -> list[Check]:
    """Measure these of `num_pairs` pairs one by one, and compare each one with its neighbours."""
    found, failed = Findings("fleet"), defaultdict[CheckedPair, list[Check]](list)
    rates: dict[Pair, PairRate] = {}
    agreed: set[CheckedPair] = set()
    size, latest = _prompt_tokens(pairs), now() + MAX_SECONDS
    reporting = {d: await _reports_times(d) for d in dict.fromkeys(d for _, d in pairs)}
    left = [pair for pair in pairs if reporting[pair.decoder] and size >= MIN_TOKENS]
    for _ in range(MAX_ROUNDS):
        prompts = {p: _random_prompt(size) for p, _ in left}
        for pair in left:
            if now() > latest:
                break
            progress(f"the rate of KV from {pair}")
            one = Findings(str(pair))
            check = partial(check_transfer, gateway, one, "KV moved", pair, timeout_s)
            # The first transfer of a pair includes a handshake.
            moved = await check(_random_prompt(WARM_UP_TOKENS))
            moved = moved and await check(prompts[pair.prefiller])
            failed[pair] = [check for check in one.checks if check.state is State.FAIL]
            if moved is not None and moved.has_agreed:
                agreed.add(pair)
            if moved is not None and moved.seconds:
                rate, name = PairRate(moved.bytes / moved.seconds, moved.seconds), _names(pair)
                # Whatever else may delay a transfer, the path is as fast as the fastest one.
                rates[name] = max(rate, rates.get(name, rate))
        slow = find_slow(rates)
        slow_pairs = {pair for pair in left if _names(pair) in slow and not failed[pair]}
        left = [pair for pair in left if pair in slow_pairs or is_repeated(failed[pair])]
    for name, found_slow in slow.items():
        found.fail(NAME, found_slow.describe(name), SLOW_CURE)
    measured = f"{len(rates)} of {num_pairs} pairs measured"
    if rates and not slow:
        lowest = rate_text(min(rates.values()).bytes_per_second)
        found.ok(NAME, f"{lowest} or more, {measured} with prompts of {size} tokens")
    if agreed:
        compared = f"{len(agreed)} of {num_pairs} pairs compared"
        found.ok(KV_CONTENT, f"both engines have the same first token, {compared}")
    if len(rates) < num_pairs:
        reason = ""
        if silent := [decoder.name for decoder, reports in reporting.items() if not reports]:
            reason = f": no times of transfers are reported by {', '.join(silent[:3])}"
        elif size < MIN_TOKENS:
            reason = f": contexts or KV caches have no room for {MIN_TOKENS} tokens"
        elif len(rates) == MAX_PAIRS or now() > latest:
            reason = f", at most {MAX_PAIRS} in {MAX_SECONDS:g} s"
        found.skip(NAME, measured + reason)
    return [*found.checks, *(check for checks in failed.values() for check in checks)]


def _random_prompt(num_tokens: int) -> list[int]:
    return Random().choices(PROMPT_TOKEN_IDS, k=num_tokens)


def _names(pair: CheckedPair) -> Pair:
    return pair.prefiller.name, pair.decoder.name


def _prompt_tokens(pairs: Sequence[CheckedPair]) -> int:
    """Return the length of the prompts: all the same, or rates could not be compared."""
    engines = {engine for pair in pairs for engine in pair}
    contexts = [length - 1 for engine in engines for length in engine.context_lengths.values()]
    caches = [engine.cache_tokens // CACHE_SHARE for engine in engines if engine.cache_tokens]
    return min([MAX_TOKENS, *contexts, *caches])


async def _reports_times(decoder: Engine) -> bool:
    has_page = decoder.capabilities.kv.has_page
    return has_page or (await stock_counts(decoder)).totals is not None
