"""Command line agents as their makers ship them, started by the scripts of examples/: a whole loop
of prompt, two tool calls, their results and an answer against scripted engines.

The packages are large (1 GB), so these tests run with `make test-nightly`. npm installs the
packages beside the other clients.
"""

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scripts.mock_engine import DONE, MockEngine, Peer, Received
from tests.clients.conftest import scripted_stack
from tests.integration.processes import Server
from tests.integration.talk import turns
from tests.unit.router.conversations.engines import KEPT, PROOF, delta, prefilling, sse
from tests.unit.router.openai.chats import chunk, usage, whole

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not shutil.which("npm"), reason="there is no npm here"),
]
PACKAGES = {
    "claude": "@anthropic-ai/claude-code@2.1.332",
    "codex": "@openai/codex@0.171.0",
    "opencode": "opencode-ai@1.18.33",
}
# Claude Code wants 22 or newer, and npm with an older one does not say so.
NODE = "node@24.21.0"
PLACE = Path(os.environ.get("DISAGG_CLIENTS", "/nowhere")).parent / "agents"
MODEL, CONTEXT = "m", 40_000
RETAINED = {**KEPT, "prefix_proof": PROOF}
NOTES = {"note.txt": "KIWI-4711", "other.txt": "FIG-1507"}
PROMPT = "Read the files note.txt and other.txt with shell commands and repeat their content."
EXAMPLES = Path(__file__).parents[2] / "examples"
CLAUDE_CODE = str(EXAMPLES / "claude_code.sh")
CODEX = str(EXAMPLES / "codex.sh")
OPENCODE = str(EXAMPLES / "opencode.sh")
AGENT_TIMEOUT_S = 250
LEASE_S, PAUSE_S = 1, 3


async def scripted_decode(pause_s: int, request: Received, peer: Peer) -> None:
    """Call a shell tool twice where one is offered; after the results, repeat them. With a pause,
    the tools take longer than the engine retains the turn."""
    retained = RETAINED | ({"retained_until": time.time() + LEASE_S} if pause_s else {})
    body = request.json
    results = [m["content"] for m in body["messages"] if m["role"] == "tool"]
    calls = [] if results else shell_calls(body.get("tools") or (), pause_s)
    if not calls:
        texts = results or [body["messages"][-1]["content"]]
        text = f"The files say: {' and '.join(text_of(one)[-1000:] for one in texts)}"
        await answer(request, peer, [{"content": text}], "stop", retained)
        return
    deltas: list[dict[str, Any]] = [{"reasoning": "I look."}, {"content": "Looking."}]
    if body.get("stream"):
        # The pieces of both calls are mixed.
        heads = [{**call, "function": {"name": call["function"]["name"]}} for call in calls]
        deltas.append({"tool_calls": heads})
        for cut in (slice(0, 5), slice(5, None)):
            pieces = [call["function"]["arguments"][cut] for call in calls]
            deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
                       for index, piece in enumerate(pieces)]  # fmt: skip
    else:
        deltas.append({"tool_calls": calls})
    await answer(request, peer, deltas, "tool_calls", retained)


def text_of(content: object) -> str:
    if isinstance(content, list):
        return " ".join(part.get("text", "") for part in content)
    return str(content)


def shell_calls(tools: Sequence[Mapping[str, Any]], pause_s: int) -> list[dict[str, Any]]:
    """Return a call for each file, of the first tool that is a shell."""
    scripts = [f"cat {name}; sleep {pause_s}" for name in NOTES]
    for tool in tools:
        function = tool["function"]
        properties = function.get("parameters", {}).get("properties", {})
        for key in ("command", "cmd"):
            if key in properties and not function["name"].endswith("stdin"):
                is_list = properties[key].get("type") == "array"
                more = {"description": "Read it"} if "description" in properties else {}
                commands = [["sh", "-c", one] if is_list else one for one in scripts]
                arguments = [json.dumps({key: command, **more}) for command in commands]
                return [
                    {
                        "index": index,
                        "id": f"call_{index}",
                        "type": "function",
                        "function": {"name": function["name"], "arguments": written},
                    }
                    for index, written in enumerate(arguments)
                ]
    return []


async def answer(
    request: Received,
    peer: Peer,
    deltas: list[dict[str, Any]],
    finish: str,
    retained: dict[str, Any],
) -> None:
    if request.json.get("stream"):
        head = chunk({"role": "assistant", "content": ""})
        end = sse(delta({}, finish, kv_transfer_params=retained))
        await peer.stream(head, *map(chunk, deltas), end, usage(), DONE)
        return
    message: dict[str, Any] = {}
    for one in deltas:
        message |= one
    await peer.answer(whole(message, finish) | {"kv_transfer_params": retained})


