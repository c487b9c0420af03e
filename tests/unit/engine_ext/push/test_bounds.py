"""What registrations P keeps, and which it refuses at once."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from engine_ext.base.access import Access, parse_networks
from engine_ext.base.config import ConnectorConfig
from engine_ext.base.types import CacheGeometry, ConnectorStats, EngineIdentity
from engine_ext.core.loop import TransferLoop
from engine_ext.push.tables import RegisteredByKey
from engine_ext.transfer.results import Results
from engine_ext.wire.dial import PeerRank
from engine_ext.wire.notifications import (
    EXTENSION_PREFIX,
    Hello,
    PushExtension,
    PushFailed,
    PushRegistered,
    Withdraw,
    decode_notification,
    encode_extension,
    encode_registration,
)
from tests.unit.engine_ext.core.fakes import FakeAgent, regions


class Silence:
    """A dialer whom nobody answers: what has come is kept until it is known whose it is."""

    def dial(self, peer: PeerRank) -> "Silence":
        return self

    def receive(self) -> None:
        return None

    def close(self) -> None:
        pass


@dataclass
class Prefiller:
    agent: FakeAgent
    loop: TransferLoop
    stats: ConnectorStats

    def hears(self, *registrations: PushRegistered, sender: str = "agent-d") -> None:
        self.agent.sender = sender
        self.agent.inbox.append(encode_extension(Hello(sender.encode())))
        self.agent.inbox += map(encode_registration, registrations)
        self.loop.step(0)

    @property
    def refusals(self) -> list[str]:
        said = (message for _, message in self.agent.sent if message.startswith(EXTENSION_PREFIX))
        decoded = map(decode_notification, said)
        return [one.reason for one in decoded if isinstance(one, PushFailed)]


@pytest.fixture
def prefiller() -> Iterator[Prefiller]:
    agent, stats = FakeAgent(), ConnectorStats()
    inside = parse_networks("allowed_peers", ["10.0.0.0/24"])
    loop = TransferLoop(
        agent,
        ConnectorConfig(engine_id="p", transfer_mode="push", access=Access(peers=inside)),
        CacheGeometry(16, 32, num_kv_heads=8),
        EngineIdentity("p", "10.0.0.1", 5600, tp_size=2),
        regions(),
        Results(),
        stats,
        lambda: 0.0,
        Silence(),
    )
    yield Prefiller(agent, loop, stats)
    loop.close()


def registration(number: int, host: str = "10.0.0.2", tp_size: int = 2) -> PushRegistered:
    return PushRegistered(
        request_id=f"d-{number}",
        decode_engine_id="d",
        decode_host=host,
        decode_port=5600,
        decode_tp_size=tp_size,
        local_block_ids=((1, 2),),
        remote_engine_id="p",
        remote_host="10.0.0.1",
        remote_port=5600,
        remote_tp_size=2,
        disagg=PushExtension(number, 0, 32, b"digest", f"p-{number}", 1000.0),
    )


def test_a_registration_of_an_address_outside_is_refused_and_not_kept(
    prefiller: Prefiller,
) -> None:
    prefiller.hears(registration(1), registration(2, host="192.0.2.1"))
    assert prefiller.refusals == ["192.0.2.1 is not one of our allowed_peers"]
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
    monkeypatch.setattr(RegisteredByKey, "LIMIT_BY_SENDER", 3)
    monkeypatch.setattr(RegisteredByKey, "LIMIT", 5)
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
