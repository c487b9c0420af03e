"""What a hostile answer costs: it is refused by the lengths that it announces, or skipped unread.

Lengths are announced and what they announce is left out: an answer that is refused for its length,
and not for being cut short, was refused before anything of it was made.
"""

from typing import Any

import msgspec
import pytest

from engine_ext.common.access import Access, SharedSecret
from engine_ext.wire.errors import WireError
from engine_ext.wire.handshake import (
    MAX_FACTORS,
    MAX_LAYERS,
    MAX_REFUSAL_BYTES,
    MAX_REGIONS,
    NOT_FOR_STOCK,
    AgentMetadata,
    HandshakePayload,
    HandshakeRefusedError,
    as_stock,
    decode_challenge,
    decode_metadata,
    decode_payload,
    encode_payload,
    encode_refusal,
)
from engine_ext.wire.secret_handshake import Prover, SideChannelAddress
from tests.unit.engine_ext.wire.metadata import METADATA

RANK = (0, 0)
PLACE = SideChannelAddress("10.0.0.7", 5600)
SECRET = Access(SharedSecret.of(b"a secret of the whole fleet"))
CHALLENGE = b"c" * 40


def listed(number: int) -> bytes:
    return b"\xdd" + number.to_bytes(4, "big")


def mapped(number: int) -> bytes:
    return b"\xdf" + number.to_bytes(4, "big")


def with_field(record: msgspec.Struct, name: str, value: bytes) -> bytes:
    """`value` is msgpack, and may lie about its length."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=dict[str, Any])
    fields.pop(name, None)
    rest = b"".join(msgspec.msgpack.encode(part) for pair in fields.items() for part in pair)
    return mapped(len(fields) + 1) + rest + msgspec.msgpack.encode(name) + value


def metadata_with(name: str, value: bytes) -> AgentMetadata:
    told = HandshakePayload(
        compatibility_hash="h", agent_metadata_bytes=with_field(METADATA, name, value)
    )
    return decode_metadata(told)


@pytest.mark.parametrize(
    "name",
    [
        "kv_caches_base_addr",
        "block_lens",
        "block_strides",
        "region_num_blocks",
        "region_group_ids",
        "region_names",
        "region_mem_types",
        "block_layers",
    ],
)
def test_a_list_is_refused_by_its_length(name: str) -> None:
    with pytest.raises(WireError, match=f"length <= {MAX_REGIONS} .*{name}"):
        metadata_with(name, listed(MAX_REGIONS + 1))
    with pytest.raises(WireError, match="truncated"):
        metadata_with(name, listed(MAX_REGIONS))


def test_a_list_of_layers_is_refused_by_its_length_and_where_it_is_empty() -> None:
    with pytest.raises(WireError, match=f"length <= {MAX_LAYERS} "):
        metadata_with("block_layers", listed(1) + listed(MAX_LAYERS + 1))
    with pytest.raises(WireError, match="length >= 1 "):
        metadata_with("block_layers", listed(1) + listed(0))


@pytest.mark.parametrize("name", ["engine_id", "kv_cache_layout", "attn_backend_name"])
def test_a_name_is_refused_by_its_length(name: str) -> None:
    with pytest.raises(WireError, match=f"length <= 1024 .*{name}"):
        metadata_with(name, msgspec.msgpack.encode("x" * 1025))


@pytest.mark.parametrize("name", ["region_members", "packed_member_layouts", "unheard_of"])
@pytest.mark.parametrize("value", [listed(100_000) + b"\x80" * 100_000, b"\x07"])
def test_what_nobody_reads_is_not_decoded(name: str, value: bytes) -> None:
    metadata = metadata_with(name, value)
    assert isinstance(metadata.region_members, msgspec.Raw)
    assert isinstance(metadata.packed_member_layouts, msgspec.Raw)


def test_what_only_stock_reads_is_passed_on_as_it_was_told() -> None:
    members = msgspec.msgpack.encode([["a", "b"]])
    told = msgspec.structs.replace(METADATA, region_members=msgspec.Raw(members))
    plain = as_stock(decode_payload(encode_payload(told, {})))
    inner = msgspec.msgpack.decode(plain.agent_metadata_bytes)
    assert inner["region_members"] == [["a", "b"]]
    assert inner["packed_member_layouts"] == {}


def test_nesting_without_end_is_an_error() -> None:
    with pytest.raises(WireError):
        metadata_with("region_members", b"\x91" * 100_000)
    with pytest.raises(WireError):
        decode_payload(b"\x81\xa1x" + b"\x91" * 100_000)


def test_factors_are_refused_by_their_number() -> None:
    factors = {str(number): "" for number in range(MAX_FACTORS)}
    assert decode_payload(encode_payload(METADATA, factors)).compat_factors == factors
    with pytest.raises(WireError, match=f"length <= {MAX_FACTORS} "):
        decode_payload(encode_payload(METADATA, {**factors, "one more": ""}))


def test_a_challenge_is_refused_by_its_length() -> None:
    with pytest.raises(WireError, match="length <= 256"):
        decode_challenge(encode_refusal("prove it", b"x" * 257))


def test_a_refusal_is_read_to_its_five_hundredth_letter() -> None:
    with pytest.raises(HandshakeRefusedError) as refusal:
        decode_payload(encode_refusal("x" * 10_000, CHALLENGE))
    assert str(refusal.value).count("x") == 500
    assert refusal.value.challenge == CHALLENGE


def test_of_a_stranger_who_has_proven_nothing_the_challenge_alone_is_read() -> None:
    """Any other field may be of a kind that it is not."""
    prover = Prover(SECRET, RANK, PLACE)
    answer = mapped(3) + b"\xa4" + b"hash" + b"\x07" + b"\xa9challenge" + b"\xc4\x28" + CHALLENGE
    answer += b"\xaecompat_factors" + listed(50_000) + b"\x80" * 50_000
    assert isinstance(prover.take([answer, b"clock"]), bytes)


@pytest.mark.parametrize("mac", [[], [b""], [b"m" * 32]])
def test_what_was_not_proven_is_not_decoded(mac: list[bytes]) -> None:
    """Not even so far as to say that it is none."""
    prover = Prover(SECRET, RANK, PLACE)
    prover.take([encode_refusal("prove it", CHALLENGE), b"clock"])
    with pytest.raises(WireError, match="does not hold the shared secret"):
        prover.take([b"\xc1" * (MAX_REFUSAL_BYTES + 1), b"clock", *mac])


def test_a_short_answer_that_was_not_proven_may_say_why() -> None:
    prover = Prover(SECRET, RANK, PLACE)
    prover.take([encode_refusal("prove it", CHALLENGE), b"clock"])
    with pytest.raises(HandshakeRefusedError, match="too old"):
        prover.take([encode_refusal("the challenge is too old"), b"clock"])


def test_a_stock_engine_finds_no_hash_of_its_own_where_it_is_not_meant() -> None:
    factors = {"model": "m"}
    meant = decode_payload(encode_payload(METADATA, factors, "vLLM's"))
    assert meant.compatibility_hash == meant.effective_hash == "vLLM's"
    other = decode_payload(encode_payload(METADATA, factors, "vLLM's", is_for_stock=False))
    assert other.compatibility_hash == NOT_FOR_STOCK
    assert other.effective_hash == "vLLM's"
    assert as_stock(other).compatibility_hash == NOT_FOR_STOCK
