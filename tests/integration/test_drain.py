"""Engines that leave: what they hold is read first, what they will not read is given back.

Leases and shutdown timeouts of 25 s and more are what an engine that leaves sooner did not wait
for."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.integration.legs import decode, decode_body, prefill, take_turn
from tests.integration.oracle import complete, differences, text_of
from tests.integration.processes import Launcher, Server, metric, post_and_leave, wait_for


def leave(server: Server) -> float:
    """SIGTERM; returns when it was sent."""
    server.process.send_signal(signal.SIGTERM)
    return time.monotonic()


def test_a_prefiller_that_leaves_waits_until_its_blocks_were_read(
    launcher: Launcher, alone: Server
) -> None:
    prompt = text_of(300, 1)
    with (
        launcher.engine("prefill", "--shutdown-timeout", "25") as prefiller,
        launcher.engine("decode") as decoder,
    ):
        params = prefill(prefiller, prompt)
        leave(prefiller)
        wait_for(lambda: not accepts(prefiller), "P takes no new prefill")
        turn = decode(decoder, prompt, params)
        assert differences([complete(alone, prompt)], [turn.answer]) == []
        assert metric(decoder, "disagg_engine_prompt_tokens_fetched_total") == 300
        assert prefiller.process.wait(timeout=20) == 0


def accepts(server: Server) -> bool:
    try:
        return server.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_prefiller_nobody_reads_from_leaves_when_the_lease_ends(launcher: Launcher) -> None:
    extra = {"kv_lease_duration": 2}
    with launcher.engine("prefill", "--shutdown-timeout", "25", extra=extra) as prefiller:
        prefill(prefiller, text_of(100, 2))
        left = leave(prefiller)
        assert prefiller.process.wait(timeout=20) == 0
        assert time.monotonic() - left > 1


def test_a_prefiller_leaves_at_its_deadline_and_the_decoder_does_not_hang(
    launcher: Launcher,
) -> None:
    prompt = text_of(100, 3)
    with (
        launcher.engine("prefill", "--shutdown-timeout", "1") as prefiller,
        launcher.engine("decode", policy="recompute") as decoder,
    ):
        params = prefill(prefiller, prompt)
        left = leave(prefiller)
        assert prefiller.process.wait(timeout=20) == 0
        assert time.monotonic() - left >= 1
        assert decoder.post("/v1/completions", decode_body(prompt, params)).status_code == 200


def test_turns_that_wait_do_not_keep_an_engine_from_leaving(launcher: Launcher) -> None:
    extra = {"bidirectional_kv_xfer": True}
    with (
        launcher.engine("prefill", extra=extra) as prefiller,
        launcher.engine("decode", "--shutdown-timeout", "30", extra=extra) as decoder,
    ):
        assert take_turn(prefiller, decoder, text_of(100, 4)).params is not None
        leave(decoder)
        assert decoder.process.wait(timeout=20) == 0


def test_a_decoder_that_leaves_frees_the_prefillers_blocks(launcher: Launcher) -> None:
    busy = {"model": "tiny", "prompt": "x", "max_tokens": 3000, "ignore_eos": True}
    prompt = text_of(100, 5)
    with (
        launcher.engine("prefill") as prefiller,
        launcher.engine("decode", "--max-num-seqs", "1", "--shutdown-timeout", "0") as decoder,
        ThreadPoolExecutor(1) as pool,
        post_and_leave(decoder, busy),
        post_and_leave(decoder, busy),
    ):
        waiting = "disagg_engine_requests_waiting"
        wait_for(lambda: metric(decoder, waiting) == 1, "D is busy")
        body = decode_body(prompt, prefill(prefiller, prompt))
        pool.submit(decoder.post, "/v1/completions", body)
        wait_for(lambda: metric(decoder, waiting) == 2, "the D leg queues")
        leave(decoder)
        delayed = "disagg_engine_blocks_delayed"
        wait_for(lambda: metric(prefiller, delayed) == 0, "P's blocks are freed")
        assert metric(prefiller, "disagg_engine_kv_leases_expired_total") == 0
        assert decoder.process.wait(timeout=20) == 0
