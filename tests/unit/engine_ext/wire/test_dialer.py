"""Host names: looked up aside, each on its own."""

import threading
from collections.abc import Iterator

import pytest

from engine_ext.common.access import Access, parse_networks
from engine_ext.common.types import PeerAddress
from engine_ext.wire.dialer import MAX_LOOKUPS, PeerRank, PendingHandshake, TcpDialer
from engine_ext.wire.errors import WireError
from engine_ext.wire.handshake import encode_payload
from engine_ext.wire.listener import HandshakeServer
from tests.unit.engine_ext.wire.metadata import METADATA
from tests.unit.engine_ext.wire.waiting import SECONDS, until


class Names:
    """A resolver whose every answer is held back until the test lets it go, but for `quick`."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.asked: list[str] = []

    def __call__(self, host: str) -> str:
        self.asked.append(host)
        if host != "quick":
            self.may_answer.wait(SECONDS)
        if host == "nobody":
            raise OSError("no such host")
        return "127.0.0.1"


@pytest.fixture
def names() -> Iterator[Names]:
    made = Names()
    yield made
    made.may_answer.set()


@pytest.fixture
def dialer(names: Names) -> TcpDialer:
    return TcpDialer(names)


@pytest.fixture
def port() -> Iterator[int]:
    server = HandshakeServer("127.0.0.1", 0, {(0, 0): encode_payload(METADATA, {})})
    yield server.port
    server.close()


def at(engine_id: str, host: str, port: int) -> PeerRank:
    return PeerRank(PeerAddress(engine_id, host, port), 0)


def answer(handshake: PendingHandshake) -> bool:
    until(lambda: handshake.receive() is not None)
    handshake.close()
    return True


def test_a_name_that_takes_long_delays_no_other(dialer: TcpDialer, names: Names, port: int) -> None:
    slow = dialer.dial(at("p", "slow", port))
    assert answer(dialer.dial(at("p", "quick", port)))
    assert answer(dialer.dial(at("p", "127.0.0.1", port)))
    assert slow.receive() is None
    names.may_answer.set()
    assert answer(slow)


def test_a_name_that_does_not_exist_is_an_error_in_words(
    dialer: TcpDialer, names: Names, port: int
) -> None:
    handshake = dialer.dial(at("p", "nobody", port))
    names.may_answer.set()
    with pytest.raises(WireError, match="host nobody: no such host"):
        answer(handshake)


def test_those_who_wait_for_one_name_share_its_lookup(
    dialer: TcpDialer, names: Names, port: int
) -> None:
    handshakes = [dialer.dial(at(f"p{i}", "slow", port)) for i in range(5)]
    names.may_answer.set()
    assert all(answer(one) for one in handshakes)
    assert names.asked == ["slow"]


def test_lookups_under_way_are_bounded(dialer: TcpDialer, port: int) -> None:
    for number in range(MAX_LOOKUPS):
        dialer.dial(at("p", f"slow-{number}", port))
    with pytest.raises(WireError, match="looked up already"):
        dialer.dial(at("p", "one-more", port))


def test_a_name_that_no_resolver_takes_is_an_error(port: int) -> None:
    dialer = TcpDialer()
    handshake = dialer.dial(at("p", "a" * 70 + ".x", port))
    with pytest.raises(WireError, match="host a"):
        answer(handshake)


def test_a_name_that_turns_out_to_be_outside_of_the_allowed_peers_is_not_dialled(
    names: Names, port: int
) -> None:
    access = Access(peers=parse_networks("allowed_peers", ["192.0.2.0/24"]))
    dialer = TcpDialer(names, access)
    handshake = dialer.dial(at("p", "quick", port))
    with pytest.raises(WireError, match=r"quick \(127\.0\.0\.1\) is not one of"):
        answer(handshake)
    with pytest.raises(WireError, match="allowed_peers"):
        dialer.dial(at("p", "127.0.0.1", port))
