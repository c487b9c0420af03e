"""The reports that the routers of one fleet exchange, so that each knows all load and all caches.

Each router reports the legs that it runs on each engine, and which engine it sent which prompts
(chunk hashes). The others add the load to their own, and the prompts to their ChunkIndex. Without
that, several routers send each engine's prefixes everywhere and overload the same engine.

Reports are hints. A forged or outdated one can only make a choice worse: KV is verified by the
engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from random import getrandbits
from typing import Annotated, Protocol

import msgspec
from msgspec import Struct

from router.routing.chunk_index import ChunkIndex
from router.routing.prompt_chunks import MAX_CHUNKS

VERSION = 1
# A report counts as load for this long. Routers report several times in this time.
MAX_REPORT_AGE_S = 2.0
# Chunks that one report has at most. Older prompts are left out.
MAX_REPORTED_CHUNKS = 8192
MAX_REPORT_BYTES = 512 * 1024
MAX_PEERS = 64
MAX_REPORTED_ENGINES = 4096

MAX_LOAD = 10**9
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOAD)]
Load = tuple[Count, Count, Count, Count]
Chunk = Annotated[int, msgspec.Meta(ge=0)]  # MessagePack has 64 bits
Name = Annotated[str, msgspec.Meta(max_length=512)]
Chunks = Annotated[tuple[Chunk, ...], msgspec.Meta(max_length=MAX_CHUNKS)]

NONE: Load = (0, 0, 0, 0)


class PeerReport(Struct, array_like=True, frozen=True):
    """One report of a router. `loads` by engine are legs and their prompt tokens, and milliseconds
    and tokens of prompts that it computes as a decode engine. `prompts` are the chunks that were
    sent to engines since the last report."""

    version: int
    router: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    loads: Annotated[dict[Name, Load], msgspec.Meta(max_length=MAX_REPORTED_ENGINES)]
    prompts: list[tuple[Name, Chunks]]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PeerReport).decode


class LoadedEngine(Protocol):
    """An engine whose load is reported and taken."""

    name: str
    in_flight: int
    tokens_in_flight: int
    local_prefill_s: float
    local_prefill_tokens: int

    @property
    def preferred_role(self) -> str: ...

    @property
    def cache_tokens(self) -> int:
        """Tokens that its prefix cache holds; 0 if unknown."""
        ...

    def set_load_elsewhere(
        self, legs: int, tokens: int, local_prefill_s: float, local_prefill_tokens: int
    ) -> None:
        """Take the load that other routers have reported."""


class PeerRouters:
    """This router's reports, and what the others have reported. Times are any monotonic clock's."""

    def __init__(self, index: ChunkIndex) -> None:
        self.name = f"{getrandbits(64):016x}"
        self._index = index
        self._sent: deque[tuple[str, Sequence[int]]] = deque(maxlen=MAX_REPORTED_CHUNKS)
        index.on_sent = lambda name, chunks: self._sent.append((name, chunks))
        self._engines: dict[str, LoadedEngine] = {}
        # The last report of each other router, and until when it counts.
        self._reports: dict[str, tuple[PeerReport, float]] = {}

    def __len__(self) -> int:
        return len(self._reports)

    def report(self, engines: Iterable[LoadedEngine]) -> bytes:
        """Return the next report on the present engines, without those that have no load."""
        self._engines = {engine.name: engine for engine in engines}
        loads = {
            name: (
                engine.in_flight,
                engine.tokens_in_flight,
                min(int(1000 * engine.local_prefill_s), MAX_LOAD),
                engine.local_prefill_tokens,
            )
            for name, engine in self._engines.items()
            if engine.in_flight
        }
        prompts: list[tuple[str, tuple[int, ...]]] = []
        room = MAX_REPORTED_CHUNKS
        while self._sent and len(self._sent[-1][1]) <= room:  # the latest prompts first
            name, chunks = self._sent.pop()
            room -= len(chunks)
            prompts.append((name, tuple(chunks)))
        self._sent.clear()
        return _encode(PeerReport(VERSION, self.name, loads, prompts[::-1]))

    def take(self, content: bytes, received: float, age: float = 0.0) -> bool:
        """Take a report that is `age` seconds old. Return False if it is invalid."""
        if len(content) > MAX_REPORT_BYTES:
            return False
        try:
            report = _decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        if report.version != VERSION:
            return False
        if report.router == self.name:
            return True
        for name, chunks in report.prompts:
            engine = self._engines.get(name)
            if engine is not None:
                if not self._index.bit(name):
                    self._index.register([name], [engine.cache_tokens], [engine.preferred_role])
                self._index.add(name, chunks)
        is_known = report.router in self._reports
        if age < MAX_REPORT_AGE_S and (is_known or len(self._reports) < MAX_PEERS):
            self._reports[report.router] = report, received + MAX_REPORT_AGE_S - age
        return True

    def update(self, now: float) -> None:
        """Set the load elsewhere of the engines of the last `report`, by the reports of others that
        still count."""
        for name in [name for name, (_, until) in self._reports.items() if until <= now]:
            del self._reports[name]
        reports = [report.loads for report, _ in self._reports.values()]
        for engine in self._engines.values():
            found = [loads[engine.name] for loads in reports if engine.name in loads]
            legs, tokens, milliseconds, local = (
                map(sum, zip(*found, strict=True)) if found else NONE
            )
            engine.set_load_elsewhere(legs, tokens, milliseconds / 1000, local)
