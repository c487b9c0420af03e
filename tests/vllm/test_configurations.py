"""Two vLLM engines of one model, one with other --hf-overrides: no KV moves between them."""

from tests.integration.legs import decode, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.vllm.measures import counted
from tests.vllm.servers import OURS, SCHEDULER, UNCACHED, Fleet, Kind

RECOMPUTES = {**OURS, "kv_load_failure_policy": "recompute"}
OTHER = ("--hf-overrides", '{"rms_norm_eps": 0.01}')


def test_engine_loads_nothing_from_one_with_another_configuration(fleet: Fleet) -> None:
    usual = (*SCHEDULER, UNCACHED)
    kinds = (Kind("overridden", OURS, (*usual, *OTHER)), Kind("usual", RECOMPUTES, usual))
    with fleet.servers(*kinds) as (prefiller, decoder):
        pages = [one.get("/disagg/identity").json()["ranks"][0] for one in (prefiller, decoder)]
        hashes = {page["compatibility_hash"] for page in pages}
        digests = {page["compatibility_factors"]["configuration"] for page in pages}
        assert (len(hashes), len(digests)) == (1, 2), "stock's hash covers no configuration"
        prompt = tokens_of(200, 31)
        turn = decode(decoder, prompt, prefill(prefiller, prompt))
        assert differences([complete(decoder, prompt)], [turn.answer]) == []
        assert counted(decoder, "pulls_failed") == 1
        assert "incompatible engines: configuration (" in decoder.log.read_text()
