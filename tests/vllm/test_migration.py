"""The streams of a drained engine move to another one, which borrows their blocks: in vLLM."""

from typing import Any

import httpx
import pytest

from router.commands.cli import main
from tests.integration.oracle import all_streamed, complete_all, differences, text_of
from tests.integration.processes import Server, metric, wait_for
from tests.vllm.measures import COMPUTED
from tests.vllm.servers import OURS, PUSH, SCHEDULER, Fleet, Kind

PROMPTS = [text_of(length, 17_000 + length) for length in (400, 500, 600)]
LONG = 1000
BLOCK = 32  # as servers.py starts the engines
RUNNING = r"vllm:num_requests_running\{.*\}"
GENERATED = r"vllm:generation_tokens_total\{.*\}"
LOANS = r'disagg_router_prefix_loans_total\{outcome="granted"\}'
MOVED = r'disagg_router_resumes_total\{kind="migrated",outcome="resumed"\}'


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "one rank": (OURS, ()),
    "push": (PUSH, ()),
    "data-parallel ranks": (OURS, ("--data-parallel-size", "2")),
    "tensor-parallel ranks": (OURS, ("--tensor-parallel-size", "2")),
}
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in [*CASES][1:]]


@pytest.mark.parametrize("case", ["one rank", *NIGHTLY])
def test_streams_of_a_drained_engine_move_and_their_blocks_are_not_computed_again(
    fleet: Fleet, alone: Server, case: str
) -> None:
    """Engines of several tensor-parallel ranks borrow nothing: the other one computes all again."""
    transfer, options = CASES[case]
    right = complete_all(alone, PROMPTS, max_tokens=LONG)
    names = ("leaving", "taking", "source") if case == "push" else ("leaving", "taking")
    kinds = [Kind(name, transfer, (*SCHEDULER, *options)) for name in names]
    (port,) = fleet.free_ports(1)
    admin = f"http://127.0.0.1:{port}"
    with (
        fleet.servers(*kinds) as (leaving, taking, *sources),
        fleet.router(sources or [leaving], [leaving, taking], "--admin-port", str(port)) as router,
    ):
        other = f"{admin}/admin/engines/127.0.0.1:{taking.port}"
        httpx.post(f"{other}/drain").raise_for_status()

        def drain() -> None:
            wait_for(lambda: metric(leaving, RUNNING) == len(PROMPTS), "all streams run there")
            httpx.post(f"{other}/resume").raise_for_status()
            assert main(["drain", leaving.url, "--admin", admin, "--migrate"]) == 0

        answers = all_streamed(router, PROMPTS, LONG, drain, seconds=200)
        assert differences(right, answers) == []
        assert metric(router, MOVED) == len(PROMPTS)
        generated = metric(leaving, GENERATED) + metric(taking, GENERATED)
        assert 0 <= generated - len(PROMPTS) * LONG <= 2 * len(PROMPTS), "each token once"
        again = metric(taking, COMPUTED)
        if case == "tensor-parallel ranks":
            assert again == sum(map(len, PROMPTS)), "vLLM does not count the answer so far"
        else:
            assert metric(router, LOANS) == len(PROMPTS)
            assert again < BLOCK * len(PROMPTS), "less than a block of each is computed again"
