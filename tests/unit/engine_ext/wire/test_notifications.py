from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.wire import handshake
from engine_ext.wire import notifications as wire
from engine_ext.wire.errors import WireError
from engine_ext.wire.listener import HandshakeServer
from engine_ext.wire.notifications import (
    Gone,
    Heartbeat,
    Hello,
    Read,
    ReadAck,
    ReadDone,
    Renew,
    Renewed,
    UnknownMessage,
)
from tests.unit.engine_ext.wire.metadata import METADATA
from tests.unit.engine_ext.wire.waiting import SECONDS

PAYLOAD = handshake.encode_payload(METADATA, {"model": "m"})


def told(metadata: handshake.AgentMetadata) -> dict[str, Any]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(metadata), type=dict[str, Any])


def test_a_handshake_request_is_stocks_msgpack_tuple() -> None:
    assert msgspec.msgpack.decode(handshake.encode_request((0, 3))) == [b"get_meta_msg", 0, 3]
    assert handshake.decode_request(handshake.encode_request((0, 3))).rank == (0, 3)


def test_payload_has_the_two_keys_that_stock_reads() -> None:
    outer = msgspec.msgpack.decode(PAYLOAD)
    assert set(outer) >= {"compatibility_hash", "agent_metadata_bytes"}
    inner = msgspec.msgpack.decode(outer["agent_metadata_bytes"])
    assert inner["engine_id"] == "p"
    assert inner["physical_blocks_per_logical_kv_block"] == 1


def test_metadata_of_a_newer_peer_with_more_keys_is_read() -> None:
    inner = {**told(METADATA), "new": [1]}
    payload = handshake.HandshakePayload(
        compatibility_hash="h", agent_metadata_bytes=msgspec.msgpack.encode(inner)
    )
    assert handshake.decode_metadata(payload) == METADATA


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": -1},
        {"kv_caches_base_addr": [-1]},
        {"block_lens": [1, 2]},
        {"engine_id": 1},
        {"region_group_ids": []},
        {"block_layers": [["a"], ["b"]]},
        {"tensor_rank": [1]},
    ],
)
def test_metadata_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    inner = {**told(METADATA), **change}
    payload = handshake.HandshakePayload(
        compatibility_hash="h", agent_metadata_bytes=msgspec.msgpack.encode(inner)
    )
    with pytest.raises(WireError):
        handshake.decode_metadata(payload)


@given(st.binary())
def test_any_bytes_decode_or_raise_wire_error(message: bytes) -> None:
    for decode in (handshake.decode_request, handshake.decode_payload):
        try:
            decode(message)
        except WireError:
            continue


@given(st.binary() | st.text().map(str.encode))
def test_any_notification_is_decoded_without_an_exception(message: bytes) -> None:
    wire.decode_notification(message)


def test_notifications_are_stocks_bytes() -> None:
    assert wire.encode_read_done("cmpl-1", 2) == b"cmpl-1:2"
    assert wire.decode_notification(b"a:b:2") == ReadDone("a:b", 2)
    assert wire.decode_notification(b"HB:a,b") == Heartbeat(("a", "b"))
    for strange in (
        b"",
        b":",
        b"x",
        b"x:",
        b":1",
        b"x:0",
        b"x:-1",
        b"x:1.0",
        b"x:9999999",
        b"\xff",
    ):
        assert isinstance(wire.decode_notification(strange), UnknownMessage)


@given(st.lists(st.text("abc-0", min_size=1, max_size=40), max_size=2000))
def test_heartbeats_carry_every_id_once_in_bounded_messages(ids: list[str]) -> None:
    carried: list[str] = []
    for batch in wire.batch_ids(ids):
        for message in (wire.encode_heartbeat(batch), wire.encode_extension(Renew(1, batch))):
            assert len(message) <= wire.MAX_NOTIFICATION_BYTES + 64
            decoded = wire.decode_notification(message)
            assert isinstance(decoded, Heartbeat | Renew)
            assert decoded.request_ids == batch
        carried += batch
    assert carried == ids


