"""One who was never met, and says all that can be said; and peers who say of others' requests what
only those may say.

Messages are made from what was heard: real requests, real sequences. Their fields are filled by
type, so that a message that is new to the wire is forged from its first day.
"""

import types
import typing
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Annotated, Any, NamedTuple

import msgspec

from engine_ext.wire.notifications import (
    ExtensionMessage,
    PushRegistered,
    decode_notification,
    encode_extension,
    encode_heartbeat,
    encode_read_done,
    encode_registration,
)
from tests.unit.engine_ext.simulation.memory import NUM_BLOCKS
from tests.unit.engine_ext.simulation.network import Network

KINDS: tuple[type[msgspec.Struct], ...] = typing.get_args(ExtensionMessage)
SECONDS = (0.0, 1.0, 25.0, 1e9)


class Facts(NamedTuple):
    """What messages told."""

    texts: list[str]
    numbers: list[int]
    blobs: list[bytes]
    registrations: list[PushRegistered]
    messages: list[bytes]


def _nothing() -> Facts:
    return Facts([], [], [], [], [])


def _add(known: Facts, more: Facts) -> None:
    known.texts.extend(more.texts)
    known.numbers.extend(more.numbers)
    known.blobs.extend(more.blobs)
    known.registrations.extend(more.registrations)
    known.messages.extend(more.messages)


@lru_cache(maxsize=4096)
def _facts_of(message: bytes) -> Facts:
    facts = _nothing()
    facts.messages.append(message)
    decoded = decode_notification(message)
    if isinstance(decoded, PushRegistered):
        facts.registrations.append(decoded)
    _learn(msgspec.to_builtins(decoded, builtin_types=(bytes,)), facts)
    return facts


def _learn(value: object, facts: Facts) -> None:
    match value:
        case bool():
            pass
        case int():
            facts.numbers.append(value)
        case str():
            facts.texts.append(value)
        case bytes():
            facts.blobs.append(value)
        case dict():
            for inner in value.values():
                _learn(inner, facts)
        case list() | tuple():
            for inner in value:
                _learn(inner, facts)


_fields = lru_cache(msgspec.structs.fields)


class Forger:
    def __init__(self, network: Network, seed: int = 0, name: str = "mallory") -> None:
        self.agent = network.agent(name)
        self._network = network
        self._random = Random(seed)

    def say(self, target: str, speaker: str | None = None) -> bytes:
        """Something to that agent, about what others and it have with each other. `speaker`: one
        who is known to it."""
        speaker = speaker or self.agent.name
        message = self.make(target, speaker)
        self._network.note(speaker, f"FORGES for {target}:", message)
        self._network.deliver(speaker, target, message)
        return message

    def make(self, target: str, speaker: str) -> bytes:
        known = self.overhear(target, speaker)
        makers: list[Callable[[Facts], bytes]] = [
            *(lambda known, kind=kind: self.forge(kind, known) for kind in KINDS),
            self.registration,
            lambda known: encode_read_done(self._text(known), self._random.choice([1, 1, 2])),
            lambda known: encode_heartbeat([self._text(known)]),
            lambda known: self._random.randbytes(self._random.randrange(12)),
            lambda known: self._random.choice(known.messages or [b""]),
        ]
        return self._random.choice(makers)(known)

    def overhear(self, target: str, speaker: str) -> Facts:
        """All that `target` has lately said and heard, but with `speaker`."""
        known = _nothing()
        for sender, heard_by, message in self._network.heard:
            if target in (sender, heard_by) and speaker not in (sender, heard_by):
                _add(known, _facts_of(message))
        return known

    def forge(self, kind: type[msgspec.Struct], known: Facts) -> bytes:
        fields = _fields(kind)
        made = kind(**{field.name: self._value(field.type, known) for field in fields})
        return encode_extension(typing.cast("ExtensionMessage", made))

    def registration(self, known: Facts) -> bytes:
        """A real request, with other blocks."""
        if not known.registrations:
            return b"PUSH_REG:"
        real = self._random.choice(known.registrations)
        blocks = self._random.sample(range(NUM_BLOCKS), len(real.local_block_ids[0]))
        disagg = self._random.choice([None, real.disagg])
        return encode_registration(
            msgspec.structs.replace(real, local_block_ids=(tuple(blocks),), disagg=disagg)
        )

    def _text(self, known: Facts) -> str:
        return self._random.choice(known.texts or ["nobody"])

    def _value(self, kind: Any, known: Facts) -> Any:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is Annotated:
            return self._value(args[0], known)
        if origin in (typing.Union, types.UnionType):
            chosen = self._random.choice(args)
            return None if chosen is type(None) else self._value(chosen, known)
        if origin is tuple:
            return tuple(self._value(args[0], known) for _ in range(self._random.randrange(3)))
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            fields = _fields(kind)
            return kind(**{field.name: self._value(field.type, known) for field in fields})
        return self._plain(kind, known)

    def _plain(self, kind: Any, known: Facts) -> Any:
        if kind is str:
            return self._text(known)
        if kind is bool:
            return self._random.random() < 0.5
        if kind is int:
            return self._random.choice(known.numbers or [1])
        if kind is float:
            return self._random.choice(SECONDS)
        return self._random.choice([*known.blobs, self.agent.metadata(), b"no metadata"])
