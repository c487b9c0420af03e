"""What registrations P keeps, and which it refuses at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from engine_ext.common.access import Access, parse_networks
from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import CacheGeometry, EngineIdentity
from engine_ext.push.decode_engines import RECHECK_SECONDS, IncomingInquiries, Outcomes
from engine_ext.push.matching_state import BoundedRegistrations, RegistrationKey
from engine_ext.wire.dialer import PeerRank
from engine_ext.wire.errors import EXTENSION_VERSION
from engine_ext.wire.handshake import HandshakePayload, decode_payload, encode_payload
from engine_ext.wire.notifications import (
    EXTENSION_PREFIX,
    AwaitPrompt,
    Hello,
    PushDone,
    PushExtension,
    PushFailed,
    PushRegistered,
    Withdraw,
    decode_notification,
    encode_extension,
    encode_registration,
)
from engine_ext.worker.reply_channels import ReplyChannels
from tests.unit.engine_ext.scheduler.fakes import FakeAgent, metadata_of, push_registration, regions
from tests.unit.engine_ext.worker.stepped_loop import SteppedLoop


@dataclass
class Dialer:
    """By default nobody answers: what has come is kept until it is known whose it is. Else
    `agent`, and `num_dialled` counts."""

    agent: str | None = None
    num_dialled: int = 0

    def dial(self, peer: PeerRank) -> "Dialer":
        self.num_dialled += 1
        return self

    def receive(self) -> HandshakePayload | None:
        if self.agent is None:
            return None
        layers = regions(num_blocks=100)
        metadata = metadata_of("d", self.agent, layers, disagg_ext=EXTENSION_VERSION)
        return decode_payload(encode_payload(metadata, {}))

    def close(self) -> None:
        pass


class Prefiller(SteppedLoop):
    def __init__(self) -> None:
        access = Access(peers=parse_networks("allowed_peers", ["10.0.0.0/24"]))
        config = ConnectorConfig(engine_id="p", transfer_mode="push", access=access)
        identity = EngineIdentity("p", "10.0.0.1", 5600, tp_size=2)
        self.dialer = Dialer()
        geometry = CacheGeometry(16, 32, num_kv_heads=8)
        super().__init__(config, identity, geometry, regions(), dialer=self.dialer)
        self.now = 0.0

    def hears(self, *registrations: PushRegistered, sender: str = "agent-d") -> None:
        self.agent.sender = sender
        self.agent.inbox.append(encode_extension(Hello(sender.encode())))
        self.agent.inbox += map(encode_registration, registrations)
        self.step()

    @property
    def refusals(self) -> list[str]:
        said = (message for _, message in self.agent.sent if message.startswith(EXTENSION_PREFIX))
        decoded = map(decode_notification, said)
        return [one.reason for one in decoded if isinstance(one, PushFailed)]


@pytest.fixture
def prefiller() -> Iterator[Prefiller]:
    made = Prefiller()
    yield made
    made.loop.close()


def registration(
    number: int,
    host: str = "10.0.0.2",
    tp_size: int = 2,
    blocks: Sequence[int] = (1, 2),
    stage: tuple[int, int] = (0, 1),
) -> PushRegistered:
    return push_registration(
        f"d-{number}",
        decode_host=host,
        decode_tp_size=tp_size,
        local_block_ids=(tuple(blocks),),
        remote_host="10.0.0.1",
        remote_port=5600,
        remote_tp_size=2,
        disagg=PushExtension(number, 0, 32, b"digest", f"p-{number}", 1000.0, 0, *stage),
    )


def test_a_registration_of_an_address_outside_is_refused_and_not_kept(
    prefiller: Prefiller,
) -> None:
    prefiller.hears(registration(1), registration(2, host="192.0.2.1"))
    assert prefiller.refusals == ["192.0.2.1 is not one of our allowed_peers"]
    assert prefiller.loop.num_open == 1


def test_a_registration_of_a_stage_that_there_is_not_is_refused_and_not_kept(
    prefiller: Prefiller,
) -> None:
    prefiller.hears(registration(1, stage=(2, 2)), registration(2, stage=(1, 2)))
    assert prefiller.refusals == ["stage 2 of 2"]
    assert prefiller.loop.num_open == 1


def test_a_registration_of_ranks_that_do_not_divide_ours_is_refused_and_not_kept(
    prefiller: Prefiller,
) -> None:
    prefiller.hears(registration(1, tp_size=3), registration(2, tp_size=4))
    assert prefiller.refusals == ["tensor parallel size differs: 2 here, 3 there"]
    assert prefiller.loop.num_open == 1


def test_one_agent_takes_no_more_than_its_share_and_all_no_more_than_there_is(
    prefiller: Prefiller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedRegistrations, "LIMIT_BY_SENDER", 3)
    monkeypatch.setattr(BoundedRegistrations, "LIMIT", 5)
    prefiller.hears(*map(registration, range(1, 6)), sender="greedy")
    assert prefiller.loop.num_open == 3
    assert prefiller.refusals == ["too many registrations wait here"] * 2
    prefiller.hears(*map(registration, range(11, 15)), sender="other")
    assert prefiller.loop.num_open == 5
    assert len(prefiller.refusals) == 4
    prefiller.agent.sender = "greedy"
    prefiller.agent.inbox.append(encode_extension(Withdraw("d-1", 1, "p-1")))
    prefiller.hears(registration(21), sender="greedy")
    assert prefiller.refusals[4:] == ["withdrawn"]
    assert prefiller.loop.num_open == 5


def test_block_ids_that_wait_are_bounded_by_agent_and_in_all(
    prefiller: Prefiller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedRegistrations, "LIMIT_IDS_BY_SENDER", 33)
    monkeypatch.setattr(BoundedRegistrations, "LIMIT_IDS", 55)
    ten = [registration(number, blocks=range(10)) for number in range(1, 12)]
    prefiller.hears(*ten[:4], sender="greedy")
    assert prefiller.loop.num_open == 3
    prefiller.hears(*ten[4:7], sender="other")
    assert prefiller.loop.num_open == 5
    assert prefiller.refusals == ["too many registrations wait here"] * 2
    prefiller.agent.sender = "greedy"
    prefiller.agent.inbox.append(encode_extension(Withdraw("d-1", 1, "p-1")))
    prefiller.hears(ten[8], sender="greedy")
    assert prefiller.loop.num_open == 5


def test_a_registration_of_more_blocks_than_ours_would_fill_is_refused_and_not_kept(
    prefiller: Prefiller,
) -> None:
    prefiller.dialer.agent = "agent-d"
    prefiller.hears(
        registration(1, blocks=range(32)), registration(2, blocks=range(33)), sender="agent-d"
    )
    prefiller.step()
    assert prefiller.refusals == [
        "33 blocks registered, more than the 32 that all local blocks fill"
    ]
    assert prefiller.loop.num_open == 1
    assert prefiller.stats.pushes_failed == 1


def test_forged_registrations_repeat_the_handshake_with_their_engine_at_a_bounded_rate(
    prefiller: Prefiller,
) -> None:
    prefiller.dialer.agent = "agent-d"
    prefiller.hears(registration(1), sender="agent-d")
    prefiller.step()
    for number in range(2, 102):
        prefiller.hears(registration(number), sender=f"mallory-{number}")
        prefiller.step(0.1)
    assert prefiller.dialer.num_dialled == 1 + 10 / RECHECK_SECONDS
    prefiller.step(RECHECK_SECONDS)
    prefiller.step()
    assert prefiller.loop.num_open == 1


def test_an_engine_that_restarted_is_connected_despite_earlier_forgeries(
    prefiller: Prefiller,
) -> None:
    prefiller.dialer.agent = "agent-d"
    prefiller.hears(registration(1), sender="agent-d")
    prefiller.step()
    prefiller.hears(registration(2), sender="mallory")
    prefiller.step(0.1)
    assert prefiller.loop.num_open == 1
    prefiller.dialer.agent = "agent-d reborn"
    prefiller.hears(registration(3), sender="agent-d reborn")
    prefiller.step(RECHECK_SECONDS)
    prefiller.step()
    prefiller.step(RECHECK_SECONDS)
    assert prefiller.agent.peers.count("agent-d reborn") == 2, "by handshake, and by its hello"
    assert prefiller.loop.num_open == 2


def outcome(sender: str, number: int) -> RegistrationKey:
    return RegistrationKey(sender, f"{sender}-{number}", number, None)


def found(outcomes: Outcomes, sender: str) -> list[int]:
    return [
        number
        for number in range(100)
        if outcomes.find(sender, outcome(sender, number)) is not None
    ]


def test_one_agents_outcomes_displace_none_of_another_agent(
    prefiller: Prefiller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P answers how a registration ended, and writes it no more; a withdrawal of what never was is
    an end, too."""
    monkeypatch.setattr(Outcomes, "LIMIT_BY_SENDER", 10)
    monkeypatch.setattr(Outcomes, "LIMIT", 20)
    prefiller.agent.sender = "agent-d"
    prefiller.agent.inbox.append(encode_extension(Withdraw("d-1", 1, "p-1")))
    prefiller.step()
    prefiller.agent.sender = "mallory"
    prefiller.agent.inbox += [
        encode_extension(Withdraw(f"m-{number}", number, "p-1")) for number in range(1, 100)
    ]
    prefiller.step()
    prefiller.agent.sent.clear()
    prefiller.hears(registration(1))
    assert prefiller.refusals == ["withdrawn"]
    assert prefiller.loop.num_open == 0


