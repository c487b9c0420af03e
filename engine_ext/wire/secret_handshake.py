"""A handshake between engines that share a secret. Both prove that they hold it; neither says it.

    dialer                                    listener
    (b"get_meta_msg", pp, tp)        ----->   as stock's, so that a stock listener lives
                                     <-----   {"error", "challenge"}; in mixed mode stock's answer,
                                              with a challenge in it
    (b"disagg_meta_msg", pp, tp,
     challenge, nonce, mac)          ----->   mac: over all of it and the dialled address
                                     <-----   payload, clock, mac over nonce and payload

The listener remembers nothing: a challenge is its clock under a key made when it started, good for
ten seconds and one connection. The dialled address is in the proof so that nobody who is dialled in
an engine's stead can pass question and answer on.
"""

import hashlib
import hmac
import math
import secrets
import struct
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from engine_ext.common.access import Access, SharedSecret
from engine_ext.wire.errors import Rank, WireError
from engine_ext.wire.handshake import (
    MAX_REFUSAL_BYTES,
    HandshakePayload,
    Proof,
    as_stock,
    decode_challenge,
    decode_payload,
    decode_request,
    encode_refusal,
    encode_request,
)

CHALLENGE_SECONDS = 10.0
NONCE_BYTES = 16
_CLOCK = struct.Struct("!d")


class SideChannelAddress(NamedTuple):
    """A side channel's address, as the engine itself announces it."""

    host: str
    port: int


class Asker(NamedTuple):
    """A connection to the listener."""

    identity: bytes
    """Of this connection alone, and not to be guessed."""
    address: str
    """Numeric, as the socket knows it."""


class HandshakeAnswer(NamedTuple):
    payload: bytes
    mac: bytes | None = None
    """For those who asked for a proof, too."""
    problem: str | None = None
    """Why it is a refusal; a challenge is none."""


class Challenges:
    """Made and recognised without remembering any. `now` is in seconds, monotonic."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def make(self, asker: Asker, now: float) -> bytes:
        clock = _CLOCK.pack(now)
        return clock + self._mac(clock, asker)

    def accept(self, challenge: bytes, asker: Asker, now: float) -> bool:
        clock, mac = challenge[: _CLOCK.size], challenge[_CLOCK.size :]
        if not hmac.compare_digest(mac, self._mac(clock, asker)):
            return False
        (made_at,) = _CLOCK.unpack(clock)
        return math.isfinite(made_at) and 0 <= now - made_at <= CHALLENGE_SECONDS

    def _mac(self, clock: bytes, asker: Asker) -> bytes:
        return _mac(self._key, "challenge", clock, asker.identity, asker.address)


class HandshakeAnswers:
    """What is said to whom, for each rank of an engine. Decides; the listener sends."""

    def __init__(
        self,
        payloads: Mapping[Rank, bytes],
        access: Access,
        place: SideChannelAddress,
        own_address: str,
    ) -> None:
        """`own_address`: always let in; an engine's pages ask its own side channel."""
        self._payloads = dict(payloads)
        self._access = access
        self._place = place
        self._own_address = own_address
        self._challenges = Challenges()
        self._plain = self._of_stock() if access.is_mixed else {}

    def admit(self, address: str) -> bool:
        return self._access.peers.admit(address) or address == self._own_address

    def to(self, request: bytes, asker: Asker, now: float) -> HandshakeAnswer:
        """Total: a refusal for what makes no sense."""
        if not self.admit(asker.address):
            return _refuse(f"{asker.address} is not one of this engine's allowed_peers")
        try:
            rank, proof = decode_request(request)
        except WireError as error:
            return _refuse(str(error))
        secret = self._access.secret
        if proof is None:
            return self._unproven(rank, asker, now)
        if secret is None:
            return _refuse("this engine has no side_channel_secret_file")
        return self._proven(secret, rank, proof, asker, now)

    def _unproven(self, rank: Rank, asker: Asker, now: float) -> HandshakeAnswer:
        if self._access.secret is None:
            return self._known(self._payloads, rank)
        challenge = self._challenges.make(asker, now)
        if not self._access.is_mixed:
            return HandshakeAnswer(
                encode_refusal("this engine asks for the shared secret", challenge)
            )
        plain = self._plain.get(rank)
        if plain is None:
            return self._known({}, rank)
        return HandshakeAnswer(
            msgspec.msgpack.encode(msgspec.structs.replace(plain, challenge=challenge))
        )

    def _proven(
        self, secret: SharedSecret, rank: Rank, proof: Proof, asker: Asker, now: float
    ) -> HandshakeAnswer:
        if not self._challenges.accept(proof.challenge, asker, now):
            return _refuse("the challenge is not ours, or too old")
        if not hmac.compare_digest(proof.mac, _proof_mac(secret, rank, proof, self._place)):
            host, port = self._place
            return _refuse(f"not a proof of this engine's secret, or not made for {host}:{port}")
        answer = self._known(self._payloads, rank)
        return answer._replace(mac=_answer_mac(secret, proof, answer.payload))

    @staticmethod
    def _known(payloads: Mapping[Rank, bytes], rank: Rank) -> HandshakeAnswer:
        payload = payloads.get(rank)
        return (
            HandshakeAnswer(payload)
            if payload
            else _refuse(f"no worker of pipeline, tensor rank {rank}")
        )

    def _of_stock(self) -> dict[Rank, HandshakePayload]:
        return {rank: as_stock(decode_payload(one)) for rank, one in self._payloads.items()}


