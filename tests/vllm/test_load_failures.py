"""Inside unmodified vLLM: an answer names the engine whose KV could not be loaded, and says why."""

import json
import socket
from functools import partial
from typing import Any

import pytest

from tests.integration.legs import prefill
from tests.integration.oracle import complete, tokens_of
from tests.integration.processes import Server, post_and_leave, wait_for
from tests.vllm.measures import counted
from tests.vllm.servers import OURS, SCHEDULER, UNCACHED, Kind

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Which engine has my keys and values? " * 8}]
GONE = {"remote_engine_id": "gone", "remote_host": "127.0.0.1", "remote_port": 1}
# As of a stock engine: a proof is of one engine's blocks.
UNPROVEN = {"prefix_proof": None, "retain": False}


SERVERS = {
    policy: Kind(policy, {**OURS, "kv_load_failure_policy": policy}, (*SCHEDULER, UNCACHED))
    for policy in ("fail", "recompute")
}


def asked(server: Server, path: str, **fields: Any) -> Any:
    """A decode leg of a prompt whose prefill engine is not there any more."""
    prompt: dict[str, Any] = {"prompt": tokens_of(300, 1)}
    if path == CHAT:
        prompt = {"messages": MESSAGES}
    body = {"model": "tiny", "max_tokens": 4, **prompt, **fields}
    leg = {"do_remote_decode": True, "do_remote_prefill": False}
    first = server.post(path, {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": leg})
    params = {**first.json()["kv_transfer_params"], **GONE, **UNPROVEN}
    return server.post(path, {**body, "kv_transfer_params": params})


def check(failure: dict[str, Any]) -> None:
    assert failure["scope"] == "pair"
    assert failure["reason"]
    assert {name: failure[name] for name in GONE} == GONE


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_error_names_it(servers: dict[str, Server], path: str) -> None:
    answer = asked(servers["fail"], path)
    assert answer.status_code == 500
    check(answer.json()["error"]["kv_load_failure"])
    assert "127.0.0.1" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_error_event_of_a_stream_names_it(servers: dict[str, Server], path: str) -> None:
    answer = asked(servers["fail"], path, stream=True)
    events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    check(json.loads(events[-1].removeprefix("data: "))["error"]["kv_load_failure"])
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_answer_that_is_computed_instead_names_it(servers: dict[str, Server], path: str) -> None:
    answer = asked(servers["recompute"], path)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    check(answer.json()["kv_transfer_params"]["kv_load_failure"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_that_is_computed_instead_names_it_in_a_comment(
    servers: dict[str, Server], path: str
) -> None:
    text = asked(servers["recompute"], path, stream=True).text
    (line,) = [line for line in text.splitlines() if line.startswith(": kv_load_failure ")]
    check(json.loads(line.removeprefix(": kv_load_failure ")))
    assert "kv_load_failure" not in text.replace(line, "")
    assert text.endswith("data: [DONE]\n\n")


def test_the_page_of_identity_says_so(servers: dict[str, Server]) -> None:
    for server in servers.values():
        assert "load_failures" in server.get("/disagg/identity").json()["capabilities"]
        assert counted(server, "pulls_failed") > 0


def test_a_client_that_leaves_during_a_load_is_no_fault(servers: dict[str, Server]) -> None:
    server = servers["fail"]
    before, logged = counted(server, "pulls_failed"), len(server.log.read_text())
    prompt = tokens_of(300, 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        gone = {**GONE, "remote_engine_id": "silent", "remote_port": silent.getsockname()[1]}
        params = {**prefill(server, prompt), **gone, **UNPROVEN}
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "kv_transfer_params": params}
        with post_and_leave(server, body):
            connection, _ = silent.accept()
        wait_for(partial(_is_counted, server, "pulls_aborted"), "its load is given up")
        connection.close()
    assert counted(server, "pulls_failed") == before
    lines = server.log.read_text()[logged:].splitlines()
    warned = [line for line in lines if "WARNING" in line or "ERROR" in line]
    # That the silent engine could not be told is true, and said of that engine.
    assert [line for line in warned if "request" in line or "reports" in line] == []


def _is_counted(server: Server, name: str) -> bool:
    """Up to date after the engine's next step."""
    complete(server, tokens_of(5, 3))
    return counted(server, name) > 0
