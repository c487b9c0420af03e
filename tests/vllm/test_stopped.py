"""A decoder that is stopped without time to drain, as vLLM is by default, answers what it has with
status 200 and the finish reason "abort"."""

import signal
from concurrent.futures import Future, ThreadPoolExecutor

from tests.integration.oracle import Answer, complete, differences, tokens_of
from tests.integration.processes import Launcher, Server, metric, wait_for
from tests.vllm.measures import RUNNING, freed
from tests.vllm.servers import OURS, SCHEDULER, Fleet, Kind

LONG = 200
"""Tokens of an answer: some seconds."""


def test_no_answer_of_a_decoder_that_is_stopped_reaches_a_client(
    fleet: Fleet, prefiller: Server, decoder: Server, alone: Server
) -> None:
    launcher = Launcher(fleet.logs, fleet.model, fleet.free_ports)
    asked = [tokens_of(300, 8000 + number) for number in range(8)]
    right = [complete(alone, prompt, LONG, ignore_eos=True) for prompt in asked]
    with (
        fleet.server(Kind("stopped", OURS, SCHEDULER)) as victim,
        launcher.router([prefiller], [decoder, victim], "--decode-policy", "round_robin") as router,
        ThreadPoolExecutor(8) as pool,
    ):
        answers: list[Future[Answer]] = [
            pool.submit(complete, router, prompt, LONG, ignore_eos=True) for prompt in asked
        ]
        wait_for(lambda: metric(victim, RUNNING) > 0, "it has something to do", 60)
        victim.process.send_signal(signal.SIGTERM)
        got = [answer.result(timeout=300) for answer in answers]
        failed = 'disagg_router_upstream_errors_total{kind="status_5xx",role="decode"}'
        assert failed in router.get("/metrics").text, "it was stopped too late to matter"
    assert differences(right, got) == []
    assert all(len(answer.tokens) == LONG for answer in got)
    wait_for(lambda: freed(prefiller), "nobody keeps blocks for who is gone", 60)
