"""Streams of unmodified vLLM go on at another decode engine when theirs is killed: text, ids,
log-probabilities, usage and finish reason are those of one engine alone."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.oracle import text_of
from tests.integration.processes import Server, metric, wait_for
from tests.smoke.test_doctor import doctor, failed, texts
from tests.vllm.measures import RUNNING, nothing_left
from tests.vllm.releases import BUILD, RELEASES, of_next
from tests.vllm.resumed_answers import PATHS, ask, body_of, differ, streamed
from tests.vllm.servers import STOCK, UNCACHED, Fleet, Kind

ONE_WAY = {**STOCK, "kv_connector_extra_config": {}}
"""A stock decode engine retains no answer for a next turn."""
PLAIN = {"VLLM_PLUGINS": "none"}
LONG = 150
SOON = ("--health-interval", "0.5", "--health-timeout", "5", "--decode-policy", "round_robin")
OFTEN = ("--max-resumes", "6")
RESUMED = r'disagg_router_resumes_total\{.*outcome="resumed".*\}'
HEALTHY = r"disagg_router_engine_healthy\{.*\}"
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition penalty": {"repetition_penalty": 1.3},
    "least length": {"ignore_eos": False, "min_tokens": LONG - 5},
    "biased": {"logit_bias": {"101": 2.0, "10": -100}},
    "stop strings": {"stop": ["zqzq", "}{", "abc"]},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
}
"""The further fields of the requests. An engine answers the last two kinds from the beginning."""
NOT_SPECIAL = {str(token): -100 for token in range(256, 259)}
"""A client that has the id of a token without a text would get it twice: not continued there."""


@pytest.fixture(scope="module", params=RELEASES)
def three(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[tuple[Fleet, list[Server]]]:
    """Start a prefill engine, a decode engine, and one engine that gives the expected answers."""
    engines = fleet if request.param == BUILD else of_next(fleet)
    with engines.servers(
        Kind("resume-p", ONE_WAY, (UNCACHED,), environment=PLAIN),
        Kind("resume-d", ONE_WAY, environment=PLAIN),
        Kind("resume-alone", None, (UNCACHED,), environment=PLAIN),
    ) as servers:
        yield engines, servers


def bodies(shows: bool, number: int) -> list[tuple[str, dict[str, Any]]]:
    """Chats and completions. `shows`: their clients want ids and log-probabilities, too."""
    made: list[tuple[str, dict[str, Any]]] = []
    for kind in PATHS:
        for fields in FIELDS.values():
            prompt = text_of(60, number + len(made))
            body = streamed(body_of(kind, prompt, max_tokens=LONG, **fields))
            if shows:
                body["logit_bias"] = {**NOT_SPECIAL, **body.get("logit_bias", {})}
            else:
                for field in ("logprobs", "top_logprobs", "return_token_ids"):
                    body.pop(field, None)
                body.pop("return_tokens_as_token_ids")
            made.append((kind, body))
    return made


def test_the_doctor_measures_the_rate_of_a_pair_and_compares_its_first_tokens(
    three: tuple[Fleet, list[Server]],
) -> None:
    _, (prefiller, decoder, _) = three
    _, checks = doctor("--prefill", prefiller.url, "--decode", decoder.url)
    assert failed(checks) == []
    (rate,) = texts(checks, "KV rate")
    assert " or more, 1 of 1 pairs measured with prompts of 2047 tokens" in rate
    assert texts(checks, "KV content") == [
        "both engines have the same first token, 1 of 1 pairs compared"
    ]


def test_streams_of_a_killed_engine_go_on(three: tuple[Fleet, list[Server]]) -> None:
    fleet, (prefiller, decoder, alone) = three
    for shows in (False, True):
        asked = bodies(shows, 700 + 50 * shows)
        right = [ask(alone, *one) for one in asked]
        with (
            nothing_left(prefiller, decoder, seconds=60),
            fleet.server(Kind("resume-victim", ONE_WAY, environment=PLAIN)) as victim,
            fleet.router([prefiller], [decoder, victim], *SOON, *OFTEN) as router,
        ):
            wait_for(lambda: metric(router, HEALTHY) == 3, "all are asked", 60)
            with ThreadPoolExecutor(len(asked)) as pool:
                asking = [pool.submit(ask, router, *one) for one in asked]
                wait_for(lambda: metric(victim, RUNNING) >= 2, "some are at the victim", 60)
                victim.kill()
                got = [one.result(timeout=200) for one in asking]
            assert metric(router, RESUMED) >= 2
        assert [differ(*both) for both in zip(right, got, strict=True)] == [[]] * len(asked)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", ["stock-kill-p", "stock-kill-d"])
def test_clients_see_nothing_of_a_killed_engine(tmp_path: Path, scenario: str) -> None:
    """The drill under load."""
    patient = [f"--router-arg={each}" for each in ("--health-timeout", "5", "--warm-up", "eager")]
    command = [sys.executable, "scripts/bench.py", "chaos", "--only", scenario, *patient]
    subprocess.run([*command, "--json", tmp_path / "runs"], check=True, timeout=1500)
    (run,) = json.loads((tmp_path / "runs").read_text())["runs"]
    assert run["errors"] == {}
    assert run["ok"] == run["requests"] > 0