class Prover:
    """A dialer's side of one handshake."""

    def __init__(self, access: Access, rank: Rank, dialled: SideChannelAddress) -> None:
        self._access = access
        self._rank = rank
        self._dialled = dialled
        self._proof: Proof | None = None

    def take(self, frames: list[bytes]) -> HandshakePayload | bytes:
        """The next question, or what the handshake has come to. `frames`: payload, clock, and a mac
        where the listener has proven itself. Raises WireError."""
        secret = self._access.secret
        if secret is None:
            return decode_payload(frames[0])
        if self._proof is not None:
            return self._verified(secret, self._proof, frames)
        challenge = decode_challenge(frames[0])
        if challenge is not None:
            self._proof = self._prove(secret, challenge)
            return encode_request(self._rank, self._proof)
        if not self._access.is_mixed:
            raise _not_a_holder()
        return as_stock(decode_payload(frames[0]))

    def _prove(self, secret: SharedSecret, challenge: bytes) -> Proof:
        unsigned = Proof(challenge, secrets.token_bytes(NONCE_BYTES), b"")
        return unsigned._replace(mac=_proof_mac(secret, self._rank, unsigned, self._dialled))

    @staticmethod
    def _verified(secret: SharedSecret, proof: Proof, frames: list[bytes]) -> HandshakePayload:
        """What is not proven is not looked at, unless it is short: it may say why."""
        mac = frames[2] if len(frames) > 2 else b""
        if not hmac.compare_digest(mac, _answer_mac(secret, proof, frames[0])):
            if len(frames[0]) <= MAX_REFUSAL_BYTES:
                decode_challenge(frames[0])
            raise _not_a_holder()
        return decode_payload(frames[0])


def _not_a_holder() -> WireError:
    return WireError("handshake: the peer does not hold the shared secret")


def _refuse(reason: str) -> HandshakeAnswer:
    return HandshakeAnswer(encode_refusal(reason), problem=reason)


def _proof_mac(secret: SharedSecret, rank: Rank, proof: Proof, place: SideChannelAddress) -> bytes:
    return _mac(secret.handshake_key, "dialer", *rank, proof.challenge, proof.nonce, *place)


def _answer_mac(secret: SharedSecret, proof: Proof, payload: bytes) -> bytes:
    return _mac(secret.handshake_key, "listener", proof.challenge, proof.nonce, payload)


def _mac(key: bytes, *fields: str | int | bytes) -> bytes:
    return hmac.digest(key, msgspec.msgpack.encode(fields), hashlib.sha256)
