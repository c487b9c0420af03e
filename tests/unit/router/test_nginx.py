"""Streams through a real nginx with its default settings, which buffer answers."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.conftest import find_free_ports
from tests.unit.router.conftest import StartRouter

pytestmark = pytest.mark.slow  # an nginx

CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/1; uwsgi_temp_path {folder}/2; scgi_temp_path {folder}/3;
    {more}
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass {url}; }}
    }}
}}
"""
PACKED = "gzip on; gzip_types *; gzip_min_length 0;"


@contextlib.asynccontextmanager
async def running_nginx(folder: Path, url: str, more: str) -> AsyncIterator[str]:
    """Start an nginx in front of `url`, and return its own URL."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    assert program, "nginx is missing: install Debian's package nginx"
    (port,) = find_free_ports(1)
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, more=more, port=port, url=url))
    process = await asyncio.create_subprocess_exec(
        program, "-c", str(config), "-p", str(folder), "-e", "stderr"
    )
    try:
        async with asyncio.timeout(20):
            while True:
                assert process.returncode is None, "nginx ended at once"
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


def chat_event(text: str, finish: str = "null") -> bytes:
    delta = b'{"index":0,"delta":{"role":"assistant","content":"%b"},"finish_reason":%b}'
    head = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":['
    return head + delta % (text.encode(), finish.encode()) + b"]}\n\n"


@pytest.mark.parametrize("more", ["", PACKED], ids=["plain", "gzip"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_stream_passes_nginx_as_it_comes(
    start_router: StartRouter, d: MockEngine, tmp_path: Path, path: str, more: str
) -> None:
    has_first = asyncio.Event()

    async def answer(_: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(chat_event("first")))
        await has_first.wait()
        last = chunk(chat_event("second", '"stop"')) + chunk(DONE)
        await peer.send(last + b"0\r\n\r\n")

    d.usual = answer
    router = await start_router()
    asked = [{"role": "user", "content": "hello"}]
    body = {"model": "m", "stream": True, "max_tokens": 7, "messages": asked, "input": "hello"}
    del body["messages" if path == "/v1/responses" else "input"]
    read = b""
    async with (
        running_nginx(tmp_path, router.url, more) as url,
        httpx.AsyncClient(base_url=url, timeout=10) as client,
        client.stream("POST", path, json=body) as response,
    ):
        assert (response.headers.get("content-encoding") == "gzip") is bool(more)
        async for piece in response.aiter_bytes():
            read += piece
            if b"first" in read:
                has_first.set()
    assert has_first.is_set()
    assert b"second" in read
