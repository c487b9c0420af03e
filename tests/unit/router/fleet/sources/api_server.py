"""As much of a Kubernetes API server as lists and watches pods, and fails as a test says."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.conftest import find_free_ports

LABELS = {"llm-d.ai/role": "decode"}


def pod(name: str, ip: str | None = "10.0.0.1", **how: Any) -> dict[str, Any]:
    """A pod that is ready, unless it is said otherwise; `how` are labels, annotations, ports, and
    the fields of its status."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "inference",
        "labels": how.get("labels", LABELS),
        "annotations": how.get("annotations"),
        "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
    }
    if how.get("terminating"):
        metadata["deletionTimestamp"] = "2026-11-22T12:00:00Z"
    ports = [{"name": n, "containerPort": p} for n, p in how.get("ports", {}).items()]
    ready = {"type": "Ready", "status": "True" if how.get("ready", True) else "False"}
    status = {
        "phase": how.get("phase", "Running"),
        "conditions": [{"type": "PodScheduled", "status": "True"}, ready],
    }
    if ip is not None:
        status["podIP"] = ip
    containers = [{"name": "engine", "image": "x", "ports": ports or None}, {"name": "other"}]
    return {"metadata": metadata, "spec": {"containers": containers}, "status": status}


@dataclass
class ApiServer:
    """`code` is what everything is answered with, `garbage` what lists or watches bring."""

    port: int
    page: int = 3
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = 100
    oldest: int = 0
    """Watches from before that are told 410."""
    code: int = 200
    garbage: bytes = b""
    watch_garbage: bytes = b""
    is_mute: bool = False
    is_deaf: bool = False
    """Watches that run hear nothing any more, and do not end."""
    token: str = "secret"
    asked: list[dict[str, str]] = field(default_factory=list)
    unauthorized: int = 0
    _watchers: set[asyncio.Queue[bytes]] = field(default_factory=set)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @property
    def lists(self) -> int:
        return sum("watch" not in query and "continue" not in query for query in self.asked)

    @property
    def watching(self) -> int:
        return len(self._watchers)

    def put(self, made: dict[str, Any], is_told: bool = True) -> None:
        name = made["metadata"]["name"]
        kind = "MODIFIED" if name in self.pods else "ADDED"
        self.pods[name] = self._stamped(made)
        self._tell(kind, self.pods[name], is_told)

    def delete(self, name: str, is_told: bool = True) -> None:
        self._tell("DELETED", self._stamped(self.pods.pop(name)), is_told)

    def bookmark(self) -> None:
        self.version += 10
        self._tell("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}}, True)

    def tell(self, line: bytes) -> None:
        for watcher in [] if self.is_deaf else self._watchers:
            watcher.put_nowait(line)

    def cut(self) -> None:
        """Resets all connections, as a proxy does that has waited long enough."""
        for writer in self._writers:
            writer.transport.abort()
        self.tell(b"")  # so that watches find out

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        """Refuses connections from now on, and resets those there are."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _stamped(self, made: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        return made | {"metadata": made["metadata"] | {"resourceVersion": str(self.version)}}

    def _tell(self, kind: str, made: dict[str, Any], is_told: bool) -> None:
        if is_told:
            self.tell(json.dumps({"type": kind, "object": made}).encode() + b"\n")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await self._answer((await reader.readuntil(b"\r\n\r\n")).decode(), writer)
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(head.split(" ")[1])
        query = dict(parse_qsl(url.query)) | {"path": url.path}
        self.asked.append(query)
        if self.is_mute:
            await asyncio.Event().wait()
        elif f"authorization: bearer {self.token}" not in head.lower():
            self.unauthorized += 1
            await _send(writer, 401, {"kind": "Status", "reason": "Unauthorized", "code": 401})
        elif self.code != 200:
            status = {"kind": "Status", "code": self.code, "reason": "No", "message": "not\nnow"}
            await _send(writer, self.code, status)
        elif "watch" in query:
            await self._watch(query, writer)
        else:
            await _send(writer, 200, self.garbage or self._list(query))

    def _list(self, query: dict[str, str]) -> dict[str, Any]:
        start = int(query.get("continue", "0"))
        size = min(self.page, int(query["limit"]))
        items = list(self.pods.values())[start : start + size]
        metadata = {"resourceVersion": str(self.version)}
        if start + size < len(self.pods):
            metadata["continue"] = str(start + size)
        return {"kind": "PodList", "metadata": metadata, "items": items or None}

    async def _watch(self, query: dict[str, str], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        if int(query["resourceVersion"]) < self.oldest:
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            writer.write(_chunk(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"))
            writer.write(b"0\r\n\r\n")
            return
        if self.watch_garbage:
            writer.write(_chunk(self.watch_garbage) + b"0\r\n\r\n")
            return
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            async with asyncio.timeout(float(query["timeoutSeconds"]) * 0.05):
                while True:
                    writer.write(_chunk(await queue.get()))
                    await writer.drain()
        except TimeoutError:
            if self.is_deaf:
                await asyncio.Event().wait()
            writer.write(b"0\r\n\r\n")
        finally:
            self._watchers.discard(queue)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _send(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = f"HTTP/1.1 {status} Whatever\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()


def kubeconfig(path: Path, port: int, token_file: Path) -> Path:
    """As kubectl has it, for the server at that port."""
    path.write_text(
        yaml.safe_dump(
            {
                "current-context": "test",
                "clusters": [
                    {"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}},
                ],
                "users": [{"name": "test", "user": {"tokenFile": str(token_file)}}],
                "contexts": [
                    {
                        "name": "test",
                        "context": {"cluster": "test", "user": "test", "namespace": "inference"},
                    }
                ],
            }
        )
    )
    return path


@contextlib.asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    (port,) = find_free_ports(1)
    server = ApiServer(port)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
