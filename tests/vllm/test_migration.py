"""The streams of a drained engine move to another one, which borrows their blocks: in vLLM."""

import httpx

from router.commands.cli import main
from tests.integration.oracle import all_streamed, complete_all, differences, text_of
from tests.integration.processes import Server, metric, wait_for
from tests.vllm.measures import COMPUTED
from tests.vllm.servers import OURS, SCHEDULER, Fleet, Kind

PROMPTS = [text_of(length, 17_000 + length) for length in (400, 500, 600)]
LONG = 1000
BLOCK = 32  # as servers.py starts the engines
RUNNING = r"vllm:num_requests_running\{.*\}"
GENERATED = r"vllm:generation_tokens_total\{.*\}"
LOANS = r'disagg_router_prefix_loans_total\{outcome="granted"\}'
MOVED = r'disagg_router_resumes_total\{kind="migrated",outcome="resumed"\}'


def test_streams_of_a_drained_engine_move_and_their_blocks_are_not_computed_again(
    fleet: Fleet, alone: Server
) -> None:
    right = complete_all(alone, PROMPTS, max_tokens=LONG)
    kinds = [Kind(name, OURS, SCHEDULER) for name in ("leaving", "taking")]
    (port,) = fleet.free_ports(1)
    admin = f"http://127.0.0.1:{port}"
    with (
        fleet.servers(*kinds) as (leaving, taking),
        fleet.router([leaving], [leaving, taking], "--admin-port", str(port)) as router,
    ):
        other = f"{admin}/admin/engines/127.0.0.1:{taking.port}"
        httpx.post(f"{other}/drain").raise_for_status()

        def drain() -> None:
            wait_for(lambda: metric(leaving, RUNNING) == len(PROMPTS), "all streams run there")
            httpx.post(f"{other}/resume").raise_for_status()
            assert main(["drain", leaving.url, "--admin", admin, "--migrate"]) == 0

        answers = all_streamed(router, PROMPTS, LONG, drain, seconds=200)
        assert differences(right, answers) == []
        assert metric(router, MOVED) == metric(router, LOANS) == len(PROMPTS)
        again = metric(taking, COMPUTED)
        assert again < BLOCK * len(PROMPTS), "less than a block of each stream is computed again"
        generated = metric(leaving, GENERATED) + metric(taking, GENERATED)
        assert 0 <= generated - len(PROMPTS) * LONG <= 2 * len(PROMPTS), "each token once"
