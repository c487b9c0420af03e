"""NIXL's serialised agent metadata, as NIXL 1.x writes it: parsed strictly, and made safe to load.

    nixlSerDes|
    Agent(name) Conns(count)  then for each connection:  t(backend) c(address)
    (MemSection) nixlSecElms(count)  then for each section:
        bknd(backend) nixlDList(nixlSDList) t(memory type) n(count)  (descriptor) ...

Each field is its tag, a length of eight bytes, the value and `|`. A field in bare parentheses has
no tag. A descriptor is address, length and device, eight bytes each, and the backend's key.

NIXL uses the memory type as an index without checking it, and so does UCX with the memory type in
its keys. UCX parses addresses and keys without knowing their length. Past the end of a malformed
one it reads whatever follows in memory, so that one process loads what crashes another one. `parse`
refuses what NIXL would not have written, and `padded` appends the bytes that UCX may read past the
end, so that UCX finds the same bytes in every process. A well-formed address or key marks its own
end, so the appended bytes are not read.
"""

import struct
from dataclasses import dataclass, replace

from engine_ext.wire.errors import WireError

_HEAD = b"nixlSerDes|"
_NUMBER = struct.Struct("<Q")
_MEMORY_TYPE = struct.Struct("<I")
_PLACE = struct.Struct("<QQQ")

NUM_MEMORY_TYPES = 5
"""nixl_mem_t: DRAM, VRAM, block, object and file."""
DRAM, VRAM = 0, 1
_UCX_MEMORY_TYPES = {DRAM: (0,), VRAM: (1, 2, 3, 4)}
"""ucs_memory_type_t, by NIXL's: host; CUDA and ROCm, managed or not."""
_UCX_MEMORY_TYPE_AT = 8
"""In a key of UCX, behind the map of its memory domains."""

