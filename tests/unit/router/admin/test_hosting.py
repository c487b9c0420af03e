"""The admin API's listener: nobody keeps others out, and nothing is left when it ends."""

import asyncio
import contextlib
import logging
import threading
from pathlib import Path

import httpx
import pytest

from router.admin import api as api
from router.admin.api import ControlThread, serve_control
from router.server.serve import bind_at
from router.settings import load
from tests.unit.router.admin.test_control import TOKEN, A, control_of
from tests.unit.router.test_settings import ENGINES


async def test_a_connection_is_for_one_call_and_does_not_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "CONNECTION_LIFETIME_S", 1.0)
    monkeypatch.setattr(api, "MAX_ADMIN_CONNECTIONS", 4)
    control, _, _ = control_of([A])
    with bind_at("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        async with serve_control(control, listener):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
            async with asyncio.timeout(10):
                for reader, writer in silent:
                    with contextlib.suppress(ConnectionError):
                        assert await reader.read() == b""
                    writer.close()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                answer = await client.get("/admin/engines")
            assert answer.status_code == 200
            assert answer.headers["connection"] == "close"


def test_the_control_of_workers_ends_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    settings = load(ENGINES | {"workers": 2, "conversation_store": "off", "admin_token": TOKEN})
    control_thread = ControlThread(settings, lambda: settings, tmp_path, None)
    with control_thread.open():
        asyncio.run(_dial(tmp_path / "control"))
        control_thread.reload()
    control_thread.reload()
    assert not any(thread.name == "admin" for thread in threading.enumerate())
    assert not caplog.records


async def _dial(path: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(str(path))
    assert await reader.readline()
    writer.write(b'{"engines": [], "groups": [], "has_all_listings": true}\n')
    await writer.drain()
    writer.close()
