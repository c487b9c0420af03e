"""How many engines the offered load needs, by group and role: a signal for autoscalers.

Prefill engines need as many seconds of work per second as the tokens that they compute take at
their measured rates, and time to compute what is queued there. Decode engines need room for the KV
of their requests, and steps that end within half of `target_itl`. Both are averages over WINDOW_S.

All is measured when the metrics are read, so requests do nothing for it. Each router counts its own
requests: the sum over all routers is what the fleet needs. A request counts by its prompt: the
tokens of its answer are not known.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median

from router.fleet.engine import BOTH, DECODE, PREFILL, Engine

WINDOW_S = 60.0
# The part of its time that a prefill engine should compute, and of its KV that should be in use.
BUSY_SHARE = 0.8
CACHE_SHARE = 0.7
# What is queued should be computed within this time.
DRAIN_S = 20.0
STEP_SHARE = 0.5
Pool = tuple[str, str]


class EngineDemand:
    """`read` may be called in any thread, by several at once."""

    def __init__(self, target_itl: float) -> None:
        self._target_itl = target_itl
        self._lock = threading.Lock()
        self._read_at = -math.inf
        self._computed: dict[str, int] = {}
        """By engine, the prompt tokens that it had computed at `_read_at`."""
        self._needed: dict[Pool, float] = {}

    def read(self, engines: Iterable[Engine], moment: float) -> Mapping[Pool, float]:
        """Return the number of engines by group and role, of roles whose engines are known well
        enough. `moment` is in seconds of a monotonic clock."""
        pools: defaultdict[Pool, list[Engine]] = defaultdict(list)
        for engine in engines:
            pools[engine.group, engine.role].append(engine)
        with self._lock:
            elapsed, self._read_at = moment - self._read_at, moment
            weight = -math.expm1(-elapsed / WINDOW_S)
            last, self._computed = self._computed, {}
            before, self._needed = self._needed, {}
            for pool, members in pools.items():
                found = self._of_pool(members, last, elapsed)
                if found is not None:
                    mean = before.get(pool, found)
                    self._needed[pool] = mean + weight * (found - mean)
            return dict(self._needed)

    def _of_pool(
        self, engines: list[Engine], last: Mapping[str, int], elapsed: float
    ) -> float | None:
        role = engines[0].role
        parts = [self._prefill(engines, last, elapsed)] if role.plays(PREFILL) else []
        if role.plays(DECODE):
            parts.append(self._decode(engines))
        known = [part for part in parts if part is not None]
        return sum(known) if known else None

    def _prefill(
        self, engines: list[Engine], last: Mapping[str, int], elapsed: float
    ) -> float | None:
        rates = {engine.name: engine.prefill_tokens_per_second for engine in engines}
        known = [rate for rate in rates.values() if rate]
        needed = 0.0
        for engine in engines:
            computed = sum(place.prefill_rate.computed for place in engine.ranks or (engine,))
            self._computed[engine.name] = computed
            if known:
                rate = rates[engine.name] or median(known)
                new = computed - last.get(engine.name, computed)
                needed += max(0, new) / max(elapsed, 1e-3) / rate / BUSY_SHARE
                both = engine.role is BOTH  # its tokens in flight are those of answers
                queued = engine.local_prefill_tokens if both else engine.tokens_in_flight
                needed += queued / rate / DRAIN_S
        return needed if known else None

    def _decode(self, engines: list[Engine]) -> float | None:
        room, steps, is_known = 0.0, 0.0, False
        for engine in engines:
            tokens, model = engine.tokens_in_flight, engine.capabilities.step_model
            if engine.cache_tokens:
                is_known = True
                room += tokens / (CACHE_SHARE * engine.cache_tokens)
            if model is not None and (left := STEP_SHARE * self._target_itl - model.base) > 0:
                ranks = len(engine.ranks or ()) or 1
                steps += tokens * model.context / left / ranks
        return max(room, steps) if is_known else None