MAX_NAME_BYTES = 1024
MAX_CONNECTIONS = 16
MAX_SECTIONS = 64
MAX_DESCRIPTORS = 4096
"""In one section: one for each region that a handshake may list."""
ADDRESS_PADDING = b"\xff" * 2048
"""UCX takes these bytes for the last entry of any list."""
KEY_PADDING = bytes(512)
"""One byte of the key may announce 255 more bytes; the rest is empty."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    address: int
    length: int
    device: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Section:
    """Memory of one type, registered with one backend."""

    backend: bytes
    memory_type: int
    descriptors: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class NixlMetadata:
    """One agent: how to connect to it, for each backend, and the memory that it shows."""

    name: str
    connections: tuple[tuple[bytes, bytes], ...]
    """Backend and address."""
    sections: tuple[Section, ...]

    def padded(self) -> "NixlMetadata":
        """Return it with everything appended that UCX may read past an end."""
        return replace(
            self,
            connections=tuple(
                (backend, address + ADDRESS_PADDING if backend == b"UCX" else address)
                for backend, address in self.connections
            ),
            sections=tuple(
                replace(
                    section,
                    descriptors=tuple(
                        replace(one, key=one.key + KEY_PADDING) for one in section.descriptors
                    ),
                )
                if section.backend == b"UCX"
                else section
                for section in self.sections
            ),
        )

    def encode(self) -> bytes:
        parts = [_HEAD, _field(b"Agent", self.name.encode())]
        parts.append(_field(b"Conns", _NUMBER.pack(len(self.connections))))
        for backend, address in self.connections:
            parts += [_field(b"t", backend), _field(b"c", address)]
        parts.append(_field(b"", b"MemSection"))
        parts.append(_field(b"nixlSecElms", _NUMBER.pack(len(self.sections))))
        for section in self.sections:
            parts += [_field(b"bknd", section.backend), _field(b"nixlDList", b"nixlSDList")]
            parts.append(_field(b"t", _MEMORY_TYPE.pack(section.memory_type)))
            parts.append(_field(b"n", _NUMBER.pack(len(section.descriptors))))
            for one in section.descriptors:
                place = _PLACE.pack(one.address, one.length, one.device)
                parts.append(_field(b"", place + one.key))
        return b"".join(parts)


def parse(metadata: bytes) -> NixlMetadata:
    """Raises WireError for all that NIXL does not write."""
    reader = _Reader(metadata)
    name = _name(reader.field(b"Agent"))
    connections = tuple(
        (reader.field(b"t"), reader.field(b"c"))
        for _ in range(reader.number(b"Conns", MAX_CONNECTIONS))
    )
    if reader.field(b"") != b"MemSection":
        raise WireError("NIXL metadata: no memory section")
    sections = tuple(_section(reader) for _ in range(reader.number(b"nixlSecElms", MAX_SECTIONS)))
    if not reader.is_at_end:
        raise WireError("NIXL metadata: bytes after its end")
    return NixlMetadata(name, connections, sections)


def agent_name(metadata: bytes) -> str | None:
    """Return the name that the metadata is of; None where NIXL would not find one, either."""
    try:
        return _name(_Reader(metadata).field(b"Agent"))
    except WireError:
        return None


class _Reader:
    """Takes one field after the other. Raises WireError."""

    def __init__(self, metadata: bytes) -> None:
        if not metadata.startswith(_HEAD):
            raise WireError("this is no NIXL metadata")
        self._metadata = metadata
        self._at = len(_HEAD)

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._metadata)

    def field(self, tag: bytes) -> bytes:
        start = self._at + len(tag) + _NUMBER.size
        if not self._metadata.startswith(tag, self._at) or start > len(self._metadata):
            raise WireError(f"NIXL metadata: no {tag.decode()!r} at byte {self._at}")
        (length,) = _NUMBER.unpack_from(self._metadata, start - _NUMBER.size)
        end = start + length
        if not length or self._metadata[end : end + 1] != b"|":
            raise WireError(f"NIXL metadata: {length} bytes of {tag.decode()!r} at {self._at}")
        self._at = end + 1
        return self._metadata[start:end]

    def number(self, tag: bytes, most: int) -> int:
        number = int.from_bytes(self.field(tag), "little")
        if number > most:
            raise WireError(f"NIXL metadata: {tag.decode()!r} is {number}, more than {most}")
        return number


def _name(field: bytes) -> str:
    if len(field) > MAX_NAME_BYTES:
        raise WireError(f"NIXL metadata: an agent's name of {len(field)} bytes")
    try:
        return field.decode()
    except UnicodeDecodeError:
        raise WireError("NIXL metadata: the agent's name is not text") from None


def _section(reader: _Reader) -> Section:
    backend = reader.field(b"bknd")
    if reader.field(b"nixlDList") != b"nixlSDList":
        raise WireError("NIXL metadata: descriptors of an unknown kind")
    memory_type = int.from_bytes(reader.field(b"t"), "little")
    if memory_type >= NUM_MEMORY_TYPES:
        raise WireError(f"NIXL metadata: memory of type {memory_type}")
    descriptors = tuple(
        _descriptor(reader.field(b""), backend, memory_type)
        for _ in range(reader.number(b"n", MAX_DESCRIPTORS))
    )
    return Section(backend, memory_type, descriptors)


def _descriptor(field: bytes, backend: bytes, memory_type: int) -> Descriptor:
    if len(field) < _PLACE.size:
        raise WireError(f"NIXL metadata: a descriptor of {len(field)} bytes")
    address, length, device = _PLACE.unpack_from(field)
    if address + length > 1 << 64:
        raise WireError("NIXL metadata: memory beyond the end of all addresses")
    key = field[_PLACE.size :]
    if backend == b"UCX" and (
        len(key) <= _UCX_MEMORY_TYPE_AT
        or key[_UCX_MEMORY_TYPE_AT] not in _UCX_MEMORY_TYPES.get(memory_type, ())
    ):
        raise WireError(f"NIXL metadata: UCX has no such key of memory of type {memory_type}")
    return Descriptor(address, length, device, key)


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + _NUMBER.pack(len(value)) + value + b"|"