def test_a_sender_with_too_many_outcomes_loses_its_oldest_and_the_largest_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Outcomes, "LIMIT_BY_SENDER", 5)
    monkeypatch.setattr(Outcomes, "LIMIT", 8)
    outcomes = Outcomes()
    for sender, count in (("a", 3), ("greedy", 10), ("b", 2)):
        for number in range(count):
            outcomes.add(sender, outcome(sender, number), PushDone(sender, number))
    assert found(outcomes, "a") == [0, 1, 2]
    assert found(outcomes, "greedy") == [7, 8, 9]
    assert found(outcomes, "b") == [0, 1]
    outcomes.add("b", outcome("b", 1), PushDone("b", 1))
    assert len(outcomes) == 8
    for number in range(9):
        outcomes.add(f"c{number}", outcome(f"c{number}", 0), PushDone("c", number))
    assert len(outcomes) == 8


def test_inquiries_are_bounded_and_one_engines_cost_no_other_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(IncomingInquiries, "LIMIT_BY_SENDER", 4)
    monkeypatch.setattr(IncomingInquiries, "LIMIT", 6)
    agent = FakeAgent()
    inquiries = IncomingInquiries(ReplyChannels(agent, 1e9, lambda name: True))
    for sender, count in (("few", 2), ("many", 9), ("more", 2)):
        for number in range(count):
            inquiries.receive(
                AwaitPrompt(f"d-{number}", b"x", f"p-{number}"), sender, float(number)
            )
    kept = sorted((one.sender, one.message.request_id) for one in inquiries)
    assert len(inquiries) == len(kept) == 6
    assert [name for sender, name in kept if sender == "few"] == ["d-0", "d-1"]
    assert [name for sender, name in kept if sender == "more"] == ["d-0", "d-1"]
    again = inquiries.receive(AwaitPrompt("d-0", b"x", "p-0"), "few", 10.0)
    assert again.unknown_since == 0.0
    assert {one.sender for one in inquiries.named(("id p-0",))} == {"few", "more"}
    inquiries.answer(again)
    inquiries.forget_old(1e6)
    assert (len(inquiries), list(inquiries), inquiries.named(("id p-0",))) == (0, [], [])
