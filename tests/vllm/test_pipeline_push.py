"""Pipeline parallel in vLLM: pushed, between stages that are alike, beside stock engines. In a file
of its own: servers of several stages need much memory."""

import pytest

from tests.integration.legs import decode_body, prefill, prefill_body
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import metric
from tests.vllm import mended_pipeline
from tests.vllm.measures import FETCHED, counted, nothing_left
from tests.vllm.servers import CHUNKS, OURS, PUSH, SCHEDULER, STOCK, Fleet, Kind
from tests.vllm.test_pipeline import LENGTHS, STAGES, Servers, in_stages, prompts_are_right
from tests.vllm.test_push import both_legs, registered
from tests.vllm.test_state import pulled

pytestmark = pytest.mark.nightly


SERVERS = in_stages("pp-push", PUSH, *CHUNKS)


@pytest.mark.parametrize("pair", ["even uneven", "uneven one", "one even"])
def test_pushed_prompts_are_those_of_one_engine_alone(servers: Servers, pair: str) -> None:
    """Each stage of P writes its layers to those of D's that have them, while it computes."""
    prefiller, decoder = (servers[name] for name in pair.split())
    pushed = counted(prefiller, "pushes_ok")
    with nothing_left(prefiller):  # D keeps the turns.
        seed = 20_000 + len(pair) * 1000
        prompts_are_right(prefiller, decoder, servers["one"], both_legs, seed)
    assert counted(prefiller, "pushes_ok") - pushed >= len(LENGTHS)
    early, prompt = counted(prefiller, "early_blocks"), tokens_of(1500, seed)
    with registered(prefiller, decoder, prompt) as (request_id, leg):
        told = prefiller.post("/v1/completions", prefill_body(prompt), request_id)
        assert told.status_code == 200
        assert leg.result(timeout=60).status_code == 200
    assert counted(prefiller, "early_blocks") > early


def test_stages_that_are_alike_pull(fleet: Fleet) -> None:
    kinds = [
        Kind(f"pp-alike-{side}", OURS, (*SCHEDULER, *STAGES), plugins=(mended_pipeline,))
        for side in "pd"
    ]
    with fleet.servers(*kinds) as (prefiller, decoder), nothing_left(prefiller, decoder):
        prompts_are_right(prefiller, decoder, prefiller, pulled, 30_000)


def test_stock_engines_take_no_stage_for_another(fleet: Fleet) -> None:
    """A stock decode engine of two stages would read the first one's layers into each of its. Ours
    reads those of a stock prefill engine, which names them."""
    kinds = (
        Kind("pp-ours", OURS, (*SCHEDULER, *STAGES), plugins=(mended_pipeline,)),
        Kind("pp-stock", STOCK, STAGES, plugins=(mended_pipeline,)),
        Kind("pp-stock-one", STOCK),
    )
    with fleet.servers(*kinds) as (ours, stock, stock_one):
        for reader in (stock, stock_one):
            prompt = tokens_of(300, 12_000 + len(reader.name))
            body = decode_body(prompt, prefill(ours, prompt))
            fetched = metric(reader, FETCHED)
            response = reader.post("/v1/completions", body)
            assert metric(reader, FETCHED) == fetched
            assert response.status_code == 500
            assert "several pipeline stages" in reader.log.read_text()
        prompt = tokens_of(300, 12_100)
        right = complete(stock_one, prompt)
        turn = pulled(stock_one, ours, prompt)
        assert differences([right], [turn.answer]) == []
