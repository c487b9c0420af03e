"""Two vLLM engines on one machine with one engine_id, as after a configuration was copied."""

from typing import Any

from tests.integration.legs import decode, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.vllm.measures import counted, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, UNCACHED, Fleet, Kind

COPIED: dict[str, Any] = {
    **OURS,
    "engine_id": "copied",
    "kv_connector_extra_config": {"kv_lease_duration": 900},
}


def test_a_namesake_is_named_and_counted_and_has_its_blocks_back_at_once(fleet: Fleet) -> None:
    kinds = [Kind(f"same-{role}", COPIED, (*SCHEDULER, UNCACHED)) for role in "pd"]
    with fleet.servers(*kinds) as (prefiller, decoder):
        prompts = [tokens_of(200, 9900 + number) for number in range(2)]
        with nothing_left(prefiller, decoder):
            params = [prefill(prefiller, prompt) for prompt in prompts]
            turns = [decode(decoder, *legs) for legs in zip(prompts, params, strict=True)]
        right = [complete(prefiller, prompt) for prompt in prompts]
        assert differences(right, [turn.answer for turn in turns]) == []
        assert counted(decoder, "engine_id_clashes") == 2
        assert counted(decoder, "pulls_failed") == counted(prefiller, "leases_expired") == 0
        log = decoder.log.read_text()
        assert log.count("two engines have the engine_id copied") == 1
        assert f"another one at 127.0.0.1:{params[0]['remote_port']}" in log
        for server in (prefiller, decoder):
            assert "KV connector: " not in server.log.read_text(), "no hook has failed"
