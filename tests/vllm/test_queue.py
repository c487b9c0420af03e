"""A decode engine that is busy, left and killed; a prefill engine that knows no turns.

One server with one place, which plays both.
"""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.integration.legs import decode, decode_body, prefill, prefill_body, take_turn
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric, post_and_leave, wait_for
from tests.vllm.measures import RUNNING, WAITING, counted, freed, nothing_left
from tests.vllm.servers import ONE_WAY, SCHEDULER, Kind

LEASE = 6
SHORT = {**ONE_WAY, "kv_connector_extra_config": {"kv_lease_duration": LEASE}}


# P whose leases are short; D with one place, without turns.
SERVERS = (
    Kind("short", SHORT, SCHEDULER),
    Kind("queue", ONE_WAY, (*SCHEDULER, "--max-num-seqs", "1")),
)


@contextmanager
def busy(decoder: Server) -> Iterator[None]:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1900, "ignore_eos": True}
    with post_and_leave(decoder, body, str(uuid.uuid4())):
        wait_for(lambda: metric(decoder, RUNNING) == 1, "D is busy")
        yield


@contextmanager
def queued(decoder: Server, prompt: list[int], params: dict[str, Any]) -> Iterator[None]:
    before = metric(decoder, WAITING)
    with post_and_leave(decoder, decode_body(prompt, params), str(uuid.uuid4())):
        wait_for(lambda: metric(decoder, WAITING) == before + 1, "the D leg queues")
        yield


def test_r9_a_turn_given_to_a_prefiller_without_turns_is_computed(
    servers: list[Server], decoder: Server, alone: Server
) -> None:
    plain = servers[0]
    prompt = tokens_of(300, 40)
    with nothing_left(plain, decoder):
        turn = take_turn(plain, decoder, prompt)
        longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 41)]
        response = plain.post("/v1/completions", prefill_body(longer, turn.params))
        assert response.status_code == 200, response.text
        again = decode(decoder, longer, response.json()["kv_transfer_params"])
        assert differences([complete(alone, longer)], [again.answer]) == []


def test_an_abort_while_queued_frees_the_prefiller_without_an_expiry(
    servers: list[Server], prefiller: Server
) -> None:
    decoder = servers[1]
    wait_for(lambda: freed(prefiller), "P is idle, and leases of earlier tests have ended", 60)
    prompt = tokens_of(300, 50)
    with busy(decoder):
        expired, params = counted(prefiller, "leases_expired"), prefill(prefiller, prompt)
        with queued(decoder, prompt, params):
            assert not freed(prefiller)
        wait_for(lambda: freed(prefiller), "P's blocks are freed")
    complete(prefiller, [1], 1)  # vLLM counts when it steps
    assert counted(prefiller, "leases_expired") == expired


def test_a_decoder_killed_with_requests_in_its_queue_costs_the_prefiller_one_lease(
    servers: list[Server], decoder: Server, alone: Server
) -> None:
    """The last test of this file: `queue` is gone."""
    prefiller, dying = servers
    prompts = [tokens_of(length, 60) for length in (100, 300, 700)]
    expired = counted(prefiller, "leases_expired")
    with ExitStack() as clients:
        clients.enter_context(busy(dying))
        for prompt in prompts:
            clients.enter_context(queued(dying, prompt, prefill(prefiller, prompt)))
        dying.kill()
        wait_for(lambda: freed(prefiller), "P's blocks are freed by the end of their leases")
    complete(prefiller, [1], 1)  # vLLM counts when it steps
    assert counted(prefiller, "leases_expired") - expired == len(prompts)
    for prompt in prompts:
        turn = decode(decoder, prompt, prefill(prefiller, prompt))
        assert differences([complete(alone, prompt)], [turn.answer]) == []
