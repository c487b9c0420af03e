"""Pods from a Kubernetes API server: listed in pages, then watched from there.

lightkube finds the cluster and proves who we are: service account or kubeconfig, tokens that are
replaced, programs that make them. The two questions are ours: its own watch goes on after a gap
without what was deleted meanwhile, and reads all of every pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Literal, NoReturn

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig

from router.fleet.sources.pod_engines import Pod
from router.fleet.sources.source import SourceError, line_of
from router.settings import SettingsError

# Pods in one answer: about a megabyte, which is read in a few milliseconds.
PAGE = 100
MOST_PAGES = 200
MOST_BYTES = 64 * 1024 * 1024
LONGEST_LINE = 4 * 1024 * 1024
# Seconds for one page, and for the first word of a watch.
PATIENCE = 10.0
# Seconds that a watch lives before the server ends it, and that we wait beyond that: a connection
# whose other end is gone without a word looks like pods that do not change.
LIFE, GRACE = 60, 5.0
UNHURRIED = httpx2.Timeout(PATIENCE, read=None)
GONE = 410


class VersionExpiredError(SourceError):
    """What happened since the version that we know is forgotten: list again."""


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
    """`pod` is as it was last where it is deleted; None where only the version went on."""

    version: str
    pod: Pod | None = None
    is_deleted: bool = False


class PodApi:
    """Pods of one namespace that a selector selects."""

    def __init__(
        self, config: Path | None, namespace: str | None, selector: str, life: float = LIFE
    ) -> None:
        """Asks nobody yet. Raises SettingsError where no cluster is known."""
        try:
            found = KubeConfig.from_env() if config is None else KubeConfig.from_file(config)
            cluster = found.get()
            assert cluster is not None, "no current context"
            self._cluster = cluster
            self._client: httpx2.AsyncClient | None = self._connect()
        except Exception as error:
            # lightkube raises whatever the files made it stumble over.
            raise SettingsError([f"--kubernetes-config: {line_of(error)}"]) from None
        self._path = f"/api/v1/namespaces/{namespace or cluster.namespace}/pods"
        self._selector = selector
        self._life = life

    async def list_all(self) -> tuple[list[Pod], str]:
        """All of them, and the version from which to watch. Raises SourceError."""
        pods: list[Pod] = []
        params = {"limit": str(PAGE)}
        for _ in range(MOST_PAGES):
            page = await self._page(params)
            pods += page.items or ()
            if not page.metadata.next_page:
                return pods, page.metadata.resource_version
            params["continue"] = page.metadata.next_page
        raise SourceError(f"the API server lists more than {MOST_PAGES * PAGE} pods")

    async def watch(self, version: str) -> AsyncGenerator[list[PodChange], None]:
        """What changes from there on, as it arrives, until the server ends it. Raises
        SourceError."""
        params = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(self._life))),
        }
        async with contextlib.aclosing(self._lines(params)) as lines:
            async for whole in lines:
                try:
                    changes = [_change(line) for line in whole]
                except msgspec.DecodeError as error:
                    raise _told(error) from None
                yield changes

    async def close(self) -> None:
        """Until it is asked again."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _connect(self) -> httpx2.AsyncClient:
        return AsyncClient(self._cluster, ConnectionParams(timeout=httpx2.Timeout(PATIENCE)))

    async def _page(self, params: dict[str, str]) -> PodListPage:
        body = bytearray()
        try:
            async with asyncio.timeout(PATIENCE), self._asked(params) as answer:
                async for piece in answer.aiter_bytes():
                    body += piece
                    if len(body) > MOST_BYTES:
                        raise SourceError("the API server's list of pods is absurdly long")
            _check(answer.status_code, bytes(body))
            return msgspec.json.decode(body, type=PodListPage)
        except TimeoutError:
            raise SourceError(f"the API server: no list of pods within {PATIENCE:g} s") from None
        except Exception as error:
            raise _told(error) from None

    async def _lines(self, params: dict[str, str]) -> AsyncGenerator[list[bytes], None]:
        """No deadline is held across a yield: it would end what the reader does."""
        end = asyncio.get_running_loop().time() + self._life + GRACE
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(PATIENCE):
                    answer = await stack.enter_async_context(self._asked(params, UNHURRIED))
                    if answer.status_code != 200:
                        _check(answer.status_code, await answer.aread())
                pieces, lines = answer.aiter_bytes(), LineSplitter()
                while piece := await _next(pieces, end):
                    if whole := lines.of(piece):
                        yield whole
        except TimeoutError:
            raise SourceError("the API server is silent: a watch did not end in time") from None
        except Exception as error:
            raise _told(error) from None

    def _asked(
        self, params: dict[str, str], timeout: httpx2.Timeout | None = None
    ) -> contextlib.AbstractAsyncContextManager[httpx2.Response]:
        """Uncompressed: that is less work for both, and they are near each other."""
        self._client = self._client or self._connect()
        return self._client.stream(
            "GET",
            self._path,
            params={"labelSelector": self._selector, **params},
            headers={"accept-encoding": "identity", "accept": "application/json"},
            timeout=httpx2.USE_CLIENT_DEFAULT if timeout is None else timeout,
        )


class LineSplitter:
    """Bytes as they come, cut into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, piece: bytes) -> list[bytes]:
        """Those that are whole now. Raises SourceError."""
        *whole, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            raise SourceError("the API server tells of an absurdly large pod")
        return [line for line in whole if line.strip()]


async def _next(pieces: AsyncIterator[bytes], end: float) -> bytes:
    """Empty at the end. Raises TimeoutError."""
    async with asyncio.timeout_at(end):
        return await anext(pieces, b"")


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


def _check(status: int, body: bytes) -> None:
    """Raises SourceError."""
    if status != 200:
        try:
            problem = msgspec.json.decode(body, type=ApiStatus)
        except msgspec.DecodeError:
            problem = ApiStatus()
        problem.code = status
        _fail(problem)


def _fail(problem: ApiStatus) -> NoReturn:
    """Raises SourceError."""
    words = " ".join(f"{problem.reason} {problem.message}".split())
    said = f"the API server says {problem.code} {textwrap.shorten(words, 300)}".strip()
    raise VersionExpiredError(said) if problem.code == GONE else SourceError(said)


def _told(error: Exception) -> SourceError:
    """Whatever was met on the way to the API server and back is the world's, not ours."""
    if isinstance(error, SourceError):
        return error
    if isinstance(error, msgspec.DecodeError | UnicodeDecodeError):
        return SourceError(f"the API server's answer makes no sense: {line_of(error)}")
    return SourceError(f"the API server cannot be asked: {line_of(error)}")
