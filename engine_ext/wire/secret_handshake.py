"""A handshake between engines that share a secret. Both prove that they hold it; neither sends it.

    dialer                                    listener
    (b"get_meta_msg", pp, tp)        ----->   the stock request, which a stock listener survives
                                     <-----   {"error", "challenge"}; in mixed mode the stock answer
                                              with a challenge in it
    (b"disagg_meta_msg", pp, tp,
     challenge, nonce, mac)          ----->   mac: over all fields and the dialled address
                                     <-----   payload, clock, mac over nonce and payload

The listener keeps no state: a challenge is its clock under a key that was made when it started, and
is valid for ten seconds and one connection. The proof includes the dialled address, so that an
engine that was dialled by mistake cannot relay request and answer to another engine.
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
    """The address of a side channel, as its engine announces it."""

    host: str
    port: int


class ClientIdentity(NamedTuple):
    """The client at the other end of a connection to the listener."""

    identity: bytes
    """A random value that no other connection has."""
    address: str
    """The numeric address."""


class HandshakeAnswer(NamedTuple):
    payload: bytes
    mac: bytes | None = None
    """The listener's own proof, for a client that has sent one."""
    problem: str | None = None
    """The reason of a refusal. A challenge is no refusal."""


class Challenges:
    """Makes and recognises challenges without storing them. `now` is in seconds, monotonic."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def make(self, client: ClientIdentity, now: float) -> bytes:
        clock = _CLOCK.pack(now)
        return clock + self._mac(clock, client)

    def accept(self, challenge: bytes, client: ClientIdentity, now: float) -> bool:
        clock, mac = challenge[: _CLOCK.size], challenge[_CLOCK.size :]
        if not hmac.compare_digest(mac, self._mac(clock, client)):
            return False
        (made_at,) = _CLOCK.unpack(clock)
        return math.isfinite(made_at) and 0 <= now - made_at <= CHALLENGE_SECONDS

    def _mac(self, clock: bytes, client: ClientIdentity) -> bytes:
        return _mac(self._key, "challenge", clock, client.identity, client.address)


class HandshakeAnswers:
    """Decides what each client gets for each rank of the engine. The listener sends it."""

    def __init__(
        self,
        payloads: Mapping[Rank, bytes],
        access: Access,
        place: SideChannelAddress,
        own_address: str,
    ) -> None:
        """`own_address` is always allowed, because the engine's own HTTP pages dial its side
        channel."""
        self._payloads = dict(payloads)
        self._access = access
        self._place = place
        self._own_address = own_address
        self._challenges = Challenges()
        self._for_stock = {
            rank: as_stock(decode_payload(one)) for rank, one in payloads.items() if access.is_mixed
        }

    def admit(self, address: str) -> bool:
        return self._access.peers.admit(address) or address == self._own_address

    def answer(self, request: bytes, client: ClientIdentity, now: float) -> HandshakeAnswer:
        """Return the answer to any bytes: a refusal if they are no request."""
        if not self.admit(client.address):
            return _refuse(f"{client.address} is not one of this engine's allowed_peers")
        try:
            rank, proof = decode_request(request)
        except WireError as error:
            return _refuse(str(error))
        secret = self._access.secret
        if proof is None:
            return self._answer_unproven(rank, client, now)
        if secret is None:
            return _refuse("this engine has no side_channel_secret_file")
        return self._answer_proven(secret, rank, proof, client, now)

    def _answer_unproven(self, rank: Rank, client: ClientIdentity, now: float) -> HandshakeAnswer:
        if self._access.secret is None:
            return self._answer_rank(self._payloads, rank)
        challenge = self._challenges.make(client, now)
        if not self._access.is_mixed:
            return HandshakeAnswer(
                encode_refusal("this engine requires the shared secret", challenge)
            )
        payload = self._for_stock.get(rank)
        if payload is None:
            return self._answer_rank({}, rank)
        return HandshakeAnswer(
            msgspec.msgpack.encode(msgspec.structs.replace(payload, challenge=challenge))
        )

    def _answer_proven(
        self, secret: SharedSecret, rank: Rank, proof: Proof, client: ClientIdentity, now: float
    ) -> HandshakeAnswer:
        if not self._challenges.accept(proof.challenge, client, now):
            return _refuse("this engine did not send the challenge, or sent it too long ago")
        if not hmac.compare_digest(proof.mac, _proof_mac(secret, rank, proof, self._place)):
            host, port = self._place
            return _refuse(
                f"the peer's secret differs, or it connected to another address than {host}:{port}"
            )
        answer = self._answer_rank(self._payloads, rank)
        return answer._replace(mac=_answer_mac(secret, proof, answer.payload))

    @staticmethod
    def _answer_rank(payloads: Mapping[Rank, bytes], rank: Rank) -> HandshakeAnswer:
        payload = payloads.get(rank)
        return (
            HandshakeAnswer(payload)
            if payload
            else _refuse(f"no worker of pipeline, tensor rank {rank}")
        )


class Prover:
    """The dialer's side of one handshake."""

    def __init__(self, access: Access, rank: Rank, dialled: SideChannelAddress) -> None:
        self._access = access
        self._rank = rank
        self._dialled = dialled
        self._proof: Proof | None = None

    def take(self, frames: list[bytes]) -> HandshakePayload | bytes:
        """Take the listener's frames: payload, clock, and a mac if the listener sent a proof.
        Return the next request, or the payload at the end of the handshake. Raises WireError."""
        secret = self._access.secret
        if secret is None:
            return decode_payload(frames[0])
        if self._proof is not None:
            return self._verified(secret, self._proof, frames)
        challenge = decode_challenge(frames[0])
        if challenge is not None:
            unsigned = Proof(challenge, secrets.token_bytes(NONCE_BYTES), b"")
            mac = _proof_mac(secret, self._rank, unsigned, self._dialled)
            self._proof = unsigned._replace(mac=mac)
            return encode_request(self._rank, self._proof)
        if not self._access.is_mixed:
            raise _secret_missing()
        return as_stock(decode_payload(frames[0]))

    @staticmethod
    def _verified(secret: SharedSecret, proof: Proof, frames: list[bytes]) -> HandshakePayload:
        """Return the payload if its mac is right. Otherwise raise WireError; a short answer is read
        for the reason of a refusal."""
        mac = frames[2] if len(frames) > 2 else b""
        if not hmac.compare_digest(mac, _answer_mac(secret, proof, frames[0])):
            if len(frames[0]) <= MAX_REFUSAL_BYTES:
                decode_challenge(frames[0])
            raise _secret_missing()
        return decode_payload(frames[0])


def _secret_missing() -> WireError:
    return WireError("handshake: the peer does not hold the shared secret")


def _refuse(reason: str) -> HandshakeAnswer:
    return HandshakeAnswer(encode_refusal(reason), problem=reason)


def _proof_mac(secret: SharedSecret, rank: Rank, proof: Proof, place: SideChannelAddress) -> bytes:
    return _mac(secret.handshake_key, "dialer", *rank, proof.challenge, proof.nonce, *place)


def _answer_mac(secret: SharedSecret, proof: Proof, payload: bytes) -> bytes:
    return _mac(secret.handshake_key, "listener", proof.challenge, proof.nonce, payload)


def _mac(key: bytes, *fields: str | int | bytes) -> bytes:
    return hmac.digest(key, msgspec.msgpack.encode(fields), hashlib.sha256)
