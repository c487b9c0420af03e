"""A prefill and a decode engine of SGLang, on the CPU, with NIXL between them, and the router."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.settings import Settings
from tests.sglang.test_request_models import CHAT, MESSAGES, SGLANG
from tests.unit.router.harness import Router, eventually, running_router

COMPLETIONS = "/v1/completions"
pytestmark = [
    pytest.mark.skipif(not SGLANG, reason="DISAGG_SGLANG names no Python with SGLang"),
    pytest.mark.timeout(600),
]


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Router]:
    model, script = tmp_path / "model", Path(__file__).with_name("sglang_on_cpu.py")
    p, d, bootstrap = free_ports(3)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    processes = []
    for mode, port in (("prefill", p), ("decode", d)):
        options = ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", "nixl"]
        options += ["--port", str(port), "--disaggregation-bootstrap-port", str(bootstrap)]
        command = [SGLANG, str(script), str(model), *options, "--served-model-name", "m"]
        with (tmp_path / f"{mode}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(  # noqa: ASYNC220 # nothing else runs yet
                    command, stdout=log, stderr=log, env=environment, start_new_session=True
                )
            )
        await eventually((model / "config.json").exists, 60)
    settings = Settings(
        prefiller_hosts=("127.0.0.1",),
        prefiller_ports=(p,),
        decoder_hosts=("127.0.0.1",),
        decoder_ports=(d,),
        health_timeout=10,
    )
    try:
        async with running_router(settings) as router:
            router.client.timeout = 60
            await eventually(lambda: not router.gateway.fleet.unavailable_roles(), 400)
            yield router
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def ask(router: Router, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    body = {"model": "m", "temperature": 0, "max_tokens": 6, **fields}
    answer = await router.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def count_running(router: Router) -> int:
    """Return the requests that the engines have, of whatever state."""
    number = 0
    for engine in router.gateway.fleet.engines:
        page = await engine.get("/v1/loads", time.monotonic() + 5, 1 << 20)
        for rank in json.loads(page.body)["loads"]:
            number += rank["num_running_reqs"] + rank["num_waiting_reqs"]
    return number


async def test_sglangs_own_engines_answer_and_no_leg_outlives_its_request(router: Router) -> None:
    first = await ask(router, prompt="hello there")
    assert first.json()["usage"]["completion_tokens"] == 6
    again = await ask(router, prompt="hello there", min_tokens=6)
    several = await ask(router, prompt=["hello there", "other"])
    assert len(several.json()["choices"]) == 2
    assert len({one.json()["choices"][0]["text"] for one in (first, again, several)}) == 1
    assert b"[DONE]" in (await ask(router, prompt="x", stream=True)).content
    for is_stream in (False, True):
        await ask(router, CHAT, messages=MESSAGES, stream=is_stream, conversation_id="c")
    await asyncio.gather(*(ask(router, prompt=f"{number}") for number in range(8)))
    for prompt in ("x", ["x", "y"]):
        body = {"model": "m", "prompt": prompt, "max_tokens": 400, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            await router.client.post(COMPLETIONS, json=body, timeout=0.5)
    await router.settled()
    async with asyncio.timeout(20):  # SGLang sees that the connection of a list is closed after 4 s
        while await count_running(router):  # noqa: ASYNC110 # no event tells
            await asyncio.sleep(0.2)
