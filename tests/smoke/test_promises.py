"""One test for each promise of the README, on real engines, real NIXL and the real router.

Each test compares answers with one engine alone, by tokens and log-probabilities. The faults that
were planted to see each test fail are listed in docs/development.md. tests/integration and
tests/vllm test the same promises in depth.
"""

import os
import signal
import subprocess
import sys

from router.settings import ADMIN_URL
from tests.conftest import find_free_ports
from tests.integration.legs import decode, prefill
from tests.integration.oracle import (
    all_streamed,
    complete,
    complete_all,
    differences,
    streamed,
    text_of,
    tokens_of,
)
from tests.integration.processes import BOTH_WAYS, Launcher, Server, metric, wait_for
from tests.integration.talk import Talk, turns
from tests.smoke.conftest import SmokeFleet

COMPUTED = "disagg_engine_prompt_tokens_computed_total"
FETCHED = "disagg_engine_prompt_tokens_fetched_total"
PUSHED = "disagg_engine_kv_pushes_ok_total"
RUNNING = "disagg_engine_requests_running"
DRAINING = r"disagg_router_engine_draining\{.*"
LEASES = "disagg_engine_kv_leases_active"
LENGTHS = (1, 31, 32, 33, 90, 200, 700, 1500)
LONG_ANSWER = 150
"""Output tokens: enough to kill or drain an engine in mid-stream."""
BOTH_LEGS = ("--decode-first-turns", "0")
"""Router options: later turns take a prefill leg, too."""


def test_pull_gives_the_answers_of_one_engine(launcher: Launcher, fleet: SmokeFleet) -> None:
    prompts = [text_of(length, 10 + length) for length in LENGTHS]
    expected = complete_all(fleet.alone, prompts)
    fetched, computed = metric(fleet.d, FETCHED), metric(fleet.d, COMPUTED)
    with launcher.router([fleet.p], [fleet.d]) as router:
        assert differences(expected, complete_all(router, prompts, at_once=4)) == []
        assert differences(expected[-1:], [streamed(router, prompts[-1], 12)]) == []
    assert metric(fleet.d, COMPUTED) == computed, "the decode engine computes no prompt"
    assert metric(fleet.d, FETCHED) - fetched >= sum(LENGTHS)
    wait_for(lambda: metric(fleet.p, LEASES) == 0, "the decode engine has released every lease")
    assert metric(fleet.p, "disagg_engine_kv_leases_expired_total") == 0


def test_push_gives_the_answers_of_one_engine(launcher: Launcher, fleet: SmokeFleet) -> None:
    prompts = [text_of(length, 20 + length) for length in LENGTHS]
    expected = complete_all(fleet.alone, prompts)
    with launcher.router([fleet.push_p], [fleet.push_d]) as router:
        wait_for(lambda: _is_pushed(router), "the router has learned that its engines push")
        pushed = metric(fleet.push_p, PUSHED)
        computed = metric(fleet.push_d, COMPUTED)
        assert differences(expected, complete_all(router, prompts, at_once=4)) == []
    assert metric(fleet.push_p, PUSHED) - pushed == len(prompts)
    # The decode engine samples the first token itself, from the prompt's last token.
    assert metric(fleet.push_d, COMPUTED) - computed == len(prompts)
    assert metric(fleet.push_d, "disagg_engine_kv_pushes_missed_total") == 0


def _is_pushed(router: Server) -> bool:
    """Send one request; true once the router has completed one with both legs at once."""
    complete(router, "hello")
    return any(
        'flow="push"' in name and 'outcome="ok"' in name and value
        for name, value in router.metrics().items()
    )


def test_second_turn_prefills_only_what_is_new(launcher: Launcher, fleet: SmokeFleet) -> None:
    with launcher.router([fleet.p], [fleet.d], *BOTH_LEGS) as router:
        talk = Talk(router, "smoke", stream=True)
        prompt = tokens_of(1100, 30)
        for number in range(3):
            computed = metric(fleet.p, COMPUTED)
            answer = talk.say(prompt)
            assert differences([complete(fleet.alone, prompt)], [answer]) == []
            new = metric(fleet.p, COMPUTED) - computed
            assert new == 1100 if number == 0 else new <= 51
            prompt += [*answer.tokens, *tokens_of(50, 31 + number)]
        assert turns(router, "hit") == 2


def test_streams_resume_on_another_decoder_after_one_is_killed(
    launcher: Launcher, fleet: SmokeFleet
) -> None:
    prompts = [text_of(length, 40 + length) for length in (40, 64, 333, 700)]
    expected = [complete(fleet.alone, prompt, LONG_ANSWER) for prompt in prompts]
    with (
        launcher.engine("killed", extra=BOTH_WAYS) as killed,
        launcher.router([fleet.p], [fleet.d, killed], "--decode-policy", "round_robin") as router,
    ):

        def kill() -> None:
            wait_for(lambda: metric(killed, RUNNING) > 1, "two streams run at one decode engine")
            killed.kill()

        assert differences(expected, all_streamed(router, prompts, LONG_ANSWER, kill)) == []
        assert metric(router, r'disagg_router_resumes_total\{.*outcome="resumed".*\}') > 1


def test_drained_decoder_finishes_its_streams_and_gets_no_new_request(
    launcher: Launcher, fleet: SmokeFleet
) -> None:
    prompts = [text_of(100, 50), text_of(100, 51)]
    expected = complete_all(fleet.alone, prompts, max_tokens=LONG_ANSWER)
    (admin,) = find_free_ports(1)
    options = ("--decode-policy", "round_robin", "--admin-port", str(admin))
    with (
        launcher.engine("drained", extra=BOTH_WAYS) as drained,
        launcher.router([fleet.p], [fleet.d, drained], *options) as router,
    ):
        command = [sys.executable, "-m", "router.commands.cli", "drain", drained.url]
        environment = {**os.environ, ADMIN_URL: f"http://127.0.0.1:{admin}"}

        def drain() -> None:
            wait_for(lambda: metric(drained, RUNNING) > 0, "a stream runs at the decode engine")
            with drained.frozen():
                draining = subprocess.Popen([*command, "--timeout", "60"], env=environment)
                wait_for(lambda: metric(router, DRAINING) == 1, "the drain has begun")
            assert draining.wait(timeout=90) == 0
            assert metric(drained, RUNNING) == 0, "drain returns when no request is left"

        assert differences(expected, all_streamed(router, prompts, LONG_ANSWER, drain)) == []
        assert not any("resumes_total" in name and n for name, n in router.metrics().items())
        asked = metric(drained, "disagg_engine_prompt_tokens_total")
        right = complete_all(fleet.alone, prompts)
        assert differences(right, complete_all(router, prompts)) == []
        assert metric(drained, "disagg_engine_prompt_tokens_total") == asked
        drained.process.send_signal(signal.SIGTERM)
        assert drained.process.wait(timeout=30) == 0


def test_kv_of_another_prompt_is_refused(fleet: SmokeFleet) -> None:
    """The lease of one prompt is handed to a request for another one that begins alike."""
    leased = text_of(300, 60)
    asked = leased[:150] + text_of(150, 61)
    fetched = metric(fleet.d, FETCHED)
    turn = decode(fleet.d, asked, prefill(fleet.p, leased))
    assert differences([complete(fleet.alone, asked)], [turn.answer]) == []
    # Only whole blocks before the first other token are proven equal and may be read.
    assert metric(fleet.d, FETCHED) - fetched <= 150
    wait_for(lambda: metric(fleet.p, LEASES) == 0, "the prefill engine has its blocks back")
