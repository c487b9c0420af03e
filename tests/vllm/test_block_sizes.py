"""Blocks of other sizes at P and at D. On CPUs vLLM has all keys of a block before all values, so
that half of a block of 64 tokens is no block of 32: such engines do not read each other."""

import pytest

from tests.integration.legs import decode_body, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server
from tests.vllm.measures import counted, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, Fleet, Kind

pytestmark = pytest.mark.nightly

PROMPT = tokens_of(300, 8200)


@pytest.mark.parametrize("is_larger", [False, True])
def test_blocks_of_another_size_are_refused_by_name(
    fleet: Fleet, prefiller: Server, alone: Server, is_larger: bool
) -> None:
    kind = Kind("of-64", OURS, (*SCHEDULER, "--block-size", "64"))
    with fleet.server(kind) as other:
        first, second = (other, prefiller) if is_larger else (prefiller, other)
        sizes = "32 here, 64 there" if is_larger else "64 here, 32 there"
        # Who refuses a handshake cannot tell that nothing is read: the lease runs out.
        with nothing_left(first, second, seconds=90):
            body = decode_body(PROMPT, prefill(first, PROMPT))
            refused = second.post("/v1/completions", body)
        assert refused.status_code == 500  # kv_load_failure_policy says so
        assert counted(second, "pulls_failed") > 0
        assert f"block_size differs: {sizes}, and CPU_ATTN" in second.log.read_text()
        assert differences([complete(alone, PROMPT)], [complete(second, PROMPT)]) == []
