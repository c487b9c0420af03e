"""Reference engines with two versions of the extension, real NIXL, and a router before them."""

from typing import Any

import pytest

from engine_ext.wire.errors import EXTENSION_VERSION
from tests.integration.legs import decode, decode_body, prefill, take_turn
from tests.integration.oracle import complete, differences, text_of
from tests.integration.processes import CONNECTORS, UNCACHED, Launcher, Server, metric, wait_for

OURS, NEWER = "engine_ext.reference.cli", "tests.integration.newer_engine"
LEASES = "disagg_engine_kv_leases_active"
REFUSED = "disagg_engine_kv_pulls_refused_total"
RECEIVED = "disagg_engine_kv_bytes_received_total"


@pytest.mark.parametrize("newer", ["prefill", "decode"])
def test_a_turn_is_not_read_from_another_version_and_its_blocks_come_back(
    launcher: Launcher, alone: Server, newer: str
) -> None:
    extra = {"bidirectional_kv_xfer": True, "kv_lease_duration": 900}
    settings: dict[str, Any] = {"extra": extra, "policy": "recompute"}
    modules = [NEWER if role == newer else OURS for role in ("prefill", "decode")]
    with (
        launcher.engine("version-p", UNCACHED, module=modules[0], **settings) as prefiller,
        launcher.engine("version-d", module=modules[1], **settings) as decoder,
    ):
        prompt = text_of(200, 41)
        first = take_turn(prefiller, decoder, prompt)
        assert first.params is not None
        longer = prompt + text_of(60, 42)
        second = decode(decoder, longer, prefill(prefiller, longer, first.params))
        right = [complete(alone, text) for text in (prompt, longer)]
        assert differences(right, [first.answer, second.answer]) == []
        assert metric(prefiller, REFUSED) == 1, "it does not read the turn"
        assert metric(decoder, REFUSED) == 2, "nor is it read from"
        for server in (prefiller, decoder):
            assert metric(server, RECEIVED) == 0
            wait_for(lambda server=server: metric(server, LEASES) == 0, "leases end at once")  # type: ignore[misc] # its own
        versions = sorted((EXTENSION_VERSION, EXTENSION_VERSION + 1), reverse=newer == "prefill")
        said = f"runs version {versions[0]} of this extension, this engine version {versions[1]}"
        assert said in decoder.log.read_text()


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_the_router_pairs_engines_of_one_version(
    launcher: Launcher, alone: Server, mode: str
) -> None:
    connector = CONNECTORS[mode]
    with (
        launcher.engine("p", connector=connector) as prefiller,
        launcher.engine("newer-p", connector=connector, module=NEWER) as newer_prefiller,
        launcher.engine("d", connector=connector) as decoder,
        launcher.engine("newer-d", connector=connector, module=NEWER) as newer_decoder,
        launcher.router([prefiller, newer_prefiller], [decoder, newer_decoder]) as router,
    ):
        prompts = [text_of(100, 50 + number) for number in range(8)]
        right = [complete(alone, prompt) for prompt in prompts]
        assert differences(right, [complete(router, prompt) for prompt in prompts]) == []
        moved = "pulls_ok" if mode == "pull" else "pushes_received"
        loaded = [
            metric(server, f"disagg_engine_kv_{moved}_total") for server in (decoder, newer_decoder)
        ]
        assert sum(loaded) == len(prompts)
        # By hand, the two of different versions: the policy is to fail.
        params = prefill(prefiller, prompts[0])
        if mode == "pull":
            body = decode_body(prompts[0], params)
            assert newer_decoder.post("/v1/completions", body).status_code == 500
            wait_for(lambda: metric(prefiller, LEASES) == 0, "the lease ends at once")
