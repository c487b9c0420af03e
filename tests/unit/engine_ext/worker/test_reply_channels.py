"""Who reads from us: heard of, kept, and forgotten."""

import pytest

from engine_ext.wire.notifications import Gone, encode_extension
from engine_ext.worker.reply_channels import MAX_DELAYED, ReplyChannels
from tests.unit.engine_ext.scheduler.fakes import FakeAgent, SlowValidator

TTL = 100.0
GONE = Gone(("p-1",))


def readers(agent: FakeAgent, *peers: str) -> ReplyChannels:
    return ReplyChannels(agent, TTL, is_peer=peers.__contains__)


def test_a_reader_without_messages_is_forgotten_and_an_active_one_stays() -> None:
    agent = FakeAgent()
    known = readers(agent)
    for name in ("quiet", "heard"):
        known.hello(name, name.encode(), 0)
    known.note_message("heard", 50)
    known.step(TTL)
    assert agent.peers == ["heard"]
    known.step(50 + TTL)
    assert agent.peers == []


def test_an_agent_that_we_read_from_too_stays_known_to_nixl() -> None:
    agent = FakeAgent()
    known = readers(agent, "both")
    known.hello("both", b"both", 0)
    known.step(TTL)
    assert agent.peers == ["both"]
    agent.failing.add("notify")
    known.answer("both", GONE)
    assert agent.peers == ["both"], "it is no reader any more"


def test_a_hello_in_another_agents_name_is_ignored() -> None:
    agent = FakeAgent()
    known = readers(agent)
    known.hello("forger", b"reader", 0)
    assert agent.peers == []
    known.hello("reader", b"reader", 0)
    known.hello("forger", b"reader", 1)
    assert "reader" in agent.peers


def test_reply_channels_are_bounded_and_the_least_active_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ReplyChannels, "LIMIT", 2)
    agent = FakeAgent()
    known = readers(agent)
    known.hello("a", b"a", 0)
    known.hello("b", b"b", 1)
    known.note_message("a", 2)
    known.hello("c", b"c", 3)
    assert agent.peers == ["a", "c"]


def test_a_nixl_that_fails_to_forget_stops_nothing() -> None:
    agent = FakeAgent()
    known = readers(agent)
    known.hello("a", b"a", 0)
    known.hello("b", b"b", 0)
    agent.failing.add("remove_remote")
    known.step(TTL)
    agent.failing.clear()
    known.hello("a", b"a", TTL)
    known.answer("a", GONE)
    assert [name for name, _ in agent.sent] == ["a"]


def test_answers_wait_until_a_readers_metadata_has_been_validated() -> None:
    agent, validator = FakeAgent(), SlowValidator()
    known = ReplyChannels(agent, TTL, lambda name: False, validator)
    known.hello("a", b"a", 0)
    for _ in range(MAX_DELAYED + 1):
        known.answer("a", GONE)
    known.step(0)
    assert known.knows("a")
    assert (agent.peers, agent.sent) == ([], [])
    validator.judge()
    known.step(1)
    assert agent.peers == ["a"]
    assert agent.sent == [("a", encode_extension(GONE))] * MAX_DELAYED


def test_a_reader_whose_metadata_is_refused_is_none_and_its_namesake_gets_the_answers() -> None:
    agent, validator = FakeAgent(), SlowValidator()
    known = ReplyChannels(agent, TTL, lambda name: False, validator)
    known.hello("a", b"a", 0)
    known.hello("a", b"a", 0)
    known.answer("a", GONE)
    validator.waiting.pop(0).problem = "malformed"
    known.step(0)
    assert (agent.peers, agent.sent) == ([], [])
    validator.judge()
    known.step(0)
    assert agent.sent == [("a", encode_extension(GONE))]
    known.hello("b", b"b", 0)
    known.answer("b", GONE)
    validator.judge("malformed")
    known.step(0)
    assert not known.knows("b")
    assert [name for name, _ in agent.sent] == ["a"]
