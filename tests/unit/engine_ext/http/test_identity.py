"""What an engine says of itself, asked of real listeners."""

import socket
from dataclasses import replace
from typing import Any

import pytest

from engine_ext.common.access import OPEN, Access, SharedSecret
from engine_ext.common.config import ConnectorConfig
from engine_ext.http.identity import (
    EngineDescription,
    IdentityError,
    SideChannel,
    capabilities_of,
    identity,
)
from engine_ext.http.release import Release, parse
from engine_ext.wire.handshake import AgentMetadata, compatibility_hash, encode_payload
from engine_ext.wire.listener import HandshakeServer

FACTORS = {"dtype": "float32"}


def listener(engine_id: str, access: Access = OPEN) -> HandshakeServer:
    metadata = AgentMetadata(
        engine_id=engine_id,
        agent_metadata=b"",
        kv_caches_base_addr=[0],
        device_id=0,
        num_blocks=9,
        block_lens=[8],
        block_strides=[8],
        kv_cache_layout="LBHNC",
        block_size=32,
        attn_backend_name="CPU_ATTN",
    )
    return HandshakeServer(
        "127.0.0.1", 0, {(0, 0): encode_payload(metadata, FACTORS)}, access=access
    )


def test_every_rank_is_told_as_other_engines_are_told_it() -> None:
    listeners = [listener("e_dp0"), listener("e_dp1")]
    try:
        at = [SideChannel(rank, "127.0.0.1", one.port) for rank, one in enumerate(listeners)]
        said = identity(
            EngineDescription(
                name="x",
                side_channels=at,
                dp_size=2,
                versions={"x": "1"},
                max_step_tokens=256,
                max_num_seqs=64,
                target_itl_ms=50.0,
            )
        )
    finally:
        for one in listeners:
            one.close()
    assert said["versions"]["x"] == "1"
    assert [rank["remote_engine_id"] for rank in said["ranks"]] == ["e_dp0", "e_dp1"]
    assert [rank["remote_port"] for rank in said["ranks"]] == [one.port for one in listeners]
    for rank in said["ranks"]:
        assert rank["compatibility_hash"] == compatibility_hash(FACTORS)
        assert rank["compatibility_factors"] == FACTORS
        assert (rank["block_size"], rank["num_blocks"]) == (32, 9)
        assert (rank["max_step_tokens"], rank["target_itl_ms"]) == (256, 50.0)
        assert rank["max_num_seqs"] == 64


@pytest.mark.parametrize(
    ("access", "shown"),
    [
        (OPEN, "none"),
        (Access(SharedSecret.of(b"0123456789abcdef")), "required"),
        (Access(SharedSecret.of(b"0123456789abcdef"), is_mixed=True), "mixed"),
    ],
)
def test_page_shows_whether_a_secret_is_set_and_how_long_leases_last(
    access: Access, shown: str
) -> None:
    description = EngineDescription(name="x", versions={}, access=access, lease_seconds=30.0)
    assert "side_channel_secret" not in identity(description), "it has no side channel"
    one = listener("e", access)
    try:
        at = SideChannel(0, "127.0.0.1", one.port)
        page = identity(replace(description, side_channels=[at]))
    finally:
        one.close()
    assert (page["side_channel_secret"], page["lease_seconds"]) == (shown, 30.0)


def test_a_rank_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        at = [SideChannel(0, "127.0.0.1", port)]
        with pytest.raises(IdentityError, match=f"127.0.0.1:{port}"):
            identity(EngineDescription(name="x", side_channels=at, versions={}))


def test_turns_are_a_capability_where_they_are_switched_on() -> None:
    assert capabilities_of(None) == ()
    assert "turns" not in capabilities_of(ConnectorConfig(engine_id="e"))
    assert "turns" in capabilities_of(ConnectorConfig(engine_id="e", bidirectional=True))


def test_what_an_engine_renders_with_is_told_where_it_is_known() -> None:
    renders = {"model": "a", "tokenizer": "b", "chat_template": "c"}
    assert identity(EngineDescription(name="x", versions={}, renders=renders))["renders"] == renders
    assert "renders" not in identity(EngineDescription(name="x", versions={}))


def test_a_release_is_read_from_a_prefill_engines_own_answer() -> None:
    params = {"remote_engine_id": "e", "remote_request_id": "r", "remote_block_ids": [[1]]}
    assert parse({"kv_transfer_params": params}) == Release("e", "r")
    names = (7, "\ud800", "x" * 513)
    wrong: list[Any] = [{"kv_transfer_params": {**params, "remote_request_id": n}} for n in names]
    wrong += [[], {}]
    for body in wrong:
        with pytest.raises(ValueError, match="kv_transfer_params"):
            parse(body)
