"""What the reference engine tells routers, and what they may tell it, besides requests."""

from tests.integration.legs import coordinates_in, prefill
from tests.integration.oracle import text_of
from tests.integration.processes import Launcher, metric, wait_for

LEASES = "disagg_engine_kv_leases_active"


def test_an_engine_says_who_it_is_and_gives_up_kv_by_name(launcher: Launcher) -> None:
    with launcher.engine("pages") as engine:
        said = engine.get("/disagg/identity").json()
        assert (said["engine"], said["transfer_modes"]) == ("disagg-engine", ["pull"])
        assert {"prefix_proof", "release", "streamed_kv_transfer_params"} <= {*said["capabilities"]}
        params = prefill(engine, text_of(100, 1))
        (rank,) = said["ranks"]
        assert coordinates_in(rank) == coordinates_in(params)
        assert metric(engine, LEASES) == 1
        answers = []
        for _ in range(2):
            answer = engine.post("/disagg/release", {"kv_transfer_params": params})
            answers.append(answer.json())
            wait_for(lambda: metric(engine, LEASES) == 0, "the blocks are given up", 5)
        assert answers == [{"released": True}, {"released": False}]
