"""Decoders of vLLM whose caches are too small for what they are asked, one of which schedules ahead
of the model: what they hand back, a prefiller computes and one of them goes on with."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.integration.oracle import (
    Answer,
    all_decoded_together,
    complete,
    differences,
    streamed,
    text_of,
)
from tests.integration.processes import Server, metric
from tests.vllm import forced_async, resumed_answers
from tests.vllm.measures import nothing_left
from tests.vllm.resumed_answers import PATHS, ask, body_of, differ
from tests.vllm.servers import OURS, SCHEDULER, Fleet, Kind
from tests.vllm.test_async import ASYNC

LONG = 150
PROMPTS = [text_of(length, 17_000 + length) for length in (40, 64, 200, 250, 41, 90)]
FEW = ("--num-gpu-blocks-override", "24", "--max-model-len", "512")
OPTIONS = ("--decode-policy", "round_robin", "--health-timeout", "90")
SYNC, AHEAD = 0, 1


SERVERS = (
    Kind("small", OURS, (*SCHEDULER, *FEW)),
    Kind("small-ahead", OURS, (*ASYNC, *FEW), plugins=(forced_async,)),
)


@pytest.fixture(scope="module")
def right(alone: Server) -> list[Answer]:
    return [complete(alone, prompt, LONG) for prompt in PROMPTS]


def through(server: Server, number: int) -> Answer:
    """Every other answer is streamed."""
    asked = streamed if number % 2 else complete
    return asked(server, PROMPTS[number], LONG)


@pytest.mark.parametrize("used", [(SYNC,), (AHEAD,), (SYNC, AHEAD)])
def test_what_is_handed_back_goes_on(
    fleet: Fleet,
    prefiller: Server,
    servers: list[Server],
    right: list[Answer],
    used: tuple[int, ...],
) -> None:
    decoders = [servers[number] for number in used]
    with (
        nothing_left(prefiller, *servers),
        fleet.router([prefiller], decoders, *OPTIONS) as router,
    ):
        asks = [partial(through, router, number) for number in range(len(PROMPTS))]
        assert differences(right, all_decoded_together(router, decoders, asks)) == []
        moved = r"disagg_router_resumes_total\{.*preempted.*resumed.*\}"
        assert metric(router, moved) > 0


@pytest.mark.parametrize("at", [SYNC, AHEAD])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_it_is_told_in_the_form_that_was_asked_for(
    servers: list[Server], alone: Server, kind: str, at: int
) -> None:
    """And with what another needs, which then says all of it."""
    body = body_of(kind, text_of(150, 17_500), max_tokens=LONG)
    whole = ask(alone, kind, body)
    asked = {**body, "kv_transfer_params": {"hand_back": True}}
    server = servers[at]

    def post(_: int) -> dict[str, Any]:
        answer: dict[str, Any] = server.post(PATHS[kind], asked).json()
        return answer

    with nothing_left(server), ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(post, range(6)))
    back = [one for one in answers if one["choices"][0]["stop_reason"] == "preempted"]
    assert back
    for answer in back:
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "cache_threshold"
        count = len(choice["token_ids"])
        assert tuple(choice["token_ids"]) == whole.tokens[:count]
        begun = answer["kv_transfer_params"]["begun"]
        rest = ask(server, kind, {**body, "kv_transfer_params": {"begun": begun}})
        assert differ(rest, whole) == []


@pytest.mark.parametrize("at", [SYNC, AHEAD])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_ends_once_and_says_why(
    servers: list[Server], alone: Server, kind: str, at: int
) -> None:
    body = body_of(kind, text_of(150, 17_600), max_tokens=LONG)
    whole, server = ask(alone, kind, body), servers[at]
    asked = resumed_answers.streamed({**body, "kv_transfer_params": {"hand_back": True}})
    with nothing_left(server), ThreadPoolExecutor(6) as pool:
        said = list(pool.map(lambda _: ask(server, kind, asked), range(6)))
    back = [one for one in said if one.finish_reason == "cache_threshold"]
    assert back
    assert {one.stop_reason for one in back} == {"preempted"}
    for one in back:
        assert one.tokens == whole.tokens[: len(one.tokens)]
        assert whole.text.startswith(one.text)
