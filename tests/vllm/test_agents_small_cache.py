"""Forty agents in tool loops at a prefill and a decode engine whose caches hold a few of them."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event

import httpx
import pytest

from tests.integration.oracle import Answer, complete_all, differences, tokens_of
from tests.integration.processes import Server, metric, wait_for
from tests.integration.talk import Talk
from tests.vllm.measures import FETCHED, counted, freed
from tests.vllm.servers import OURS, SCHEDULER, Kind

AGENTS, STEPS = 40, 4
SYSTEM = 160
BLOCKS = 192
"""The agents' last prompts need 680."""
EVICTED = r"vllm:kv_block_lifetime_seconds_count\{.*"
SMALL = (
    *("--num-gpu-blocks-override", str(BLOCKS)),
    *("--kv-cache-metrics", "--kv-cache-metrics-sample", "1.0"),
)
PAIR = (
    Kind("agents-p", OURS, (*SCHEDULER, *SMALL)),
    Kind("agents-d", OURS, (*SCHEDULER, *SMALL)),
)


@pytest.mark.nightly
def test_forty_agents_with_pauses_get_one_engines_tokens_from_small_caches(
    router: Server, pair: list[Server], alone: Server
) -> None:
    """A tool runs until another agent has got its answer: pauses are of very different length."""
    prefiller, decoder = pair
    said: list[tuple[list[int], Answer]] = []
    done = [[Event() for _ in range(STEPS)] for _ in range(AGENTS)]

    def run(agent: int) -> None:
        talk = Talk(router, f"agent-{agent}", stream=agent % 2 == 0)
        prompt = [*tokens_of(SYSTEM, 1), *tokens_of(60 + 8 * agent, 1000 + agent)]
        try:
            for step in range(STEPS):
                answer = talk.say(prompt)
                said.append(([*prompt], answer))
                done[agent][step].set()
                awaited = done[(agent + 7 * step + 1) % AGENTS][step]
                assert awaited.wait(300), "the tool has ended"
                prompt += [*answer.tokens, *tokens_of(40, 100 * agent + step)]
        finally:
            for event in done[agent]:
                event.set()

    with ThreadPoolExecutor(AGENTS) as pool:
        for ended in [pool.submit(run, agent) for agent in range(AGENTS)]:
            ended.result()
    assert len(said) == AGENTS * STEPS
    right = complete_all(alone, [prompt for prompt, _ in said])
    assert differences(right, [answer for _, answer in said]) == []
    assert metric(prefiller, EVICTED) > BLOCKS
    assert metric(decoder, EVICTED) > BLOCKS
    assert metric(prefiller, FETCHED) > 0, "some turns were read"
    assert counted(decoder, "leases_revoked") > 0, "others gave way to newer ones"
    for agent in range(AGENTS):
        gone = httpx.delete(f"{router.url}/v1/conversations/agent-{agent}", timeout=30)
        assert gone.status_code == 200, gone.text
    for server in pair:
        wait_for(partial(freed, server), f"{server.name} is free long before 480 s are over", 60)
