"""Replay a trace at decode engines, and compare how long turns stay in their caches.

    python scripts/bench.py retention --trace sessions.jsonl --cache-tokens 500000 1000000 2000000

A session's requests go to one engine, at the times of the trace. Blocks without a lease are evicted
before those with one, and of each kind the least recently used. `hits`: the share of the prompt
tokens that the cache had. `leased`: the mean of what leases ask for, as a share of the cache.
"""

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from zlib import crc32

from router.routing.prompt_chunks import TOKENS_PER_CHUNK
from scripts.benchmarks.common import bench_parser, positive
from scripts.benchmarks.traces import Arrival, published

# When the lease of a block ends, from the times of its use and of the next one.
LEASES = {
    "lru": lambda now, following: now,
    "480 s": lambda now, following: now + 480,  # the default of decoder_kv_blocks_ttl
    # The kind of pause is known exactly: short ones are tool calls.
    "pause": lambda now, following: following if following - now <= 60 else now,
    "exact": lambda now, following: following if following < inf else now,
    # Belady's: no leases; the block whose next use is last is evicted.
    "optimum": lambda now, following: now,
}


def replay(arrivals: Sequence[Arrival], num_chunks: int, rule: str) -> tuple[int, float]:
    """Return how many chunks the cache had, and the chunk-seconds that leases ask for."""
    next_use: dict[int, float] = {}
    uses = []
    for now, job in reversed(arrivals):
        uses.append([next_use.get(chunk, inf) for chunk in job.chunks])
        next_use.update(dict.fromkeys(job.chunks, now))
    hits, leased, end = 0, 0.0, arrivals[-1][0]
    kept: dict[int, tuple[float, ...]] = {}  # the order of eviction
    heap: list[tuple[tuple[float, ...], int]] = []
    for now, job in arrivals:
        hits += next((n for n, one in enumerate(job.chunks) if one not in kept), len(job.chunks))
        for depth, (chunk, following) in enumerate(zip(job.chunks, uses.pop(), strict=True)):
            until = LEASES[rule](now, following)
            leased += min(until, following, end) - now
            order = (-following, 0.0) if rule == "optimum" else (until > now, now)
            kept[chunk] = (*order, -depth)
            heappush(heap, (kept[chunk], chunk))
        while len(kept) > num_chunks:
            oldest, chunk = heappop(heap)
            if kept.get(chunk) == oldest:
                del kept[chunk]
    return hits, leased


def main(arguments: Sequence[str]) -> int:
    parser = bench_parser("retention", __doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--engines", type=positive, default=4, metavar="N", help="(4)")
    parser.add_argument("--cache-tokens", type=positive, nargs="+", required=True, metavar="N")
    options = parser.parse_args(arguments)
    engines: defaultdict[int, list[Arrival]] = defaultdict(list)
    for at, job in published(options.trace, False):
        engines[crc32(job.session.encode()) % options.engines].append((at, job))
    chunks = sum(len(job.chunks) for one in engines.values() for _, job in one)
    seconds = sum(one[-1][0] for one in engines.values())
    print("   cache rule     hits  leased")
    for tokens in options.cache_tokens:
        size = tokens // TOKENS_PER_CHUNK
        for rule in LEASES:
            results = [replay(one, size, rule) for one in engines.values()]
            hits, leased = (sum(one) for one in zip(*results, strict=True))
            print(f"{tokens:>8} {rule:<7} {hits / chunks:>5.3f} {leased / size / seconds:>7.2f}")
    return 0
