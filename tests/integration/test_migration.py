"""The streams of a drained decode engine move to another one, which borrows their blocks: real
engines over NIXL. The oracle is an engine without disturbances."""

import httpx
import pytest

from engine_ext.reference.tiny_model import TinyModel
from router.commands.cli import main
from tests.integration.oracle import BLOCK, all_streamed, complete, differences, text_of
from tests.integration.processes import BOTH_WAYS, CONNECTORS, Launcher, Server, metric, wait_for

MODEL = TinyModel()
TOKEN_BYTES = 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_dim * 4
PROMPTS = [text_of(1500 + 100 * number, 9000 + number) for number in range(4)]
LONG = 600
COMPUTED = "disagg_engine_prompt_tokens_computed_total"
GENERATED = "disagg_engine_generation_tokens_total"
RUNNING = "disagg_engine_requests_running"
PUSHED = "disagg_engine_kv_pushes_ok_total"
LOAN_BYTES = "disagg_engine_kv_loan_bytes_received_total"
MOVED = r'disagg_router_resumes_total\{kind="migrated",outcome="resumed"\}'


@pytest.mark.parametrize("connector", CONNECTORS.values())
@pytest.mark.parametrize("borrows", [True, False])
def test_streams_of_a_drained_engine_move_and_their_blocks_are_not_computed_again(
    launcher: Launcher, alone: Server, borrows: bool, connector: str
) -> None:
    """Without the loan, the other engine computes them. Where prompts are pushed, it is read as
    elsewhere."""
    right = [complete(alone, prompt, LONG) for prompt in PROMPTS]
    (port,) = launcher.free_ports(1)
    admin = f"http://127.0.0.1:{port}"
    extra = BOTH_WAYS if borrows else {**BOTH_WAYS, "kv_recompute_threshold": 100_000}
    with (
        launcher.engine("prefill", extra=BOTH_WAYS, connector=connector) as prefiller,
        launcher.engine("leaving", extra=BOTH_WAYS, connector=connector) as leaving,
        launcher.engine("taking", extra=extra, connector=connector) as taking,
        launcher.router([prefiller], [leaving, taking], "--admin-port", str(port)) as router,
    ):
        other = f"{admin}/admin/engines/127.0.0.1:{taking.port}"
        httpx.post(f"{other}/drain").raise_for_status()
        computed = {}

        def drain() -> None:
            wait_for(lambda: metric(leaving, RUNNING) == len(PROMPTS), "all streams run there")
            httpx.post(f"{other}/resume").raise_for_status()
            computed[prefiller] = metric(prefiller, COMPUTED)
            assert main(["drain", leaving.url, "--admin", admin, "--migrate"]) == 0

        assert differences(right, all_streamed(router, PROMPTS, LONG, drain)) == []
        assert metric(router, MOVED) == len(PROMPTS)
        assert metric(prefiller, PUSHED) == len(PROMPTS) * (connector == CONNECTORS["push"])
        assert metric(prefiller, COMPUTED) == computed[prefiller]
        # Each token was sampled once, except those that were on their way when their stream moved.
        again = metric(leaving, GENERATED) + metric(taking, GENERATED) - len(PROMPTS) * LONG
        assert 0 <= again <= 2 * len(PROMPTS)
        lengths = [len(prompt) for prompt in PROMPTS]
        if not borrows:
            assert metric(taking, COMPUTED) == sum(lengths)
            assert metric(taking, LOAN_BYTES) == 0
            return
        # Of each stream, less than a block was computed again, be it of the prompt or the answer.
        borrowed = metric(taking, LOAN_BYTES) / TOKEN_BYTES
        held = sum(lengths) + metric(leaving, GENERATED)
        assert held - len(PROMPTS) * (BLOCK + 2) < borrowed < held
        assert metric(taking, COMPUTED) < len(PROMPTS) * BLOCK
