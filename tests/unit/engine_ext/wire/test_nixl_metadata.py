"""NIXL's metadata is taken apart, put together again, and refused where NIXL did not write it."""

from dataclasses import replace

import pytest

from engine_ext.wire.errors import WireError
from engine_ext.wire.nixl_metadata import (
    ADDRESS_PADDING,
    KEY_PADDING,
    VRAM,
    Descriptor,
    NixlMetadata,
    Section,
    agent_name,
    parse,
)

KEY = bytes(8) + b"\0\0\xff"
AGENT = NixlMetadata(
    "agent",
    ((b"UCX", b"an address"), (b"GDS", b"another")),
    (
        Section(b"UCX", 0, (Descriptor(1 << 47, 4096, 0, KEY), Descriptor(1, 1, 2, KEY))),
        Section(b"GDS", 4, (Descriptor(0, 1, 0, b""),)),
    ),
)


def with_piece(**changes: object) -> NixlMetadata:
    section = AGENT.sections[0]
    piece = replace(section.descriptors[0], **changes)  # type: ignore[arg-type]
    return replace(AGENT, sections=(replace(section, descriptors=(piece,)),))


def of_type(memory_type: int, key: bytes) -> NixlMetadata:
    section = Section(b"UCX", memory_type, (Descriptor(0, 1, 0, key),))
    return replace(AGENT, sections=(section,))


def test_metadata_that_is_parsed_and_encoded_is_the_same() -> None:
    assert parse(AGENT.encode()) == AGENT
    assert agent_name(AGENT.encode()) == "agent"


def test_metadata_cut_short_anywhere_or_too_long_is_refused() -> None:
    encoded = AGENT.encode()
    for length in range(len(encoded)):
        with pytest.raises(WireError):
            parse(encoded[:length])
    with pytest.raises(WireError, match="after its end"):
        parse(encoded + b"|")


def test_a_flipped_byte_is_refused_or_changes_a_value_and_nothing_around_it() -> None:
    encoded = AGENT.encode()
    for place in range(len(encoded)):
        for bits in (0xFF, 0x80, 0x01):
            altered = encoded[:place] + bytes([encoded[place] ^ bits]) + encoded[place + 1 :]
            try:
                parsed = parse(altered)
            except WireError:
                continue
            assert parsed.encode() == altered
            assert [len(one.descriptors) for one in parsed.sections] == [2, 1]


@pytest.mark.parametrize(
    "metadata",
    [
        of_type(5, KEY),
        of_type(0, KEY[:8]),
        of_type(0, bytes(8) + b"\x01"),
        of_type(VRAM, bytes(8) + b"\x00"),
        of_type(VRAM, bytes(8) + b"\x29"),
        of_type(2, KEY),
        with_piece(address=(1 << 64) - 1, length=2),
        replace(AGENT, name="a" * 2000),
        replace(AGENT, connections=((b"UCX", b"a"),) * 17),
        replace(AGENT, sections=AGENT.sections * 33),
        replace(
            AGENT,
            sections=(Section(b"UCX", 0, tuple(Descriptor(0, 1, 0, KEY) for _ in range(4097))),),
        ),
    ],
)
def test_what_nixl_or_ucx_would_use_unseen_or_is_too_much_is_refused(
    metadata: NixlMetadata,
) -> None:
    with pytest.raises(WireError):
        parse(metadata.encode())


@pytest.mark.parametrize("metadata", [AGENT, of_type(VRAM, bytes(8) + b"\x01\xff")])
def test_only_what_ucx_reads_without_a_length_is_padded(metadata: NixlMetadata) -> None:
    padded = metadata.padded()
    assert parse(padded.encode()) == padded
    assert padded.connections[0] == (b"UCX", b"an address" + ADDRESS_PADDING)
    assert padded.connections[1] == AGENT.connections[1]
    assert padded.sections[0].descriptors[0].key.endswith(b"\xff" + KEY_PADDING)
    assert padded.sections[1:] == AGENT.sections[1:] or len(padded.sections) == 1
    assert agent_name(padded.encode()) == "agent"


@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
def test_a_length_that_overflows_is_refused(number: int) -> None:
    encoded = AGENT.encode()
    place = encoded.index(b"Agent") + 5
    with pytest.raises(WireError):
        parse(encoded[:place] + number.to_bytes(8, "little") + encoded[place + 8 :])


@pytest.mark.parametrize("metadata", [b"", b"nixlSerDes", b"nixlSerDes|", b"agent-p", b"\xff" * 99])
def test_what_is_no_metadata_has_no_name(metadata: bytes) -> None:
    assert agent_name(metadata) is None
    with pytest.raises(WireError):
        parse(metadata)
