"""What counts between engines that share a secret, and what does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.common.access import OPEN, Access, SharedSecret
from engine_ext.common.types import ConnectorStats
from engine_ext.wire.notifications import (
    Gone,
    PushExtension,
    PushRegistered,
    Read,
    decode_notification,
    encode_extension,
    encode_heartbeat,
    encode_read_done,
    encode_registration,
)
from engine_ext.worker.agent import Agent
from engine_ext.worker.sealed import SealedAgent, open_seal, seal, sealed
from tests.unit.engine_ext.scheduler.fakes import FakeAgent, push_registration

SECRET, OTHER = (
    SharedSecret.of(b"a secret of the fleet"),
    SharedSecret.of(b"a secret of another fleet"),
)
REQUIRED, MIXED = Access(SECRET), Access(SECRET, is_mixed=True)
READ = encode_extension(Read("p-1"))
REGISTRATION = push_registration(disagg=PushExtension(1, 0, 32, b"digest", "p-1", 1000.0))
OF_STOCK = (encode_read_done("p-1"), encode_heartbeat(["p-1", "p-2"]))

names = st.text(max_size=20)


def engine(access: Access, stats: ConnectorStats | None = None) -> tuple[Agent, FakeAgent]:
    nixl = FakeAgent(name="us", sender="them")
    return sealed(nixl, access, stats or ConnectorStats()), nixl


def heard(access: Access, *messages: bytes) -> list[bytes]:
    agent, nixl = engine(access)
    nixl.inbox += messages
    return [message for _, message in agent.notifications()]


@given(names, names, st.binary())
def test_a_seal_is_opened_by_its_receiver_only(sender: str, receiver: str, message: bytes) -> None:
    closed = seal(SECRET, sender, receiver, message)
    assert open_seal(SECRET, sender, receiver, message=closed) == message
    assert open_seal(OTHER, sender, receiver, closed) is None
    assert open_seal(SECRET, sender + "x", receiver, closed) is None
    assert open_seal(SECRET, sender, receiver + "x", closed) is None


@given(st.tuples(names, names), st.tuples(names, names), st.binary(max_size=50))
def test_a_seal_is_of_one_pair_in_one_direction(
    pair: tuple[str, str], other: tuple[str, str], message: bytes
) -> None:
    closed = seal(SECRET, *pair, message)
    assert (open_seal(SECRET, *other, closed) == message) == (pair == other)


@given(st.binary(max_size=60), st.data())
def test_one_changed_byte_anywhere_is_not_opened(message: bytes, data: st.DataObject) -> None:
    closed = bytearray(seal(SECRET, "a", "b", message))
    closed[data.draw(st.integers(0, len(closed) - 1))] ^= data.draw(st.integers(1, 255))
    assert open_seal(SECRET, "a", "b", bytes(closed)) is None


@given(st.binary(max_size=100))
def test_in_required_mode_unsealed_messages_are_dropped(message: bytes) -> None:
    stats = ConnectorStats()
    agent, nixl = engine(REQUIRED, stats)
    nixl.inbox.append(message)
    assert agent.notifications() == []
    assert stats.notifications_unsealed == 1


@pytest.mark.parametrize("access", [REQUIRED, MIXED])
def test_a_sealed_message_arrives_unchanged(access: Access) -> None:
    for message in (READ, encode_registration(REGISTRATION), *OF_STOCK, b""):
        assert heard(access, seal(SECRET, "them", "us", message)) == [message]
        assert heard(access, seal(OTHER, "them", "us", message)) == []
        assert heard(access, seal(SECRET, "someone", "us", message)) == []


def test_in_mixed_mode_stock_messages_pass_and_the_extensions_only_with_a_seal() -> None:
    assert heard(MIXED, *OF_STOCK) == list(OF_STOCK)
    assert heard(MIXED, READ, encode_extension(Gone(("p-1",))), b"PUSH_REG:\xc1") == []


def test_in_mixed_mode_a_registration_of_an_unknown_agent_is_read_as_stocks() -> None:
    (message,) = heard(MIXED, encode_registration(REGISTRATION))
    registration = decode_notification(message)
    assert isinstance(registration, PushRegistered)
    assert registration.disagg is None
    assert registration.local_block_ids == REGISTRATION.local_block_ids


def test_in_mixed_mode_an_agent_that_got_extension_messages_needs_a_seal() -> None:
    agent, nixl = engine(MIXED)
    agent.notify("them", READ)
    nixl.inbox += OF_STOCK
    assert agent.notifications() == []
    agent.notify("them", OF_STOCK[0])
    assert [open_seal(SECRET, "us", "them", said) for _, said in nixl.sent] == [READ, OF_STOCK[0]]


def test_in_mixed_mode_an_agent_with_the_secret_needs_a_seal_after_it_is_forgotten_as_a_peer() -> (
    None
):
    agent, nixl = engine(MIXED)
    agent.add_remote(b"them")
    agent.notify("them", READ)
    agent.remove_remote("them")
    nixl.inbox += OF_STOCK
    assert agent.notifications() == []


def test_in_mixed_mode_an_agent_that_sealed_once_needs_a_seal() -> None:
    agent, nixl = engine(MIXED)
    nixl.inbox += [seal(SECRET, "them", "us", READ), *OF_STOCK]
    assert agent.notifications() == [("them", READ)]


def test_in_mixed_mode_a_handshake_in_an_agents_name_does_not_lift_its_seal() -> None:
    """Anybody can tell another's metadata on, and stock's handshake proves nothing."""
    agent, nixl = engine(MIXED)
    agent.notify("them", READ)
    assert agent.add_remote(b"them") == "them"
    nixl.inbox += OF_STOCK
    assert agent.notifications() == []


def test_names_that_have_proven_the_secret_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one without a word for longest is the first to be taken for stock again."""
    monkeypatch.setattr(SealedAgent, "MAX_HOLDERS", 3)
    agent, nixl = engine(MIXED)
    for name in ("them", "b", "c", "them", "d"):
        agent.notify(name, READ)
    nixl.inbox += OF_STOCK
    assert agent.notifications() == []
    nixl.sender = "b"
    nixl.inbox += OF_STOCK
    assert len(agent.notifications()) == len(OF_STOCK)


def test_in_mixed_mode_a_stock_peer_gets_stock_bytes() -> None:
    agent, nixl = engine(MIXED)
    agent.notify("stock", OF_STOCK[0])
    assert nixl.sent == [("stock", OF_STOCK[0])]


def test_without_a_secret_the_agent_is_nixls_own() -> None:
    agent, nixl = engine(OPEN)
    assert agent is nixl
