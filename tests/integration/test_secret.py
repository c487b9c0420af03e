"""Real engines that share a secret, configured as an operator would."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.legs import decode, decode_body, prefill
from tests.integration.oracle import complete, differences, text_of
from tests.integration.processes import CONNECTORS, Launcher, Server, metric


@pytest.fixture
def secret(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "secret"
    path.write_text("what only these engines know\n")
    return {"side_channel_secret_file": str(path)}


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("side_channel_mode", ["required", "mixed"])
def test_engines_that_share_a_secret_answer_as_one_alone_and_hear_nothing_unsealed(
    launcher: Launcher, alone: Server, secret: dict[str, Any], mode: str, side_channel_mode: str
) -> None:
    extra = {
        **secret,
        "side_channel_mode": side_channel_mode,
        "allowed_peers": ["127.0.0.0/8", "::1"],
    }
    connector = CONNECTORS[mode]
    with (
        launcher.engine("prefill", extra=extra, connector=connector) as prefiller,
        launcher.engine("decode", extra=extra, connector=connector) as decoder,
    ):
        for number in range(3):
            prompt = text_of(90, 70 + number)
            turn = decode(decoder, prompt, prefill(prefiller, prompt))
            assert differences([complete(alone, prompt)], [turn.answer]) == []
        for server in (prefiller, decoder):
            assert server.get("/disagg/identity").status_code == 200
            assert metric(server, "disagg_engine_kv_notifications_unsealed_total") == 0
            assert metric(server, "disagg_engine_kv_notifications_unknown_total") == 0
        moved = "pulls_ok" if mode == "pull" else "pushes_received"
        assert metric(decoder, f"disagg_engine_kv_{moved}_total") == 3


@pytest.mark.parametrize("holder", ["prefill", "decode"])
@pytest.mark.parametrize("side_channel_mode", ["required", "mixed"])
def test_an_engine_without_the_secret_is_served_in_mixed_mode_alone(
    launcher: Launcher,
    alone: Server,
    secret: dict[str, Any],
    holder: str,
    side_channel_mode: str,
) -> None:
    """Ours without it is to the other what a stock engine is."""
    extra = {**secret, "side_channel_mode": side_channel_mode}
    with (
        launcher.engine("prefill", extra=extra if holder == "prefill" else {}) as prefiller,
        launcher.engine("decode", extra=extra if holder == "decode" else {}) as decoder,
    ):
        prompt = text_of(90, 80)
        params = prefill(prefiller, prompt)
        answer = decoder.post("/v1/completions", decode_body(prompt, params))
        if side_channel_mode == "mixed":
            tokens = tuple(answer.json()["choices"][0]["token_ids"])
            assert tokens == complete(alone, prompt).tokens
            assert metric(decoder, "disagg_engine_kv_pulls_ok_total") == 1
        else:
            assert answer.status_code == 500
            assert metric(decoder, "disagg_engine_kv_handshakes_failed_total") >= 1
