"""Prefill engine, decode engine and router as processes: KV crosses over real NIXL."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.integration.legs import prefill
from tests.integration.oracle import (
    Answer,
    complete,
    complete_all,
    differences,
    text_of,
    thirty_six_prompts,
)
from tests.integration.processes import (
    Launcher,
    Server,
    described,
    freed,
    metric,
    pause,
    post_and_leave,
    wait_for,
)

PREFILLER, DECODER = described("prefill"), described("decode")


def test_tokens_and_logprobs_are_those_of_one_engine_alone(
    router: Server, prefiller: Server, decoder: Server, expected: list[Answer]
) -> None:
    prompts = thirty_six_prompts()
    assert differences(expected, complete_all(router, prompts, at_once=1)) == []
    assert differences(expected, complete_all(router, prompts, at_once=8)) == []
    # D goes on from the token that P has sampled: all of the prompt was fetched or cached.
    assert metric(decoder, "disagg_engine_prompt_tokens_computed_total") == 0
    assert metric(decoder, "disagg_engine_prompt_tokens_fetched_total") > 5000
    wait_for(lambda: freed(prefiller), "P's blocks are freed after the read")
    granted = metric(prefiller, "disagg_engine_kv_leases_granted_total")
    assert granted == 2 * len(prompts)
    assert metric(prefiller, "disagg_engine_kv_leases_released_total") == granted
    assert metric(prefiller, "disagg_engine_kv_leases_expired_total") == 0


def test_the_answer_depends_on_every_prompt_token(alone: Server) -> None:
    prompt = text_of(200, 77)
    right = complete(alone, prompt)
    for position in (0, 50, 100, 150, 199):
        changed = prompt[:position] + "#" + prompt[position + 1 :]
        assert differences([right], [complete(alone, changed)])


def test_one_zeroed_block_is_seen_by_the_oracle(
    launcher: Launcher, prefiller: Server, alone: Server
) -> None:
    prompts = [text_of(length, 300 + length) for length in (65, 200, 700, 1500)]
    right = complete_all(alone, prompts, at_once=1)
    with (
        launcher.engine("corrupt", module="tests.integration.corrupting_engine") as decoder,
        launcher.router([prefiller], [decoder]) as router,
    ):
        wrong = complete_all(router, prompts, at_once=1)
        assert metric(decoder, "disagg_engine_prompt_tokens_fetched_total") > 0
    assert len(differences(right, wrong)) == len(prompts)


def test_what_the_decoders_cache_holds_is_not_fetched(
    router: Server, prefiller: Server, decoder: Server, alone: Server
) -> None:
    prompt = text_of(320, 500)
    complete(router, prompt)
    before = metric(decoder, "disagg_engine_kv_blocks_received_total")
    longer = prompt + text_of(40, 501)
    assert differences([complete(alone, longer)], [complete(router, longer)]) == []
    assert metric(decoder, "disagg_engine_kv_blocks_received_total") - before == 2
    wait_for(lambda: freed(prefiller), "P's blocks are freed")


def test_of_a_prompt_the_decoder_holds_nothing_is_fetched_and_the_prefiller_is_freed(
    router: Server, prefiller: Server, decoder: Server
) -> None:
    """It begins behind the prompt's last token, whose output the prefiller has."""
    prompt = text_of(64, 600)
    first = complete(router, prompt, max_tokens=40)
    blocks = metric(decoder, "disagg_engine_kv_blocks_received_total")
    assert complete(router, prompt, max_tokens=40) == first
    assert metric(decoder, "disagg_engine_kv_blocks_received_total") == blocks
    wait_for(lambda: freed(prefiller), "P's blocks are freed")
    assert metric(prefiller, "disagg_engine_kv_leases_expired_total") == 0


def test_sampling_with_a_seed_is_that_of_one_engine_alone(router: Server, alone: Server) -> None:
    prompt = text_of(150, 700)
    sampling: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
    assert complete(router, prompt, **sampling).tokens == complete(alone, prompt, **sampling).tokens


def test_a_decoder_killed_before_its_read_costs_the_prefiller_one_lease(
    launcher: Launcher,
) -> None:
    lease = 4.0
    with (
        launcher.engine("prefill", extra={"kv_lease_duration": lease}) as prefiller,
        launcher.engine("decode") as decoder,
    ):
        granted_after = time.monotonic()
        params = prefill(prefiller, text_of(100, 1))
        answered = time.monotonic()
        decoder.kill()
        assert params["remote_num_tokens"] == 100
        assert metric(prefiller, "disagg_engine_blocks_delayed") == 4
        wait_for(lambda: freed(prefiller), "the lease ends")
        ended = time.monotonic()
        assert ended - granted_after >= lease
        assert ended - answered < 3 * lease
        assert metric(prefiller, "disagg_engine_kv_leases_expired_total") == 1


@contextmanager
def occupied(engine: Server) -> Iterator[None]:
    """Long streamed answers, one after the other, hold the engine's only place for the block."""
    body = {
        "model": "tiny",
        "prompt": "x",
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    with ExitStack() as requests:
        for _ in range(8):
            requests.enter_context(post_and_leave(engine, body))
        wait_for(
            lambda: (
                metric(engine, "disagg_engine_requests_running") == 1
                and metric(engine, "disagg_engine_requests_waiting") == 7
            ),
            "the engine is occupied",
        )
        yield


def test_a_decoder_that_queues_beyond_the_lease_keeps_it(launcher: Launcher, alone: Server) -> None:
    lease = 5.0
    extra = {"kv_lease_duration": lease}
    prompt = text_of(300, 2)
    with (
        launcher.engine("prefill", extra=extra) as prefiller,
        launcher.engine("decode", "--max-num-seqs", "1", extra=extra) as decoder,
        launcher.router([prefiller], [decoder]) as router,
        ThreadPoolExecutor(1) as pool,
    ):
        with occupied(decoder):
            answer = pool.submit(complete, router, prompt)
            pause(1.3 * lease, "the request has queued for longer than its lease")
            assert not answer.done()
            assert not freed(prefiller)
        assert differences([complete(alone, prompt)], [answer.result(timeout=60)]) == []
        assert metric(prefiller, "disagg_engine_kv_leases_expired_total") == 0
        assert metric(decoder, "disagg_engine_kv_heartbeats_sent_total") >= 3
        assert metric(decoder, "disagg_engine_prompt_tokens_fetched_total") == 300


def test_a_client_that_leaves_while_the_decoder_queues_frees_the_prefiller_at_once(
    launcher: Launcher,
) -> None:
    with (
        launcher.engine("prefill") as prefiller,
        launcher.engine("decode", "--max-num-seqs", "1") as decoder,
        launcher.router([prefiller], [decoder]) as router,
        occupied(decoder),
    ):
        request = {"model": "tiny", "prompt": text_of(100, 3), "stream": True, "ignore_eos": True}
        with post_and_leave(router, request):
            wait_for(
                lambda: metric(decoder, "disagg_engine_kv_heartbeats_sent_total"),
                "the D leg queues",
            )
            assert not freed(prefiller)
        wait_for(lambda: freed(prefiller), "P's blocks are freed")
        assert metric(prefiller, "disagg_engine_kv_leases_expired_total") == 0
