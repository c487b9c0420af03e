"""Pods from a Kubernetes API server: listed in pages, then watched from there. Of a pod only the
fields that are needed are parsed.

lightkube finds the cluster and authenticates: service account or kubeconfig, replaced tokens,
credential plugins. List and watch are implemented here, since lightkube's own watch continues after
a gap without the pods that were deleted meanwhile, and parses every field of every pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Literal, NoReturn

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig

from router.fleet.sources.source import SourceError, one_line
from router.settings import SettingsError

# One page is about a megabyte, which takes a few milliseconds to parse.
PAGE_SIZE = 100
MAX_PAGES = 200
MAX_PAGE_BYTES = 64 * 1024 * 1024
MAX_WATCH_EVENT_BYTES = 4 * 1024 * 1024
# For one page, and for the head of a watch.
API_TIMEOUT_S = 10.0
# The server ends a watch after this time, and the source ends it after some more: a connection that
# was lost without notice looks like pods that do not change.
WATCH_S, WATCH_GRACE_S = 60, 5.0
WATCH_TIMEOUT = httpx2.Timeout(API_TIMEOUT_S, read=None)
GONE_STATUS = 410


class PodMetadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class ContainerPort(msgspec.Struct, rename="camel"):
    container_port: int = 0
    name: str = ""


class PodContainer(msgspec.Struct):
    ports: list[ContainerPort] | None = None


class PodSpec(msgspec.Struct, rename="camel"):
    containers: list[PodContainer] | None = None
    init_containers: list[PodContainer] | None = None


class PodCondition(msgspec.Struct):
    type: str = ""
    status: str = ""


class PodStatus(msgspec.Struct):
    phase: str = ""
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[PodCondition] | None = None


class Pod(msgspec.Struct):
    metadata: PodMetadata
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class VersionExpiredError(SourceError):
    """The server has no history since the known version: list again."""


class PodListPage(msgspec.Struct):
    class Metadata(msgspec.Struct, rename="camel"):
        resource_version: str = ""
        next_page: str = msgspec.field(default="", name="continue")

    metadata: Metadata
    items: list[Pod] | None = None


class PodWatchEvent(msgspec.Struct):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class ApiStatus(msgspec.Struct):
    code: int = 0
    reason: str = ""
    message: str = ""


class PodChange(msgspec.Struct):
    """`pod` is the last state of a deleted pod; None if only the version has advanced."""

    version: str
    pod: Pod | None = None
    is_deleted: bool = False


class PodApi:
    """The pods of one namespace that match a label selector."""

    def __init__(
        self, config: Path | None, namespace: str | None, selector: str, watch_s: float = WATCH_S
    ) -> None:
        """Read the configuration, without contacting the server. Raises SettingsError without a
        cluster."""
        try:
            found = KubeConfig.from_env() if config is None else KubeConfig.from_file(config)
            cluster = found.get()
            assert cluster is not None, "no current context"
            self._cluster = cluster
            self._client: httpx2.AsyncClient | None = self._connect()
        except Exception as error:
            # lightkube raises any error on unexpected files
            raise SettingsError([f"--kubernetes-config: {one_line(error)}"]) from None
        self._path = f"/api/v1/namespaces/{namespace or cluster.namespace}/pods"
        self._selector = selector
        self._watch_s = watch_s

    async def list_all(self) -> tuple[list[Pod], str]:
        """Return all pods and the version from which to watch. Raises SourceError."""
        pods: list[Pod] = []
        params = {"limit": str(PAGE_SIZE)}
        for _ in range(MAX_PAGES):
            page = await self._page(params)
            pods += page.items or ()
            if not page.metadata.next_page:
                return pods, page.metadata.resource_version
            params["continue"] = page.metadata.next_page
        raise SourceError(f"the API server lists more than {MAX_PAGES * PAGE_SIZE} pods")

    async def watch(self, version: str) -> AsyncGenerator[list[PodChange], None]:
        """Yield the changes since a version as they arrive, until the server ends the watch. Raises
        SourceError. No timeout is active across a yield: it would hit the caller."""
        end = asyncio.get_running_loop().time() + self._watch_s + WATCH_GRACE_S
        params = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(self._watch_s))),
        }
        with _source_errors("the API server is silent: a watch did not end in time"):
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(API_TIMEOUT_S):
                    answer = await stack.enter_async_context(self._get(params, WATCH_TIMEOUT))
                    if answer.status_code != 200:
                        _raise_error(answer.status_code, await answer.aread())
                pieces, lines = answer.aiter_bytes(), LineSplitter()
                while True:
                    async with asyncio.timeout_at(end):
                        piece = await anext(pieces, b"")
                    if not piece:
                        return
                    if changes := [_change(line) for line in lines.feed(piece)]:
                        yield changes

    async def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _connect(self) -> httpx2.AsyncClient:
        return AsyncClient(self._cluster, ConnectionParams(timeout=httpx2.Timeout(API_TIMEOUT_S)))

    async def _page(self, params: dict[str, str]) -> PodListPage:
        body = bytearray()
        with _source_errors(f"the API server: no list of pods within {API_TIMEOUT_S:g} s"):
            async with asyncio.timeout(API_TIMEOUT_S), self._get(params) as answer:
                async for piece in answer.aiter_bytes():
                    body += piece
                    if len(body) > MAX_PAGE_BYTES:
                        raise SourceError("the API server's list of pods is too long")
            if answer.status_code != 200:
                _raise_error(answer.status_code, bytes(body))
            return msgspec.json.decode(body, type=PodListPage)

    def _get(
        self, params: dict[str, str], timeout: httpx2.Timeout | None = None
    ) -> contextlib.AbstractAsyncContextManager[httpx2.Response]:
        """Request an uncompressed answer: less work for both sides, which are near each other."""
        self._client = self._client or self._connect()
        return self._client.stream(
            "GET",
            self._path,
            params={"labelSelector": self._selector, **params},
            headers={"accept-encoding": "identity", "accept": "application/json"},
            timeout=httpx2.USE_CLIENT_DEFAULT if timeout is None else timeout,
        )


class LineSplitter:
    """Cuts bytes into lines as they arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines that are complete now. Raises SourceError."""
        *whole, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_WATCH_EVENT_BYTES:
            raise SourceError("the API server sent a pod that is too large")
        return [line for line in whole if line.strip()]


def _change(line: bytes) -> PodChange:
    """Raises SourceError, msgspec.DecodeError."""
    event = msgspec.json.decode(line, type=PodWatchEvent)
    if event.type == "ERROR":
        _fail(msgspec.json.decode(event.object, type=ApiStatus))
    pod = msgspec.json.decode(event.object, type=Pod)
    version = pod.metadata.resource_version
    if event.type == "BOOKMARK":
        return PodChange(version)
    return PodChange(version, pod, event.type == "DELETED")


def _raise_error(status: int, body: bytes) -> NoReturn:
    """Raises SourceError."""
    try:
        problem = msgspec.json.decode(body, type=ApiStatus)
    except msgspec.DecodeError:
        problem = ApiStatus()
    problem.code = status
    _fail(problem)


def _fail(problem: ApiStatus) -> NoReturn:
    """Raises SourceError."""
    words = " ".join(f"{problem.reason} {problem.message}".split())
    text = f"the API server returned {problem.code} {textwrap.shorten(words, 300)}".strip()
    raise VersionExpiredError(text) if problem.code == GONE_STATUS else SourceError(text)


@contextlib.contextmanager
def _source_errors(timeout: str) -> Iterator[None]:
    """Raise any failure of a request as a SourceError; `timeout` describes a TimeoutError."""
    try:
        yield
    except SourceError:
        raise
    except TimeoutError:
        raise SourceError(timeout) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = f"the API server's answer cannot be parsed: {one_line(error)}"
        raise SourceError(problem) from None
    except Exception as error:
        raise SourceError(f"the API server cannot be reached: {one_line(error)}") from None
