"""Engines that die, come back, or are not what they should be."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine_ext.reference.tiny_model import TinyModel, write_tiny_model
from tests.integration.legs import coordinates_in, decode, decode_body, prefill, prefill_body
from tests.integration.oracle import complete, complete_all, differences, text_of
from tests.integration.processes import Launcher, Server, metric, wait_for

PUSH = "DisaggPushConnector"
SLOW = {"UCX_TLS": "tcp"}
"""Without shared memory a READ takes long enough to be interrupted, and needs both ends."""
BLOCK_BYTES = 1 << 19


@dataclass(frozen=True)
class Half:
    """A `memory_engine` process."""

    process: "subprocess.Popen[str]"

    def hears(self, params: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(params) + "\n")
        self.process.stdin.flush()

    def says(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while line.startswith("["):  # UCX logs that the killed peer refuses connections
            line = self.process.stdout.readline()
        assert line, "the process is gone"
        said: dict[str, Any] = json.loads(line)
        return said

    def stop(self) -> None:
        """It holds its connections, and does nothing with them."""
        self.process.send_signal(signal.SIGSTOP)

    def runs_for(self, seconds: float) -> None:
        """One that was stopped, and is again."""
        self.process.send_signal(signal.SIGCONT)
        time.sleep(seconds)
        self.stop()


@contextmanager
def half(
    role: str, name: str, port: int, directory: Path, block_bytes: int = BLOCK_BYTES
) -> Iterator[Half]:
    module = "tests.integration.memory_engine"
    arguments = [role, name, str(port), str(block_bytes)]
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **SLOW},
        )
    try:
        yield Half(process)
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.parametrize("moment", ["before a byte has come", "after some have"])
def test_a_prefiller_killed_in_mid_read_fails_that_read_and_the_next_is_served(
    free_ports: Callable[[int], list[int]], tmp_path: Path, moment: str
) -> None:
    """A READ over TCP needs the holder's help: one that is stopped holds it open for the kill."""
    ports = free_ports(3)
    with (
        half("hold", "dying", ports[0], tmp_path, 2 * BLOCK_BYTES) as dying,
        half("hold", "other", ports[1], tmp_path, 2 * BLOCK_BYTES) as other,
        half("read", "reader", ports[2], tmp_path, 2 * BLOCK_BYTES) as reader,
    ):
        reader.hears(dying.says()["params"])
        assert reader.says() == {"reading": True}
        dying.stop()
        reader.hears("read")
        seen = at_rest(reader)
        seconds = 0.0
        while moment.startswith("after") and not seen["arrived"]:
            dying.runs_for(seconds)  # as little as it takes: the whole READ may take 0.1 s
            seconds += 0.0005
            seen = at_rest(reader)
        assert seen["is_running"], "the READ is under way"
        assert (seen["arrived"] == 0) is moment.startswith("before")
        assert seen["arrived"] < 1
        dying.process.kill()
        died = time.monotonic()
        outcome = reader.says()
        assert time.monotonic() - died < 30
        assert not outcome["ok"]
        reader.hears(other.says()["params"])
        assert reader.says() == {"reading": True}
        reader.hears("read")
        outcome = reader.says()
        assert outcome["ok"]
        assert outcome["is_right"]


def how_far(reader: Half) -> dict[str, Any]:
    reader.hears("how far?")
    said = reader.says()
    assert "arrived" in said, said
    return said


def at_rest(reader: Half) -> dict[str, Any]:
    """How far a READ has come once what was on its way from a stopped holder has arrived."""
    before = how_far(reader)
    while (now := how_far(reader)) != before:
        before = now
    return now