@pytest.mark.parametrize(
    "message",
    [
        Hello(b"x"),
        Renew(1, ("a", "b")),
        Renewed(1, 20.0, ("a",), {"b": 1.5}, 7.0),
        Read("a", 2, 7),
        ReadAck(7, True),
        Gone(("a",)),
        wire.AskLoan(7, "scheme", (b"a", b"b")),
        wire.Loan(7, "loan-1", ((4, 5),), 32, b"b", 5.0),
        wire.Loan(7),
        wire.Loan(7, may_hold_more=True),
    ],
)
def test_a_message_of_the_extension_survives_the_wire(message: wire.ExtensionMessage) -> None:
    assert wire.decode_notification(wire.encode_extension(message)) == message


@given(st.binary())
def test_garbage_behind_the_extensions_prefix_is_an_unknown_message(message: bytes) -> None:
    decoded = wire.decode_notification(wire.EXTENSION_PREFIX + message)
    assert decoded == UnknownMessage(wire.EXTENSION_PREFIX + message)


@pytest.fixture
def server() -> Iterator[HandshakeServer]:
    listener = HandshakeServer("127.0.0.1", 0, {(0, 0): PAYLOAD})
    yield listener
    listener.close()


def ask(context: "zmq.Context[Any]", port: int, message: bytes) -> list[bytes]:
    request: zmq.Socket[bytes] = context.socket(zmq.REQ)
    request.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
    request.setsockopt(zmq.LINGER, 0)
    request.connect(f"tcp://127.0.0.1:{port}")
    request.send(message)
    frames = request.recv_multipart()
    request.close()
    return frames


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"x" * 100, b"\x93\xa1a\x00", b"\x80"])
def test_the_listener_survives_garbage(
    server: HandshakeServer, context: "zmq.Context[Any]", garbage: bytes
) -> None:
    payload, _ = ask(context, server.port, garbage)
    with pytest.raises(WireError):
        handshake.decode_payload(payload)
    assert ask(context, server.port, handshake.encode_request((0, 0)))[0] == PAYLOAD


def test_a_taken_side_channel_is_an_os_error(server: HandshakeServer) -> None:
    with pytest.raises(OSError, match="side channel"):
        HandshakeServer("127.0.0.1", server.port, {})


def registered(**changed: Any) -> bytes:
    fields: dict[str, Any] = {
        "request_id": "d-1",
        "decode_engine_id": "d",
        "decode_host": "10.0.0.1",
        "decode_port": 5600,
        "decode_tp_size": 1,
        "local_block_ids": [[1, 2]],
        "remote_engine_id": "p",
        "remote_host": "10.0.0.2",
        "remote_port": 5600,
        "remote_tp_size": 1,
        **changed,
    }
    return wire.REGISTRATION_PREFIX + msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "changed",
    [
        {"decode_tp_size": 0},
        {"decode_tp_size": 1025},
        {"decode_tp_size": -1},
        {"request_id": "x" * 1025},
        {"transfer_id": "x" * 1025},
        {"decode_port": 0},
        {"local_block_ids": [list(range(70_000, 70_000 + 300_000))]},
        {
            "disagg": {
                "generation": 1,
                "first_token": 0,
                "last_token": 1,
                "digest": b"x" * 65,
                "remote_request_id": "p",
            }
        },
    ],
)
def test_a_registration_beyond_its_bounds_is_an_unknown_message(changed: dict[str, Any]) -> None:
    assert isinstance(wire.decode_notification(registered()), wire.PushRegistered)
    assert isinstance(wire.decode_notification(registered(**changed)), UnknownMessage)


@pytest.mark.parametrize("prefix", [b"DX:", b"PUSH_REG:", b"HB:", b""])
def test_a_message_beyond_a_megabyte_is_not_looked_into_nor_kept(prefix: bytes) -> None:
    decoded = wire.decode_notification(prefix + b"x:1" * (1 << 20))
    assert isinstance(decoded, UnknownMessage)
    assert len(decoded.message) <= 256
