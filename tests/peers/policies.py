"""Other routers as policies of the simulated fleet, for `scripts/bench.py field` and its tests.

Simulated time passes as fast as this machine allows, so nothing here may depend on a clock: of
Dynamo's two memories without events only the one of a fixed size is comparable.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import msgspec
import zmq

from router.commands.demo.engines import wait_until_ready
from router.common.child_processes import ChildProcesses
from router.routing.policy import RoutingQuery
from router.routing.prompt_chunks import TOKENS_PER_CHUNK
from scripts.benchmarks.common import BenchError, free_ports, report_progress
from scripts.benchmarks.field import WholePromptPolicy

TIMEOUT_S = 20.0
# Prompts for vllm-router have 16 token ids for each 256; its tree has a 16th of its default size.
CHUNK_IDS = 16
TREE_SIZE = 33_554_432 // 16


class Dynamo(WholePromptPolicy):
    """Dynamo's selection service in this process. Each message of KV events stores one more block,
    a mark: when the service finds it, it has taken all events before."""

    def __init__(self, environment: Path, events: bool, *common: Any) -> None:
        super().__init__(*common)
        self._loop = asyncio.new_event_loop()
        sys.path += map(str, environment.glob("lib/python3*/site-packages"))
        # To the uncached and queued tokens the service adds the blocks of running requests, which
        # Dynamo's router of prefill engines does not count. Here they weigh a millionth.
        os.environ |= {"DYN_LOG": "error", "DYN_ROUTER_PREFILL_LOAD_SCALE": "1e6"}
        os.environ["DYN_ROUTER_USE_KV_EVENTS"] = str(events).lower()
        os.environ["DYN_ROUTER_APPROXIMATE_CACHE_POLICY"] = "ttl" if events else "lru"
        core = importlib.import_module("dynamo._core")
        self._service = core.SelectionService(indexer_threads=1)
        self._block_hash, self._hashes = core.compute_block_hash_for_seq, dict[int, int]()
        self._context, self._numbers, self._events = zmq.Context(), count(), events
        self._sockets: list[Any] = []
        self._marks: dict[int, int] = {}
        self._is_started = False
        self.costs: list[float] = []
        """The seconds of each choice, without the wait for events."""

    def _start(self, candidates: Sequence[Any]) -> None:
        for worker, cache in enumerate(one.engine.cache for one in candidates):
            socket = self._context.socket(zmq.PUB)
            socket.sndhwm = 0
            self._sockets.append(socket)
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            record = {
                "worker_id": worker,
                "endpoint": "http://engine",
                "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
                "block_size": TOKENS_PER_CHUNK,
                "total_kv_blocks": cache.tokens // TOKENS_PER_CHUNK,
            }
            self._call("upsert_worker", record)
            if self._events:
                cache.on_change = partial(self._publish, worker, socket)
                self._take_events(worker, partial(cache.on_change, (), ()))
        self._is_started = True

    def _publish(
        self, worker: int, socket: Any, stored: Sequence[tuple[int, int | None]], gone: list[int]
    ) -> None:
        """Send the events that vLLM would send."""
        self._marks[worker] = mark = 2**31 + next(self._numbers)
        size = TOKENS_PER_CHUNK
        events: list[Any] = [
            ["BlockStored", [chunk], before, [chunk] * size, size, None]
            for chunk, before in (*stored, (mark, None))
        ]
        events += [["BlockRemoved", gone]] if gone else []
        batch = msgspec.msgpack.encode([time.time(), events, 0])
        socket.send_multipart([b"kv-events", next(self._numbers).to_bytes(8, "big"), batch])

    def _take_events(self, worker: int, repeat: Callable[[], None] = lambda: None) -> None:
        latest = time.monotonic() + TIMEOUT_S
        while time.monotonic() < latest:
            repeat()  # until the service has subscribed
            found = self._call("overlap_scores", self._prompt(1, [self._marks[worker]]))
            if any(one["worker_id"] == worker and one["device_blocks"] for one in found["workers"]):
                del self._hashes[self._marks.pop(worker)]
                return
        raise BenchError(f"dynamo does not take the events of engine {worker}")

    def _prompt(self, tokens: int, chunks: Sequence[int]) -> dict[str, Any]:
        for chunk in chunks:
            if chunk not in self._hashes:
                (number,) = self._block_hash([chunk] * TOKENS_PER_CHUNK, TOKENS_PER_CHUNK)
                self._hashes[chunk] = number - (number >> 63 << 64)  # as a signed number
        hashes = [self._hashes[chunk] for chunk in chunks]
        return {"block_hashes": hashes, "sequence_hashes": [*chunks], "isl_tokens": tokens}

    def _call(self, name: str, argument: Any) -> Any:
        async def call() -> Any:
            return await getattr(self._service, name)(argument)

        return self._loop.run_until_complete(call())

    def order(self, candidates: Sequence[Any], query: RoutingQuery) -> Sequence[Any]:
        if not self._is_started:
            self._start(candidates)
        for worker in [*self._marks]:
            self._take_events(worker)
        request = self._prompt(query.tokens, self.chunks(query)) | {"selection_id": str(query.turn)}
        began = time.perf_counter()
        chosen = self._call("select_and_reserve", request)
        self.costs.append(time.perf_counter() - began)
        return [candidates[chosen["worker_id"]]]

    def note_cached(self, name: str, query: RoutingQuery, cached_tokens: int | None) -> None:
        self._call("prefill_complete", str(query.turn))
        self._call("free_reservation", str(query.turn))

    def close(self) -> None:
        self._service.shutdown()
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()
        self._loop.close()


class CacheAware(WholePromptPolicy):
    """vllm-router's policy `cache_aware` with default settings."""

    def __init__(self, environment: Path, *common: Any) -> None:
        super().__init__(*common)
        self._command = [str(environment / "bin/vllm-router"), "--policy=cache_aware"]
        self._asked: Queue[tuple[int, Event]] = Queue()
        self._open: dict[int, tuple[Event, http.client.HTTPConnection]] = {}
        self._ports: list[int] = []
        self._end = ExitStack()

    def _start(self, candidates: Sequence[Any]) -> None:
        asked = self._asked

        class HeldEngine(BaseHTTPRequestHandler):
            """Answers a POST when the test sets the event."""

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                ended = Event()
                asked.put((self.connection.getsockname()[1], ended))
                ended.wait()
                self.do_GET()

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *arguments: object) -> None:
                return

        for _ in candidates:
            server = ThreadingHTTPServer(("127.0.0.1", 0), HeldEngine)
            Thread(target=server.serve_forever, daemon=True).start()
            self._end.callback(server.server_close)
            self._end.callback(server.shutdown)
            self._ports.append(server.server_port)
        self._port, metrics = free_ports(2)
        command = [*self._command, f"--port={self._port}", f"--prometheus-port={metrics}"]
        command += [f"--max-tree-size={TREE_SIZE}", "--eviction-interval-secs=1", "--worker-urls"]
        command += [f"http://127.0.0.1:{port}" for port in self._ports]
        family = ChildProcesses(Path(self._end.enter_context(TemporaryDirectory())))
        self._end.callback(family.stop)
        router = family.start("vllm-router", command, f"http://127.0.0.1:{self._port}")
        wait_until_ready([router], "/health", [router], report_progress)

    def order(self, candidates: Sequence[Any], query: RoutingQuery) -> Sequence[Any]:
        if not self._ports:
            self._start(candidates)
        ids = [chunk for chunk in self.chunks(query) for _ in range(CHUNK_IDS)]
        rest = query.tokens * CHUNK_IDS // TOKENS_PER_CHUNK - len(ids)
        body = json.dumps({"model": "m", "prompt": ids + [2**31 - query.turn] * rest})
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        port, ended = self._asked.get(timeout=TIMEOUT_S)
        self._open[query.turn] = ended, connection
        return [candidates[self._ports.index(port)]]

    def note_cached(self, name: str, query: RoutingQuery, cached_tokens: int | None) -> None:
        ended, connection = self._open.pop(query.turn)
        ended.set()
        connection.getresponse().read()
        connection.close()

    def close(self) -> None:
        self._end.close()
