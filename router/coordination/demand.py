"""How many engines the offered load needs, by group and role: a signal for autoscalers.

Prefill engines need as many seconds of work per second as the tokens that they compute take at
their measured rates, and time to compute what is queued there. Decode engines need slots and room
for the KV of their requests, and steps that end within half of `target_itl`. Both are averages over
WINDOW_S.
Engines of both roles count in both, and the seconds of their prompts as the router estimates them.

All is measured when the metrics are read and each SAMPLE_INTERVAL_S, so requests do nothing for it.
Without the regular samples, a first reader would see no work. Each router counts its own requests:
the sum over all routers is what the fleet needs. A request counts by its prompt: the tokens of its
answer are not known.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from time import monotonic as now

from router.fleet.engine import BOTH, LEGS, PREFILL, Engine, EngineRole

WINDOW_S = 60.0
SAMPLE_INTERVAL_S = 5.0
# The part of its time that a prefill engine should compute, and of its KV and its slots that should
# be in use.
BUSY_SHARE = 0.8
NEEDED_SHARE = 0.7
# What is queued should be computed within this time.
DRAIN_S = 20.0
STEP_SHARE = 0.5
Pool = tuple[str, EngineRole]


class EngineDemand:
    """`read` may be called in any thread, by several at once."""

    def __init__(self, target_itl: float) -> None:
        self._target_itl = target_itl
        self._lock = threading.Lock()
        self._read_at = -math.inf
        self._computed: dict[str, float] = {}
        """By engine, the prompt tokens that it had computed at `_read_at`; of engines of both roles
        the seconds of all prompts."""
        self._needed: dict[Pool, float] = {}

    async def sample(self, engines: Callable[[], Iterable[Engine]]) -> None:
        """Measure now and then, until cancelled."""
        while True:
            self.read(engines(), now())
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    def read(self, engines: Iterable[Engine], moment: float) -> Mapping[Pool, float]:
        """Return the number of engines by group and the role of legs, of roles whose engines are
        known well enough. `moment` is in seconds of a monotonic clock."""
        pools: defaultdict[Pool, list[Engine]] = defaultdict(list)
        for engine in engines:
            for role in LEGS:
                if engine.role.plays(role):
                    pools[engine.group, role].append(engine)
        with self._lock:
            elapsed, self._read_at = moment - self._read_at, moment
            weight = -math.expm1(-elapsed / WINDOW_S)
            last, self._computed = self._computed, {}
            before, self._needed = self._needed, {}
            for pool, members in pools.items():
                found = (
                    self._prefill(members, last, elapsed)
                    if pool[1] is PREFILL
                    else self._decode(members)
                )
                if found is not None:
                    mean = before.get(pool, found)
                    self._needed[pool] = mean + weight * (found - mean)
            return dict(self._needed)

    def _prefill(
        self, engines: list[Engine], last: Mapping[str, float], elapsed: float
    ) -> float | None:
        rates = {engine.name: engine.prefill_tokens_per_second for engine in engines}
        typical = median([rate for rate in rates.values() if rate] or [0.0])
        needed, is_known = 0.0, False
        for engine in engines:
            if engine.role is BOTH:  # its tokens in flight are those of answers
                computed, queued = engine.offered_prefill_s, engine.local_prefill_s
                is_measured = engine.capabilities.step_model or rates[engine.name]
                # Each rank computes a second of work per second.
                rate = float(len(engine.ranks or ()) or 1) if is_measured else 0.0
            else:
                computed = sum(place.prefill_rate.computed for place in engine.ranks or (engine,))
                queued, rate = engine.tokens_in_flight, rates[engine.name] or typical
            self._computed[engine.name] = computed
            if rate:
                is_known = True
                new = computed - last.get(engine.name, computed)
                needed += max(0.0, new) / max(elapsed, 1e-3) / rate / BUSY_SHARE
                needed += queued / rate / DRAIN_S
        return needed if is_known else None

    def _decode(self, engines: list[Engine]) -> float | None:
        room, slots, steps, is_known = 0.0, 0.0, 0.0, False
        for engine in engines:
            tokens, model = engine.tokens_in_flight, engine.capabilities.step_model
            ranks = len(engine.ranks or ()) or 1
            # The legs of an engine of both roles are those of prompts, too.
            if (limit := engine.capabilities.max_num_seqs) and engine.role is not BOTH:
                is_known = True
                slots += engine.in_flight / (NEEDED_SHARE * limit * ranks)
            if engine.cache_tokens:
                is_known = True
                room += tokens / (NEEDED_SHARE * engine.cache_tokens)
            if model is not None and (left := STEP_SHARE * self._target_itl - model.base) > 0:
                steps += tokens * model.context / left / ranks
        return max(room, slots, steps) if is_known else None
