"""Push mode inside vLLM where neither engine has room for all that it is asked for."""

import uuid
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.integration.legs import Turn, decode, prefill
from tests.integration.oracle import complete, differences, text_of
from tests.integration.processes import Server, wait_for
from tests.vllm.measures import counted, nothing_left
from tests.vllm.servers import PUSH, SCHEDULER, UNCACHED, Kind
from tests.vllm.test_push import where

SMALL = ("--num-gpu-blocks-override", "48", "--max-model-len", "1500", UNCACHED)
"""Room for one prompt of 900 tokens, and not for another one beside."""


# A prefill engine and two decode engines; the last one has vLLM's own scheduler class, which takes
# back no request whose load has failed.
SERVERS = (
    Kind("full-p", PUSH, (*SCHEDULER, *SMALL)),
    Kind("full-d", PUSH, (*SCHEDULER, *SMALL)),
    Kind("full-stock-scheduler", PUSH, SMALL),
)


@pytest.mark.parametrize("gives_back", [True, False])
def test_two_prompts_in_opposite_order_are_both_answered_where_one_fits(
    servers: list[Server], alone: Server, gives_back: bool
) -> None:
    prefiller, decoder = servers[0], servers[1 if gives_back else 2]
    prompts = [text_of(900, 7300 + 10 * gives_back + number) for number in range(2)]
    right = [complete(alone, prompt) for prompt in prompts]
    first, second = (str(uuid.uuid4()) for _ in prompts)
    at_p = {"do_remote_prefill": True, **where(prefiller)}
    waits = "pushes_active" if gives_back else "pushes_awaited"
    with nothing_left(prefiller, decoder), ThreadPoolExecutor(4) as pool:

        def send_decode(prompt: str, name: str) -> Future[Turn]:
            params = {**at_p, "remote_request_id": name}
            return pool.submit(decode, decoder, prompt, params, 12, name)

        decoded_second = send_decode(prompts[1], second)
        wait_for(lambda: counted(decoder, waits) == 1, "D has the second one")
        decoded_first = send_decode(prompts[0], first)
        wait_for(lambda: counted(decoder, "pushes_awaited") >= 1, "the first one has no room at D")
        pool.submit(prefill, prefiller, prompts[0], None, first).result(timeout=60)
        pool.submit(prefill, prefiller, prompts[1], None, second)
        got = [decoded_first.result(timeout=60).answer, decoded_second.result(timeout=60).answer]
    assert differences(right, got) == []
    assert counted(decoder, "pushes_given_back") == gives_back
