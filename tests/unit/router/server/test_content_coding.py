"""Compressed bodies become plain ones, within a limit."""

import gzip
import random
import zlib
from collections.abc import Callable

import pytest

from router.openai.errors import BadRequestError, BodyTooLargeError, UnsupportedEncodingError
from router.server.content_coding import MAX_MEMBERS, MAX_PIECE_BYTES, coding_of, decompress

MIB = 1024 * 1024
NOISE = random.Random(7).randbytes(3 * MIB)
BODIES = [b"", b"a", b'{"prompt": "x"}' * 1000, NOISE, b"a" * 3 * MIB]


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "raw": raw_deflate,
}
NAMES = {"gzip": b"gzip", "zlib": b"deflate", "raw": b"deflate"}


def unpacked(packed: bytes, name: bytes = b"gzip", limit: int = 4 * MIB) -> bytes:
    coding = coding_of([(b"content-encoding", name)])
    assert coding is not None
    return b"".join(decompress(packed, coding, limit))


@pytest.mark.parametrize("body", BODIES, ids=["empty", "short", "text", "noise", "repeated"])
@pytest.mark.parametrize("form", PACKERS)
def test_body_is_decompressed_in_pieces(form: str, body: bytes) -> None:
    packed = PACKERS[form](body)
    assert unpacked(packed, NAMES[form]) == body
    assert unpacked(packed, NAMES[form], limit=len(body)) == body
    coding = coding_of([(b"content-encoding", NAMES[form])])
    assert coding is not None
    assert all(len(piece) <= MAX_PIECE_BYTES for piece in decompress(packed, coding, 4 * MIB))


@pytest.mark.parametrize("form", PACKERS)
@pytest.mark.parametrize("size", [1, 1000, MIB])
def test_no_more_is_decompressed_than_the_limit_and_a_byte(form: str, size: int) -> None:
    packed = PACKERS[form](b"a" * 64 * MIB)
    coding = coding_of([(b"content-encoding", NAMES[form])])
    assert coding is not None
    read: list[int] = []
    pieces = decompress(packed, coding, size)
    with pytest.raises(BodyTooLargeError, match=f"larger than {size} bytes"):
        read.extend(len(piece) for piece in pieces)
    assert size - MAX_PIECE_BYTES <= sum(read) <= size


@pytest.mark.parametrize("form", PACKERS)
def test_broken_body_is_rejected(form: str) -> None:
    packed = PACKERS[form](b"a body of some length" * 50)
    broken = [packed[:-1], packed[: len(packed) // 2], b"", packed + b"more"]
    if form != "raw":  # which has no checksum
        broken += [packed[:-1] + bytes([packed[-1] ^ 1]), b"{" + packed]
    for one in broken:
        with pytest.raises(BadRequestError, match="the compressed body is broken"):
            unpacked(one, NAMES[form])


def test_gzip_body_may_have_several_members_but_not_any_number() -> None:
    members = [gzip.compress(b"%d," % number) for number in range(MAX_MEMBERS)]
    assert unpacked(b"".join(members)) == b"0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,"
    with pytest.raises(BadRequestError, match="more bytes follow its end"):
        unpacked(b"".join([*members, gzip.compress(b"")]))


def test_limit_holds_for_all_members_together() -> None:
    with pytest.raises(BodyTooLargeError):
        unpacked(gzip.compress(b"a" * 60) * 2, limit=100)


@pytest.mark.parametrize("values", [[], [b""], [b"identity"], [b" Identity "], [b"", b"identity"]])
def test_body_without_a_coding_is_not_compressed(values: list[bytes]) -> None:
    assert coding_of([(b"content-encoding", value) for value in values]) is None


@pytest.mark.parametrize(
    "values", [[b"br"], [b"zstd"], [b"gzip, gzip"], [b"gzip, identity"], [b"gzip", b"deflate"]]
)
def test_other_codings_and_several_ones_are_rejected(values: list[bytes]) -> None:
    with pytest.raises(UnsupportedEncodingError, match="one of gzip and deflate"):
        coding_of([(b"content-encoding", value) for value in values])


@pytest.mark.parametrize("value", [b"gzip", b"GZip", b" x-gzip"])
def test_gzip_has_several_names(value: bytes) -> None:
    assert coding_of([(b"content-encoding", value)]) == coding_of([(b"content-encoding", b"gzip")])
