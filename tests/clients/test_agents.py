"""Command line agents as their makers ship them, each with its default settings: a whole loop of
prompt, tool call, tool result and answer against scripted engines.

The packages are large (1 GB), so these tests run with `make test-nightly`. npm installs the
packages beside the other clients.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import router
from tests.integration.processes import Server
from tests.unit.router.mock_engine import (
    DONE,
    MockEngine,
    Peer,
    Received,
    running_engine,
    usual_prefill,
)
from tests.unit.router.openai.chats import chunk, usage, whole

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not shutil.which("npm"), reason="there is no npm here"),
]
PACKAGES = {
    "claude": "@anthropic-ai/claude-code@2.1.197",
    "codex": "@openai/codex@0.169.0",
    "opencode": "opencode-ai@1.18.33",
}
PLACE = Path(os.environ.get("DISAGG_CLIENTS", "/nowhere")).parent / "agents"
MODEL = "m"
SECRET = "KIWI-4711"
PROMPT = "Read the file note.txt with a shell command and repeat its content."
AGENT_TIMEOUT_S = 100


async def scripted_decode(request: Received, peer: Peer) -> None:
    """Call a shell tool where one is offered; after its result, repeat the result."""
    body = request.json
    last = body["messages"][-1]
    called = next((m for m in reversed(body["messages"]) if m["role"] == "tool"), None)
    shell = shell_call(body.get("tools") or ())
    if called is None and shell is not None:
        name, arguments = shell
        call = {"id": "call_1", "type": "function",
                "function": {"name": name, "arguments": arguments}}  # fmt: skip
        deltas: list[dict[str, Any]] = [{"reasoning": "I look."}, {"content": "Looking."},
                                        {"tool_calls": [{"index": 0, **call}]}]  # fmt: skip
        await answer(request, peer, deltas, "tool_calls")
    else:
        text = f"The file says: {text_of((called or last)['content'])[-2000:]}"
        await answer(request, peer, [{"content": text}], "stop")


def text_of(content: object) -> str:
    if isinstance(content, list):
        return " ".join(part.get("text", "") for part in content)
    return str(content)


def shell_call(tools: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return the name and the arguments of the call that reads the file."""
    for tool in tools:
        function = tool["function"]
        properties = function.get("parameters", {}).get("properties", {})
        for key in ("command", "cmd"):
            if key in properties and not function["name"].endswith("stdin"):
                is_list = properties[key].get("type") == "array"
                command = ["cat", "note.txt"] if is_list else "cat note.txt"
                more = {"description": "Read it"} if "description" in properties else {}
                return function["name"], json.dumps({key: command, **more})
    return None


async def answer(request: Received, peer: Peer, deltas: list[dict[str, Any]], finish: str) -> None:
    if request.json.get("stream"):
        head = chunk({"role": "assistant", "content": ""})
        await peer.stream(head, *map(chunk, deltas), chunk({}, finish), usage(), DONE)
        return
    message: dict[str, Any] = {}
    for delta in deltas:
        message |= delta
    await peer.answer(whole(message, finish))


@dataclass(frozen=True)
class Scripted:
    router: Server
    decoder: MockEngine
    home: Path


@pytest.fixture
async def scripted(tmp_path: Path) -> AsyncIterator[Scripted]:
    async with AsyncExitStack() as open_ones:
        prefiller = await open_ones.enter_async_context(running_engine(usual_prefill))
        decoder = await open_ones.enter_async_context(running_engine(scripted_decode))
        logs = tmp_path / "logs"
        logs.mkdir()
        starting = router(prefiller.port, decoder.port, logs)
        server = await asyncio.to_thread(starting.__enter__)
        home = tmp_path / "home"
        home.mkdir()
        (home / "note.txt").write_text(f"{SECRET}\n")
        try:
            yield Scripted(server, decoder, home)
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)


def installed(name: str) -> Path:
    """Install an agent's package once, and return the path of its command."""
    folder = PLACE / PACKAGES[name].replace("/", "_")
    if not (folder / ".made").exists():
        folder.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
        subprocess.run([*npm, PACKAGES[name]], check=True, timeout=600)
        (folder / ".made").touch()
    return folder / "node_modules" / ".bin" / name


async def run_agent(scripted: Scripted, command: list[str], variables: dict[str, str]) -> str:
    """Run an agent in an empty home folder and return what it printed. It must exit with 0."""
    path = os.environ["PATH"]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=scripted.home,
        env={"HOME": str(scripted.home), "PATH": path, "TERM": "dumb", **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), AGENT_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    text = output.decode(errors="replace")
    assert process.returncode == 0, text
    return text


def assert_loop_was_whole(scripted: Scripted, printed: str) -> None:
    """The agent ran the tool, sent the tool's result, and printed the answer."""
    assert SECRET in printed
    results = [
        text_of(message["content"])
        for request in scripted.decoder.requests
        for message in request.json["messages"]
        if message["role"] == "tool"
    ]
    assert results
    assert SECRET in results[-1]


@pytest.mark.timeout(900)
async def test_claude_code_runs_a_tool_loop(scripted: Scripted) -> None:
    claude = await asyncio.to_thread(installed, "claude")
    variables = {
        "ANTHROPIC_BASE_URL": scripted.router.url,
        "ANTHROPIC_AUTH_TOKEN": "x",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }
    command = [str(claude), "-p", PROMPT, "--dangerously-skip-permissions"]
    assert_loop_was_whole(scripted, await run_agent(scripted, command, variables))


@pytest.mark.timeout(900)
async def test_codex_runs_a_tool_loop(scripted: Scripted) -> None:
    codex = await asyncio.to_thread(installed, "codex")
    settings = scripted.home / ".codex" / "config.toml"
    settings.parent.mkdir()
    settings.write_text(
        f'model = "{MODEL}"\nmodel_provider = "local"\n'
        f'[model_providers.local]\nname = "local"\nbase_url = "{scripted.router.url}/v1"\n'
        'wire_api = "responses"\nenv_key = "LOCAL_KEY"\n'
    )
    command = [str(codex), "exec", "--skip-git-repo-check"]
    command += ["--dangerously-bypass-approvals-and-sandbox", PROMPT]
    assert_loop_was_whole(scripted, await run_agent(scripted, command, {"LOCAL_KEY": "x"}))


@pytest.mark.timeout(900)
async def test_opencode_runs_a_tool_loop(scripted: Scripted) -> None:
    opencode = await asyncio.to_thread(installed, "opencode")
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{scripted.router.url}/v1", "apiKey": "x"},
        "models": {MODEL: {}},
    }
    settings = scripted.home / "opencode.json"
    settings.write_text(json.dumps({"provider": {"local": provider}, "model": f"local/{MODEL}"}))
    variables = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    command = [str(opencode), "run", PROMPT]
    assert_loop_was_whole(scripted, await run_agent(scripted, command, variables))
