"""A stranger beside the engines: `python -m tests.soak.forger EAR SECRET PORT...`.

He has the NIXL metadata of the engines whose side channels are at these ports, and hears at the UDP
port EAR which requests they run. About these he forges messages, until a line comes on standard
input; then he prints how many he has sent.

SECRET is the path of the engines' secret, by which their metadata leaks to him; `-` where they have
none. He seals nothing. Where there is a secret he also speaks in the engines' own names: without
one these would be believed, see docs/security.md.
"""

import random
import select
import socket
import sys
import time
from collections import deque

from engine_ext.common.access import OPEN, Access, read_secret
from engine_ext.common.types import PeerAddress
from engine_ext.wire import notifications as wire
from engine_ext.wire.dialer import PeerRank, PendingHandshake, TcpDialer
from engine_ext.wire.errors import WireError
from engine_ext.wire.handshake import AgentMetadata, decode_metadata
from tests.integration.stranger import GARBAGE, agent_called, forged, registration

HOST = "127.0.0.1"
INTERVAL = 1 / 60
PATIENCE = 5.0
"""Seconds for an engine to answer a handshake: it may be frozen, or gone and back."""
RECENT = 16
"""Requests that are spoken of."""
MAX_NUMBER = 2000
"""Sequences and generations are guessed up to here."""
GARBAGE_SHARE = 0.25


class Victim:
    """An engine at a known port, whichever it is at the moment."""

    def __init__(self, port: int, dialer: TcpDialer) -> None:
        self.port = port
        self._metadata: AgentMetadata | None = None
        self._dialer = dialer
        self._handshake: PendingHandshake | None = None
        self._deadline = 0.0

    @property
    def known_by(self) -> AgentMetadata:
        assert self._metadata is not None
        return self._metadata

    def look(self) -> bool:
        """False until it has answered."""
        if self._metadata is None:
            self._metadata = self._shake_hands()
        return self._metadata is not None

    def lose(self) -> None:
        """It is another engine by now, or none."""
        self._metadata = None

    def _shake_hands(self) -> AgentMetadata | None:
        if self._handshake is None:
            address = PeerAddress("whoever is there", HOST, self.port)
            self._handshake = self._dialer.dial(PeerRank(address, 0))
            self._deadline = time.monotonic() + PATIENCE
        try:
            payload = self._handshake.receive()
        except WireError:
            self._hang_up()
            return None
        if payload is not None or time.monotonic() > self._deadline:
            self._hang_up()
        return None if payload is None else decode_metadata(payload)

    def _hang_up(self) -> None:
        if self._handshake is not None:
            self._handshake.close()
            self._handshake = None


class Voice:
    """An agent of the stranger's, whatever it calls itself."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._agent = agent_called(name)
        self._names: dict[bytes, str] = {}

    @property
    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def name_of(self, victim: AgentMetadata) -> str:
        blob = victim.agent_metadata
        if blob not in self._names:
            self._names[blob] = self._agent.add_remote_agent(blob)
        return self._names[blob]

    def say(self, victim: AgentMetadata, message: bytes) -> None:
        self._agent.send_notif(self.name_of(victim), message)

    def listen(self) -> None:
        """What an agent sends leaves when it polls; answers are of no interest."""
        self._agent.get_new_notifs()


class Forger:
    def __init__(self, access: Access, ports: list[int]) -> None:
        dialer = TcpDialer(access=access)
        self.num_sent = 0
        self._is_open = access.secret is None
        self._victims = [Victim(port, dialer) for port in ports]
        self._own = Voice("stranger")
        self._borrowed: dict[str, Voice] = {}
        self._heard: deque[str] = deque(["nobody's"], maxlen=RECENT)
        self._rng = random.Random(5)

    def hear(self, request_id: str) -> None:
        self._heard.append(request_id)

    def step(self) -> None:
        for voice in self._voices():
            voice.listen()
        known = [victim for victim in self._victims if victim.look()]
        if known:
            victim, other = self._rng.choice(known), self._rng.choice(known)
            try:
                self._forge(victim.known_by, other.known_by, other.port)
            except Exception as error:  # NIXL's are of many kinds: it is gone.
                print(f"engine at {victim.port}: {error!r}", file=sys.stderr)
                victim.lose()
            else:
                self.num_sent += 1

    def _voices(self) -> list[Voice]:
        return [self._own, *self._borrowed.values()]

    def _forge(self, whom: AgentMetadata, whose: AgentMetadata, port: int) -> None:
        if not self._is_open:
            self._borrow(self._own.name_of(whose))
        its_name = self._own.name_of(whom)
        voice = self._rng.choice([each for each in self._voices() if each.name != its_name])
        voice.say(whom, self._message(whose, port))

    def _borrow(self, name: str) -> None:
        if name not in self._borrowed:
            self._borrowed[name] = Voice(name)

    def _message(self, whose: AgentMetadata, port: int) -> bytes:
        if self._rng.random() < GARBAGE_SHARE:
            return self._rng.choice(GARBAGE)
        request_id = self._rng.choice(self._heard)
        blocks = [self._rng.sample(range(whose.num_blocks), 3)]
        return self._rng.choice(
            [
                *forged(request_id, self._rng.randrange(1, MAX_NUMBER)),
                registration(request_id, whose.engine_id, HOST, port, blocks),
                wire.encode_extension(wire.Hello(self._own.metadata)),
                wire.encode_extension(wire.Hello(whose.agent_metadata)),
            ]
        )


def main(ear: str, secret: str, *ports: str) -> None:
    access = OPEN if secret == "-" else Access(read_secret("SECRET", secret))
    forger = Forger(access, [int(port) for port in ports])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hears:
        hears.bind((HOST, int(ear)))
        forge(forger, hears)
    print(forger.num_sent)


def forge(forger: Forger, hears: socket.socket) -> None:
    """Until a line comes."""
    due = time.monotonic()
    while True:
        patience = max(0.0, due - time.monotonic())
        ready, _, _ = select.select([sys.stdin, hears], [], [], patience)
        if sys.stdin in ready:
            return
        if hears in ready:
            forger.hear(hears.recv(4096).decode())
        if time.monotonic() >= due:
            forger.step()
            due = time.monotonic() + INTERVAL


if __name__ == "__main__":
    main(*sys.argv[1:])
