"""Conversations through the router, inside unmodified vLLM: right as one vLLM alone."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric, post_and_leave, wait_for
from tests.integration.talk import CHAT, TOOLS, Talk, chat, turns
from tests.vllm.measures import COMPUTED, counted, freed


@pytest.mark.parametrize("stream", [True, False])
def test_three_turns_prefill_only_what_is_new(
    router: Server, prefiller: Server, alone: Server, stream: bool
) -> None:
    talk = Talk(router, f"three-{stream}", stream)
    prompt, hits = tokens_of(1100, 100 + stream), turns(router, "hit")
    for number in range(3):
        before = metric(prefiller, COMPUTED)
        answer = talk.say(prompt)
        assert differences([complete(alone, prompt)], [answer]) == []
        computed = metric(prefiller, COMPUTED) - before
        # Of an answer of 12 tokens, the decoder has no KV of the last.
        assert computed == 1100 if number == 0 else computed <= 51
        prompt += [*answer.tokens, *tokens_of(50, 110 + number)]
    assert turns(router, "hit") - hits == 2


@pytest.mark.parametrize("change", ["stripped", "edited", "shortened", "regenerated", "unrelated"])
def test_another_history_is_answered_right(
    router: Server, prefiller: Server, alone: Server, change: str
) -> None:
    talk = Talk(router, f"changed-{change}", stream=True)
    prompt = tokens_of(1000, 120)
    whole = [*prompt, *talk.say(prompt).tokens]
    changed, held = {
        "stripped": ([*whole[:1000], *whole[1006:], *tokens_of(40, 122)], 992),
        "edited": ([*whole[:500], whole[500] ^ 1, *whole[501:], *tokens_of(40, 121)], 496),
        "shortened": (whole[:700], 688),
        "regenerated": (prompt, 992),
        "unrelated": (tokens_of(400, 123), 0),
    }[change]
    before = metric(prefiller, COMPUTED)
    answer = talk.say(changed)
    assert differences([complete(alone, changed)], [answer]) == []
    # Whole steps of the proof are pulled, 16 tokens each, up to the one that differs.
    assert metric(prefiller, COMPUTED) - before == len(changed) - held


@pytest.mark.parametrize("change", ["none", "tools", "reasoning", "history"])
def test_a_chat_is_that_of_one_vllm_alone(
    router: Server, prefiller: Server, alone: Server, change: str
) -> None:
    fields: dict[str, Any] = {"conversation_id": f"chat-{change}"}
    first = chat(router, CHAT, **fields)
    assert said_in(first) == said_in(chat(alone, CHAT))
    thought = "<think>Because it can.</think>" if change == "reasoning" else ""
    why = {"role": "user", "content": "Why?"}
    second = [*CHAT, {"role": "assistant", "content": thought + said_in(first)}, why]
    if change == "history":
        second[1] = {"role": "user", "content": "What does a decode engine do?"}
    # "none": it has no parser for what "auto" might bring; the prompt shows the tools all the same.
    extra: dict[str, Any] = {"tools": TOOLS, "tool_choice": "none"} if change == "tools" else {}
    before = metric(prefiller, COMPUTED)
    answer = chat(router, second, **fields, **extra)
    assert said_in(answer) == said_in(chat(alone, second, **extra))
    pulled = answer["usage"]["prompt_tokens"] - (metric(prefiller, COMPUTED) - before)
    if change == "tools":
        assert pulled == 0, "they come first in the prompt"
    else:
        assert pulled > 900
    third = [*second, {"role": "assistant", "content": said_in(answer)}, why]
    third[2] = {"role": "assistant", "content": said_in(first)}
    again = chat(router, third, **fields, **extra)
    assert said_in(again) == said_in(chat(alone, third, **extra))


def test_clients_that_leave_at_every_stage_leave_no_block(
    router: Server, prefiller: Server, decoder: Server
) -> None:
    """One is past its prefill, the next ones' end in the step that runs, others queue."""
    wait_for(lambda: freed(prefiller), "P is idle, and leases of earlier tests have ended", 60)
    granted, expired = counted(prefiller, "leases_granted"), counted(prefiller, "leases_expired")
    with ExitStack() as clients:
        for number in range(6):
            body = {"model": "tiny", "prompt": tokens_of(1500, 130 + number), "max_tokens": 400}
            body |= {"conversation_id": f"left-{number}", "stream": number % 2 == 0}
            clients.enter_context(post_and_leave(router, body))
        wait_for(lambda: counted(prefiller, "leases_granted") > granted, "the first is past P")
    wait_for(lambda: freed(prefiller), "P is free before leases of 30 s run out")
    assert counted(prefiller, "leases_expired") == expired


def said_in(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_each_lease_ends_with_one_outcome(
    router: Server, prefiller: Server, decoder: Server
) -> None:
    """Turns that are read, and turns that are released while their reader is introduced."""
    for number in range(3):
        talk = Talk(router, f"outcome-{number}", stream=False)
        prompt = tokens_of(600, 140 + number)
        prompt += talk.say(prompt).tokens
        talk.say(prompt)
    talk.say(tokens_of(100, 150))
    for engine in (prefiller, decoder):
        wait_for(partial(_are_added_up, engine), f"all leases of {engine.name} have one outcome")


def outcomes_of(engine: Server) -> dict[str, float]:
    """Of leases; up to date after the engine's next step."""
    complete(engine, tokens_of(5, 160))
    names = ("granted", "released", "expired", "revoked", "active")
    return {name: counted(engine, f"leases_{name}") for name in names}


def _are_added_up(engine: Server) -> bool:
    outcomes = outcomes_of(engine)
    granted = outcomes.pop("granted")
    return granted == sum(outcomes.values())
