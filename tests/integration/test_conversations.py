"""Conversations through the router, over real engines: what a turn reuses, and that it is right."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import pytest

from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import (
    Launcher,
    Server,
    freed,
    is_settled,
    metric,
    post_and_leave,
    wait_for,
)
from tests.integration.talk import CHAT, TOOLS, USAGE, Talk, chat, streamed_chat, turns
from tests.redis_server import PASSWORD, running_redis

ASKED = "disagg_engine_prompt_tokens_total"
COMPUTED = "disagg_engine_prompt_tokens_computed_total"
FAILED = "disagg_engine_kv_pulls_failed_total"


# Turns take both legs here, whatever the router finds out about its decoder.
ROUTER = ("--decode-first-turns", "0")
MODES: dict[str, Any] = {
    "whole": {},
    "streamed": {"stream": True},
    "exact": {"stream": True, "options": {"conversation_stream": "exact"}},
}


@pytest.mark.parametrize("mode", MODES)
def test_three_turns_prefill_only_what_is_new(
    router: Server, prefiller: Server, alone: Server, mode: str
) -> None:
    talk = Talk(router, f"three-{mode}", **MODES[mode])
    prompt, hits = tokens_of(1100, list(MODES).index(mode)), turns(router, "hit")
    for number in range(3):
        before = metric(prefiller, COMPUTED)
        answer = talk.say(prompt)
        assert differences([complete(alone, prompt)], [answer]) == []
        computed = metric(prefiller, COMPUTED) - before
        assert computed == 1100 if number == 0 else computed <= 51
        prompt += [*answer.tokens, *tokens_of(50, 100 + number)]
    assert turns(router, "hit") - hits == 2
    wait_for(lambda: freed(prefiller), "P's blocks are freed")


@pytest.mark.parametrize("change", ["stripped", "edited", "shortened", "regenerated", "unrelated"])
def test_another_history_is_answered_right(
    router: Server, prefiller: Server, alone: Server, change: str
) -> None:
    talk = Talk(router, f"changed-{change}", stream=True)
    prompt = tokens_of(1000, 20)
    whole = [*prompt, *talk.say(prompt).tokens]
    changed, held = {
        "stripped": ([*whole[:1000], *whole[1006:], *tokens_of(40, 22)], 992),
        "edited": ([*whole[:500], whole[500] ^ 1, *whole[501:], *tokens_of(40, 21)], 496),
        "shortened": (whole[:700], 688),
        "regenerated": (prompt, 992),
        "unrelated": (tokens_of(400, 23), 0),
    }[change]
    before = metric(prefiller, COMPUTED)
    answer = talk.say(changed)
    assert differences([complete(alone, changed)], [answer]) == []
    # Whole steps of the proof are pulled, of 16 tokens here, up to the one that differs.
    assert metric(prefiller, COMPUTED) - before == len(changed) - held


@pytest.mark.parametrize("change", ["none", "tools", "history"])
def test_a_chat_is_that_of_one_engine_alone(
    router: Server, prefiller: Server, alone: Server, change: str
) -> None:
    fields = {"conversation_id": f"chat-{change}"}
    first = chat(router, CHAT, **fields)
    assert first["choices"] == chat(alone, CHAT)["choices"]
    said = first["choices"][0]["message"]["content"]
    after = [*CHAT, {"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
    extra: dict[str, Any] = {"tools": TOOLS} if change == "tools" else {}
    if change == "history":
        after[1] = {"role": "user", "content": "What does a decode engine do?"}
    before = metric(prefiller, COMPUTED)
    second = chat(router, after, **fields, **extra)
    assert second["choices"] == chat(alone, after, **extra)["choices"]
    pulled = second["usage"]["prompt_tokens"] - (metric(prefiller, COMPUTED) - before)
    if change == "tools":
        assert pulled == 0, "they come first in the prompt"
    else:
        assert pulled > 900


def test_a_streamed_chat_of_three_turns_prefills_only_what_is_new(
    router: Server, prefiller: Server, alone: Server
) -> None:
    """As a client holds it: text, appended as it came."""
    messages = [*CHAT, {"role": "user", "content": "And " * 60}]
    before, lengths = metric(prefiller, COMPUTED), []
    for question in ("Why?", "Really?", "Since when?"):
        fields = {"conversation_id": "talk", "stream": True, "stream_options": USAGE}
        said, usage = streamed_chat(router, messages, **fields)
        assert said == chat(alone, messages)["choices"][0]["message"]["content"]
        lengths.append(usage["prompt_tokens"])
        messages = [*messages, {"role": "assistant", "content": said}]
        messages.append({"role": "user", "content": question})
    assert lengths[0] >= 1000
    # A text that comes back may be tokenized otherwise at its seam: not the last blocks' worth.
    assert metric(prefiller, COMPUTED) - before <= lengths[-1] + 2 * 64


THOUGHT = "Because it can. "


@pytest.mark.parametrize("kept", [True, False])
def test_reasoning_that_comes_and_goes_is_answered_right(
    router: Server, prefiller: Server, alone: Server, kept: bool
) -> None:
    """The tiny model does not reason, but a client may say that it did, and then leave it out."""
    fields = {"conversation_id": f"reasoned-{kept}"}
    said = chat(router, CHAT, **fields)["choices"][0]["message"]["content"]
    thought = {"role": "assistant", "content": f"<think>{THOUGHT}</think>{said}"}
    why = {"role": "user", "content": "Why?"}
    second = [*CHAT, thought, why]
    answer = chat(router, second, **fields)["choices"][0]["message"]["content"]
    assert answer == chat(alone, second)["choices"][0]["message"]["content"]
    history = thought if kept else {"role": "assistant", "content": said}
    third = [*CHAT, history, why, {"role": "assistant", "content": answer}, why]
    before = metric(prefiller, COMPUTED)
    got = chat(router, third, **fields)
    assert got["choices"] == chat(alone, third)["choices"]
    assert 0 < metric(prefiller, COMPUTED) - before < got["usage"]["prompt_tokens"] - 900


def test_of_many_takers_at_two_routers_none_pulls_what_another_took_and_all_are_right(
    launcher: Launcher, prefiller: Server, decoder: Server, alone: Server
) -> None:
    prompt = tokens_of(1000, 60)
    with running_redis() as redis, ExitStack() as stack:
        options = [*redis.options, "--decode-first-turns=0"]
        routers = [
            stack.enter_context(launcher.router([prefiller], [decoder], *options)) for _ in range(2)
        ]
        first = Talk(routers[0], "many").say(prompt)
        longer = [*prompt, *first.tokens, *tokens_of(50, 61)]
        right, failed = complete(alone, longer), metric(prefiller, FAILED)
        with ThreadPoolExecutor(50) as pool:
            asked = [
                pool.submit(Talk(routers[number % 2], "many").say, longer) for number in range(50)
            ]
            answers = [each.result() for each in asked]
        assert differences([right] * 50, answers) == []
        # One takes the first turn's entry. Who comes after another's answer may take that one's, of
        # which only the prompt is his own. Whoever takes what another took finds it gone.
        assert metric(prefiller, FAILED) == failed
        hits, cuts, new = (
            sum(turns(router, name) for router in routers) for name in ("hit", "cut", "new")
        )
        assert hits == 1
        assert cuts + new == 50


TURNS = "disagg-router:turn:*"


def test_two_routers_share_one_redis(
    launcher: Launcher, prefiller: Server, decoder: Server, alone: Server
) -> None:
    with running_redis() as redis, ExitStack() as stack:
        options = [*redis.options, "--tenant-header=x-tenant", "--decode-first-turns=0"]
        routers = [
            stack.enter_context(launcher.router([prefiller], [decoder], *options)) for _ in range(2)
        ]
        prompt = tokens_of(1000, 30)
        for number in range(3):
            before = metric(prefiller, COMPUTED)
            answer = Talk(routers[number % 2], "shared").say(prompt)
            assert differences([complete(alone, prompt)], [answer]) == []
            if number:
                assert metric(prefiller, COMPUTED) - before <= 51
            prompt += [*answer.tokens, *tokens_of(50, 31 + number)]
        (key,) = redis.keys(TURNS)
        assert "shared" not in key + redis.dump()
        body = {"model": "tiny", "prompt": prompt, "conversation_id": "shared"}
        before = metric(prefiller, COMPUTED)
        routers[0].post("/v1/completions", body, headers={"x-tenant": "somebody-else"})
        assert metric(prefiller, COMPUTED) - before == len(prompt), "another tenant's turn"
        assert len(redis.keys(TURNS)) == 2
        assert "somebody" not in " ".join(redis.keys(TURNS)) + redis.dump()
        assert sum(turns(router, "hit") for router in routers) == 2


def test_redis_stopped_in_mid_run_costs_reuse_and_no_request(
    launcher: Launcher, prefiller: Server, decoder: Server, alone: Server
) -> None:
    port = launcher.free_ports(1)[0]
    options = ["--conversation-store", f"redis://127.0.0.1:{port}"]
    options += ["--conversation-store-password", PASSWORD]
    prompt = tokens_of(300, 40)
    right = complete(alone, prompt)
    with launcher.router([prefiller], [decoder], *options) as router:
        talk = Talk(router, "redis-dies")
        with running_redis(port) as redis:
            assert differences([right], [talk.say(prompt)]) == []
            assert len(redis.keys(TURNS)) == 1
            redis.freeze()
            assert differences([right], [talk.say(prompt)]) == []
            redis.thaw()
        for _ in range(5):
            assert differences([right], [talk.say(prompt)]) == []
        errors = "disagg_router_conversation_store_errors_total.*"
        assert metric(router, errors) > 0
        assert turns(router, "store_failed") == 6
        assert router.log.read_text().count("Redis fails as conversation store") == 1
        with running_redis(port) as redis:
            wait_for(lambda: talk.say(prompt) and redis.keys(TURNS), "the store is used again", 60)
            assert "conversation store has recovered" in router.log.read_text()


@contextmanager
def holding_back(decoder: Server) -> Iterator[tuple[Server, Event]]:
    """A decoder behind a proxy that never passes the first POST on; the event says it came."""
    held = Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                Thread(target=forward, args=(client,), daemon=True).start()

    def forward(client: socket.socket) -> None:
        with (
            client,
            suppress(OSError),
            socket.create_connection(("127.0.0.1", decoder.port)) as upstream,
        ):
            back = Thread(target=pump, args=(upstream, client), daemon=True)
            back.start()
            while data := client.recv(65536):
                if data.startswith(b"POST") and not held.is_set():
                    held.set()
                    while client.recv(65536):
                        pass
                    return
                upstream.sendall(data)
            upstream.shutdown(socket.SHUT_WR)
            back.join()

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    Thread(target=serve, daemon=True).start()
    try:
        yield replace(decoder, port=listener.getsockname()[1]), held
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # ends an accept() that waits; close() does not
        listener.close()


@pytest.mark.parametrize("conversation", [True, False])
def test_a_client_that_leaves_between_the_legs_frees_the_prefiller_at_once(
    launcher: Launcher, prefiller: Server, decoder: Server, conversation: bool
) -> None:
    """Even if the decoder never got its leg: here it is lost on the way."""
    expired = metric(prefiller, "disagg_engine_kv_leases_expired_total")
    with (
        holding_back(decoder) as (slow, held),
        launcher.router([prefiller], [slow]) as router,
    ):
        body: dict[str, Any] = {"model": "tiny", "prompt": tokens_of(300, 50), "stream": True}
        if conversation:
            body["conversation_id"] = "left"
        with post_and_leave(router, body):
            assert held.wait(30)
            assert metric(prefiller, "disagg_engine_blocks_delayed") > 0
        wait_for(lambda: freed(prefiller), "P is free")
    assert metric(prefiller, "disagg_engine_kv_leases_expired_total") == expired


def test_clients_that_leave_at_every_stage_leave_no_block(
    launcher: Launcher, prefiller: Server, decoder: Server
) -> None:
    """One is past its prefill, the next one's ends in the step that runs, the others queue."""
    expired = metric(prefiller, "disagg_engine_kv_leases_expired_total")
    asked = metric(prefiller, ASKED)
    with (
        launcher.router([prefiller], [decoder], "--decode-first-turns", "0") as router,
        ExitStack() as clients,
    ):
        for number in range(6):
            body = {"model": "tiny", "prompt": tokens_of(1500, 70 + number), "max_tokens": 500}
            body |= {"conversation_id": f"left-{number}", "stream": number % 2 == 0}
            clients.enter_context(post_and_leave(router, body))
        wait_for(lambda: metric(prefiller, ASKED) > asked, "the first has its prefill")
        clients.close()
        wait_for(lambda: is_settled(prefiller.metrics()), "P has no request left")
        wait_for(lambda: freed(prefiller), "P is free")
    assert metric(prefiller, "disagg_engine_kv_leases_expired_total") == expired