def test_a_lease_that_is_revoked_while_it_is_read_gives_the_right_bytes_or_a_failed_load(
    free_ports: Callable[[int], list[int]], tmp_path: Path
) -> None:
    """The holder fills its blocks anew as soon as they are free."""
    ports = free_ports(2)
    with (
        half("hold", "holder", ports[0], tmp_path, 4 * BLOCK_BYTES) as holder,
        half("read", "reader", ports[1], tmp_path, 4 * BLOCK_BYTES) as reader,
    ):
        reader.hears(holder.says()["params"])
        assert reader.says() == {"reading": True}
        reader.hears("read")
        holder.hears("take them back")
        outcome = reader.says()
        assert outcome["is_right"] if outcome["ok"] else outcome["unproven"] == 1
        assert holder.says() == {"freed": True}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_requests_in_flight_when_their_prefiller_is_killed_end_by_policy(
    launcher: Launcher, alone: Server, policy: str
) -> None:
    prompts = [text_of(700 + length, 50 + length) for length in range(16)]
    right = complete_all(alone, prompts)
    with (
        launcher.engine("dying") as dying,
        launcher.engine("other") as other,
        launcher.engine("decode", policy=policy) as decoder,
        ThreadPoolExecutor(16) as pool,
    ):
        params = [prefill(dying, prompt) for prompt in prompts]
        decode(decoder, prompts[0], params[0])
        dying.process.send_signal(signal.SIGSTOP)
        legs = [
            pool.submit(decoder.post, "/v1/completions", decode_body(prompt, one))
            for prompt, one in zip(prompts[1:], params[1:], strict=True)
        ]
        waiting = "disagg_engine_requests_waiting_for_remote_kv"
        wait_for(lambda: metric(decoder, waiting) == len(legs), "all of them are in flight")
        dying.kill()
        died = time.monotonic()
        responses = [leg.result(timeout=60) for leg in legs]
        assert time.monotonic() - died < 30
        for response, answer in zip(responses, right[1:], strict=True):
            if policy == "recompute":
                assert response.status_code == 200, response.text
                assert tuple(response.json()["choices"][0]["token_ids"]) == answer.tokens
            else:
                assert response.status_code == 500, response.text
                assert "KV cache" in response.json()["error"]["message"]
        again = decode(decoder, prompts[3], prefill(other, prompts[3]))
        assert differences([right[3]], [again.answer]) == []


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_decoder_registered_with_a_prefiller_that_is_killed_ends_by_policy(
    launcher: Launcher, alone: Server, policy: str
) -> None:
    """Nothing tells D but silence, and it does not wait for the registration's own timeout."""
    extra = {"kv_lease_duration": 6, "push_write_bound": 5}
    prompt = text_of(150, 3)
    with (
        launcher.engine("dying", connector=PUSH, extra=extra) as dying,
        launcher.engine("decode", connector=PUSH, extra=extra, policy=policy) as decoder,
        ThreadPoolExecutor(1) as pool,
    ):
        params = coordinates(dying)
        leg = pool.submit(decoder.post, "/v1/completions", decode_body(prompt, params))
        waiting = "disagg_engine_requests_waiting_for_remote_kv"
        wait_for(lambda: metric(decoder, waiting) == 1, "D has registered")
        handshakes = "disagg_engine_kv_handshakes_ok_total"
        wait_for(lambda: metric(decoder, handshakes) == 1, "D has connected")
        dying.kill()
        died = time.monotonic()
        response = leg.result(timeout=60)
        assert time.monotonic() - died < 40
        assert response.status_code == (500 if policy == "fail" else 200)
        if policy == "recompute":
            tokens = tuple(response.json()["choices"][0]["token_ids"])
            assert tokens == complete(alone, prompt).tokens


def coordinates(prefiller: Server, transfer_id: str | None = None) -> dict[str, Any]:
    """What a router tells D before P has prefilled."""
    answer = prefill(prefiller, "hello")
    name = transfer_id or str(uuid.uuid4())
    return {
        "do_remote_prefill": True,
        "remote_request_id": name,
        "transfer_id": name,
        **coordinates_in(answer),
    }


@pytest.mark.parametrize("connector", ["DisaggConnector", PUSH])
def test_a_prefiller_that_is_back_on_its_address_is_used_again(
    launcher: Launcher,
    free_ports: Callable[[int], list[int]],
    alone: Server,
    connector: str,
) -> None:
    port, side_channel = free_ports(2)
    prompts = [text_of(100, seed) for seed in (1, 2, 3)]
    right = complete_all(alone, prompts)
    with launcher.engine("decode", connector=connector) as decoder:
        for prompt, answer in zip(prompts, right, strict=True):
            with launcher.engine(
                "prefill", connector=connector, ports=(port, side_channel)
            ) as prefiller:
                started = time.monotonic()
                turn = decode(decoder, prompt, prefill(prefiller, prompt))
                assert time.monotonic() - started < 25, "before a lease has ended"
                assert differences([answer], [turn.answer]) == []
                prefiller.kill()
        assert metric(decoder, "disagg_engine_prompt_tokens_fetched_total") == 300
        assert metric(decoder, "disagg_engine_kv_handshakes_ok_total") == 3


def test_other_weights_are_refused_by_name_unless_told_otherwise(
    launcher: Launcher, alone: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stranger = write_tiny_model(tmp_path_factory.mktemp("other"), TinyModel(seed=7))
    prompt = text_of(100, 5)
    with ExitStack() as engines:
        prefiller = engines.enter_context(launcher.engine("prefill", model=stranger))
        strict = engines.enter_context(launcher.engine("strict"))
        lax = engines.enter_context(
            launcher.engine("lax", extra={"enforce_handshake_compat": False})
        )
        body = decode_body(prompt, prefill(prefiller, prompt))
        response = strict.post("/v1/completions", body)
        assert response.status_code == 500
        refusal = strict.log.read_text()
        assert "incompatible engines: weights (" in refusal
        assert complete(strict, prompt) == complete(alone, prompt)
        body = decode_body(prompt, prefill(prefiller, prompt))
        assert lax.post("/v1/completions", body).status_code == 200
        assert metric(lax, "disagg_engine_prompt_tokens_fetched_total") == 100
        assert "weights (" in lax.log.read_text()


def test_a_push_between_other_weights_is_refused_on_the_writing_side_too(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """D does not check that P fits, P does before it writes: D's blocks stay as they are."""
    stranger = write_tiny_model(tmp_path_factory.mktemp("other"), TinyModel(seed=7))
    prompt, name = text_of(100, 5), str(uuid.uuid4())
    with (
        launcher.engine("prefill", connector=PUSH, model=stranger) as prefiller,
        launcher.engine("decode", connector=PUSH) as decoder,
    ):
        body = decode_body(prompt, coordinates(prefiller, name))
        with ThreadPoolExecutor(1) as pool:
            leg = pool.submit(decoder.post, "/v1/completions", body)
            p_body = prefill_body(prompt)
            p_body["kv_transfer_params"]["transfer_id"] = name
            prefiller.post("/v1/completions", p_body)
            assert leg.result(timeout=30).status_code == 500
        assert metric(prefiller, "disagg_engine_kv_pushes_ok_total") == 0
