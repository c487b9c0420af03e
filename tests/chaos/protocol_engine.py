"""Mock engines of drills that move KV by another protocol than the NixlConnector's.

    python -m tests.chaos.protocol_engine mooncake|sglang prefill|decode PORT SEED

A decode engine gets the nonce of a request, which stands for its KV, from the prefill engine over a
connection of its own, and refuses what names no prefill engine. Engines of SGLang wait for each
other, for as long as their connections last; those of Mooncake keep KV until it is fetched.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
from dataclasses import dataclass, field
from typing import Any

import uvloop

from scripts.mock_engine import BACKLOG, PREFILL_S, PacedConnection, PacedEngine, whole

ABORT, KV, QUERY, SERVER_INFO = b"/abort_request", b"/kv/", b"/query", b"/server_info"
POLL_S = 0.02


@dataclass
class ProtocolEngine(PacedEngine):
    protocol: str = ""
    port: int = 0
    kv: dict[str, str] = field(default_factory=dict)
    """The nonces of computed prompts, by transfer or room."""
    fetched: dict[str, asyncio.Event] = field(default_factory=dict)
    """Set when a decode engine has fetched the KV of a room."""

    def page(self, path: bytes) -> dict[str, Any] | None:
        """Return a page of the real engine, by its path."""
        if path == QUERY and self.protocol == "mooncake" and not self.is_decoder:
            workers = {"0": {"0": "tcp://127.0.0.1:1"}}
            return {"0": {"engine_id": f"p-{self.port}", "worker_addr": workers}}
        if path == SERVER_INFO and self.protocol == "sglang":
            mode = "decode" if self.is_decoder else "prefill"
            ports = {"disaggregation_bootstrap_port": self.port}
            return {"disaggregation_mode": mode, **ports, "dp_size": 1}
        return None

    def fetch(self, transfer: str) -> str | None:
        """A decode engine comes for KV: return its nonce, once it is computed."""
        found = self.kv.pop(transfer, None)
        if found is not None and self.protocol == "sglang":
            self.fetched.setdefault(transfer, asyncio.Event()).set()
        return found


class ProtocolConnection(PacedConnection):
    def __init__(self, engine: ProtocolEngine) -> None:
        super().__init__(engine)
        self.engine = engine

    def on_request(self, method: bytes, path: bytes, body: bytes) -> None:
        page = self.engine.page(path)
        if page is not None:
            self._end(whole(page))
        elif path.startswith(KV):
            nonce = self.engine.fetch(path.removeprefix(KV).decode())
            self._end(whole(nonce, "200 OK" if nonce else "404 Not Found"))
        elif path == ABORT:
            self._end(whole({}))
        else:
            super().on_request(method, path, body)

    async def _prefill(self, asked: dict[str, Any], delay: float) -> None:
        engine, transfer = self.engine, transfer_of(asked, self.engine.protocol)
        if transfer is None or asked.get("stream"):
            return self._refuse("400 Bad Request", "no prefill leg")
        await asyncio.sleep(delay + PREFILL_S)
        engine.kv[transfer] = nonce_of(asked)
        if engine.protocol == "sglang":  # it answers when its KV was fetched
            await engine.fetched.setdefault(transfer, asyncio.Event()).wait()
        self._end(engine.unary)

    async def _decode(self, asked: dict[str, Any], delay: float) -> None:
        transfer = transfer_of(asked, self.engine.protocol)
        if transfer is not None:
            port = port_of(asked, self.engine.protocol)
            found = await fetch(port, transfer, waits=self.engine.protocol == "sglang")
            if found is None:
                return self._refuse("500 Internal Server Error", "the KV cannot be loaded")
            asked = {**asked, "kv_transfer_params": {"nonce": found}}
        elif self.engine.protocol == "sglang":
            return self._refuse("400 Bad Request", "no bootstrap_room")
        await super()._decode(asked, delay)


def nonce_of(asked: dict[str, Any]) -> str:
    return str(asked["messages"][-1]["content"].split()[0])


def transfer_of(asked: dict[str, Any], protocol: str) -> str | None:
    given = asked if protocol == "sglang" else asked.get("kv_transfer_params") or {}
    name = "bootstrap_room" if protocol == "sglang" else "transfer_id"
    return None if given.get(name) is None else str(given[name])


def port_of(asked: dict[str, Any], protocol: str) -> int:
    """Return where the prefill engine's bootstrap server is: on its own port, here."""
    if protocol == "sglang":
        return int(asked["bootstrap_port"])
    params = asked["kv_transfer_params"]
    port = int(params["remote_bootstrap_addr"].rpartition(":")[2])
    assert params["remote_engine_id"] == f"p-{port}"
    return port


async def fetch(port: int, transfer: str, waits: bool) -> str | None:
    """Fetch KV from a prefill engine. `waits`: until it is there, and else for ever."""
    while True:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET %b%b HTTP/1.1\r\nhost: x\r\n\r\n" % (KV, transfer.encode()))
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                body = await reader.readexactly(length)
            finally:
                writer.close()
            if b" 200 " in head.split(b"\r\n")[0]:
                return str(json.loads(body))
        if not waits:
            return None
        await asyncio.sleep(POLL_S)


async def serve(engine: ProtocolEngine) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_server(
        lambda: ProtocolConnection(engine), "127.0.0.1", engine.port, backlog=BACKLOG
    )
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("protocol", choices=("mooncake", "sglang"))
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("port", type=int)
    parser.add_argument("seed")
    given = parser.parse_args()
    engine = ProtocolEngine(
        given.role == "decode",
        is_drill=True,
        rng=random.Random(given.seed),
        protocol=given.protocol,
        port=given.port,
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(engine))


if __name__ == "__main__":
    main()
