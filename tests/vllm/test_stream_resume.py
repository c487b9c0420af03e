"""Decoders of vLLM that die or are stopped in mid-stream: another one goes on, token for token."""

from collections.abc import Callable

from tests.integration.oracle import all_streamed, complete_all, differences, text_of
from tests.integration.processes import Server, metric, wait_for
from tests.vllm.servers import OURS, SCHEDULER, Fleet, Kind

LONG = 300
"""Tokens of an answer: the victim is still streaming when the test has seen that it does."""
PROMPTS = [text_of(length, 16_000 + length) for length in (40, 200, 64, 333)]
RUNNING = r"vllm:num_requests_running\{.*\}"
HEALTHY = r"disagg_router_engine_healthy\{.*\}"
SOON = ("--health-interval", "0.5", "--health-timeout", "5", "--decode-policy", "round_robin")

OFTEN = ("--max-resumes", "6")


def test_streams_go_on_at_another_decoder(
    fleet: Fleet, prefiller: Server, decoder: Server, alone: Server
) -> None:
    right = complete_all(alone, PROMPTS, max_tokens=LONG)
    victims = [Kind(name, OURS, SCHEDULER) for name in ("killed", "stopped")]
    with fleet.servers(*victims) as (killed, stopped):
        for victim, end_it in ((killed, killed.kill), (stopped, stopped.process.terminate)):

            def end(victim: Server = victim, end_it: Callable[[], None] = end_it) -> None:
                wait_for(lambda: metric(victim, RUNNING) > 0, "some are at the victim", 60)
                end_it()

            # Five engines share two cores: one whose load fails for that is one more move.
            with fleet.router([prefiller], [decoder, victim], *SOON, *OFTEN) as router:
                wait_for(lambda: metric(router, HEALTHY) == 3, "all are asked", 60)
                assert (
                    differences(right, all_streamed(router, PROMPTS, LONG, end, seconds=200)) == []
                )
                resumed = r'disagg_router_resumes_total\{.*outcome="resumed".*\}'
                assert metric(router, resumed) > 0
                continued = r'disagg_router_handed_over_total\{outcome="continued"\}'
                # And of those whose decoder ended before it had said anything.
                assert metric(router, continued) >= len(PROMPTS)