@dataclass(frozen=True)
class Scripted:
    router: Server
    prefiller: MockEngine
    decoder: MockEngine
    home: Path
    pause_s: int


@pytest.fixture(params=[0, PAUSE_S], ids=["at once", "after the lease"])
async def scripted(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Scripted]:
    logs, home = tmp_path / "logs", tmp_path / "home"
    logs.mkdir()
    home.mkdir()
    for name, content in NOTES.items():
        (home / name).write_text(f"{content}\n")
    prefill, alias = prefilling(prefix_proof=PROOF), f"claude-*={MODEL}"
    decode = partial(scripted_decode, request.param)
    async with scripted_stack(prefill, decode, logs, "--model-alias", alias) as stack:
        yield Scripted(*stack, home, request.param)


def installed(name: str) -> Path:
    """Install an agent's package once, and return the folder of its command."""
    folder = PLACE / f"{PACKAGES[name]} {NODE}".replace("/", "_")
    if not (folder / ".made").exists():
        folder.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
        subprocess.run([*npm, NODE, PACKAGES[name]], check=True, timeout=600)
        (folder / ".made").touch()
    return folder / "node_modules" / ".bin"


async def run_agent(scripted: Scripted, name: str, *command: str, **variables: str) -> str:
    """Run the command of an agent in an empty home folder and return what it printed. It must exit
    with 0. `name` is that of its package."""
    folder = await asyncio.to_thread(installed, name)
    given = {
        "HOME": str(scripted.home),
        "PATH": f"{folder}:{os.environ['PATH']}",
        "TERM": "dumb",
        "ROUTER_URL": scripted.router.url,
        "MODEL": MODEL,
        "CONTEXT": str(CONTEXT),
    }
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=scripted.home,
        env=given | variables,
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
    """The agent ran both tools, sent their results, and printed the answer. The prompt with the
    results reused the KV of the turn that called the tools, although a title may share its id,
    unless the lease of that turn had expired."""
    bodies = [request.json for request in scripted.decoder.requests]
    results = [
        [text_of(message["content"]) for message in body["messages"] if message["role"] == "tool"]
        for body in bodies
    ]
    assert any(
        len(found) == 2 and all(map(str.__contains__, found, NOTES.values())) for found in results
    )
    assert all(content in printed for content in NOTES.values())
    reusing = [
        request.json["messages"]
        for request in scripted.prefiller.requests
        if request.json["kv_transfer_params"]["remote_block_ids"]
    ]
    assert len(reusing) == (scripted.pause_s == 0)
    assert all(any(message["role"] == "tool" for message in messages) for messages in reusing)
    expired = turns(scripted.router, "expired")
    assert (expired > 0) == (scripted.pause_s > 0)


def longest_answer(scripted: Scripted) -> int:
    return max(int(request.json["max_tokens"]) for request in scripted.decoder.requests)


@pytest.mark.timeout(900)
async def test_claude_code_runs_a_tool_loop(scripted: Scripted) -> None:
    options = ["-p", PROMPT, "--dangerously-skip-permissions"]
    printed = await run_agent(scripted, "claude", CLAUDE_CODE, *options, IS_SANDBOX="1")
    assert_loop_was_whole(scripted, printed)
    assert longest_answer(scripted) == CONTEXT // 4


@pytest.mark.timeout(900)
async def test_claude_code_asks_for_its_own_models(scripted: Scripted) -> None:
    """Only the URL and the key are set: the router's alias names the model."""
    command = ["claude", "-p", PROMPT, "--dangerously-skip-permissions"]
    url = {"ANTHROPIC_BASE_URL": scripted.router.url, "ANTHROPIC_AUTH_TOKEN": "x"}
    printed = await run_agent(scripted, "claude", *command, IS_SANDBOX="1", **url)
    assert_loop_was_whole(scripted, printed)
    assert {request.json["model"] for request in scripted.decoder.requests} == {MODEL}


@pytest.mark.timeout(900)
async def test_codex_runs_a_tool_loop(scripted: Scripted) -> None:
    options = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    printed = await run_agent(scripted, "codex", CODEX, *options, PROMPT)
    assert_loop_was_whole(scripted, printed)


@pytest.mark.timeout(900)
async def test_opencode_runs_a_tool_loop(scripted: Scripted) -> None:
    offline = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    printed = await run_agent(scripted, "opencode", OPENCODE, "run", PROMPT, **offline)
    assert_loop_was_whole(scripted, printed)
    assert longest_answer(scripted) == CONTEXT // 4
