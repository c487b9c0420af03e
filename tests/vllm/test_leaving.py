"""An engine that is told to leave, or to pause, while others read from it, or are about to.

One has our scheduler class. The other has vLLM's own and no plugin: the connector is all it has.
"""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.legs import decode, prefill, take_turn
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import BOTH_WAYS, Server
from tests.vllm.measures import nothing_left
from tests.vllm.servers import OURS, SCHEDULER, Kind

LEASE_SECONDS = SHUTDOWN_SECONDS = 200
PROMPTLY = 90
"""Seconds in which vLLM's processes are gone on a slow machine, far from lease and timeout."""
LEASING = {
    **OURS,
    "kv_connector_extra_config": {**BOTH_WAYS, "kv_lease_duration": LEASE_SECONDS},
}
OPTIONS = ("--shutdown-timeout", str(SHUTDOWN_SECONDS))
WITHOUT_PLUGIN = {"VLLM_PLUGINS": ""}
DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1"}
SERVERS = {
    "ours": Kind("ours", LEASING, (*SCHEDULER, *OPTIONS), environment=DEVELOPER),
    "stock-class": Kind(
        "stock-class", LEASING, OPTIONS, environment={**DEVELOPER, **WITHOUT_PLUGIN}
    ),
}
NAMES = tuple(SERVERS)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_those_of_one_vllm_alone(
    servers: dict[str, Server], decoder: Server, alone: Server, name: str
) -> None:
    """Both ways: without the plugin, too, the connector is a whole one."""
    server = servers[name]
    with nothing_left(server, decoder):
        for first, second in ((server, decoder), (decoder, server)):
            for length in (1, 33, 300):
                prompt = tokens_of(length, 7000 + length + 50 * NAMES.index(name))
                turn = decode(second, prompt, prefill(first, prompt))
                assert differences([complete(alone, prompt)], [turn.answer]) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["/pause", "/sleep?level=1"])
def test_a_pause_waits_for_who_reads_and_for_no_turn(
    servers: dict[str, Server], decoder: Server, alone: Server, name: str, what: str
) -> None:
    """/sleep on a CPU is the same but for the memory, which stays."""
    server = servers[name]
    seed = 7100 + 10 * NAMES.index(name) + len(what)
    other = tokens_of(200, seed + 1)
    take_turn(decoder, server, other)
    prompt = tokens_of(300, seed)
    params = prefill(server, prompt)
    with ThreadPoolExecutor(1) as pool:
        paused = pool.submit(server.post, what, {})
        time.sleep(2)  # what must not happen has its chance
        assert not paused.done()
        turn = decode(decoder, prompt, params)
        assert differences([complete(alone, prompt)], [turn.answer]) == []
        assert paused.result(timeout=PROMPTLY).status_code == 200
    assert server.post("/resume" if what == "/pause" else "/wake_up", {}).status_code == 200
    turn = decode(decoder, other, prefill(server, other))
    assert differences([complete(alone, other)], [turn.answer]) == []


@pytest.mark.parametrize("name", NAMES)
def test_row_g_a_leaving_engine_stays_until_its_lease_is_read_and_leaves_then(
    servers: dict[str, Server], decoder: Server, alone: Server, name: str
) -> None:
    server = servers[name]
    take_turn(decoder, server, tokens_of(200, 7200 + NAMES.index(name)))
    prompt = tokens_of(300, 7300 + NAMES.index(name))
    params = prefill(server, prompt)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(3)  # what must not happen has its chance
    assert server.process.poll() is None
    turn = decode(decoder, prompt, params)
    assert differences([complete(alone, prompt)], [turn.answer]) == []
    started = time.monotonic()
    assert server.process.wait(timeout=SHUTDOWN_SECONDS) == 0
    assert time.monotonic() - started < PROMPTLY
