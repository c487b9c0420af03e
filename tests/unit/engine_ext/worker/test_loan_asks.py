"""Tests of requests for loans in the worker half: one report each, and no loan stays unused."""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.orders import LoanAsk
from engine_ext.common.types import (
    CacheGeometry,
    EngineIdentity,
    LoanReport,
    PeerAddress,
    RemoteSource,
)
from engine_ext.wire.notifications import AskLoan, Loan, Read, decode_notification
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.heartbeats import CLOCK_DRIFT, HeartbeatTracker
from engine_ext.worker.loan_asks import SILENT_SECONDS, LoanAsks
from engine_ext.worker.peers import PeerError
from tests.unit.engine_ext.scheduler.fakes import FakeAgent, regions

FIRST, SECOND = PeerAddress("h1", "x", 1), PeerAddress("h2", "x", 2)
ORDER = LoanAsk("r", (FIRST, SECOND), "numbers", (b"0", b"1", b"2"), 32)
TIMEOUT = 0.25


@dataclass
class FakePeer:
    name: str
    has_extension: bool = True


@dataclass
class FakePeers:
    """Agents by engine; None while a handshake runs, no entry after it has failed."""

    agents: dict[str, FakePeer | None] = field(
        default_factory=lambda: {"h1": FakePeer("agent-h1"), "h2": FakePeer("agent-h2")}
    )

    forgotten: list[PeerAddress] = field(default_factory=list)

    def forget(self, address: PeerAddress) -> None:
        self.forgotten.append(address)

    def connect_all(self, address: PeerAddress, now: float) -> list[FakePeer] | None:
        if address.engine_id not in self.agents:
            raise PeerError("no handshake")
        agent = self.agents[address.engine_id]
        return None if agent is None else [agent]


class Asker:
    def __init__(self) -> None:
        self.now = 100.0
        self.agent, self.peers = FakeAgent(), FakePeers()
        self.quarantined: set[str] = set()
        self.context = WorkerContext(
            agent=self.agent,
            config=ConnectorConfig(engine_id="b", loan_timeout=TIMEOUT),
            geometry=CacheGeometry(block_size=16, num_blocks=32),
            identity=EngineIdentity("b", "x", 3),
            regions=regions(),
            clock=lambda: self.now,
        )
        self.beats = HeartbeatTracker(5.0)
        peers: Any = self.peers
        self.asks = LoanAsks(
            self.context,
            peers=peers,
            beats=self.beats,
            may_read=lambda address: address.engine_id not in self.quarantined,
        )

    def start(self, order: LoanAsk = ORDER) -> None:
        self.asks.start(order, self.now)

    def step(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.asks.step(self.now)

    def sent(self) -> list[tuple[str, Any]]:
        messages, self.agent.sent = self.agent.sent, []
        return [(name, decode_notification(message)) for name, message in messages]

    def asked(self, agent: str) -> int:
        """The number of the only message that was sent, which is a request to that agent."""
        ((name, message),) = self.sent()
        assert name == agent
        assert isinstance(message, AskLoan)
        assert (message.scheme, message.keys) == (ORDER.scheme, ORDER.keys)
        return message.sequence

    def answer(self, loan: Loan, sender: str = "agent-h1") -> None:
        self.asks.answered(sender, loan, self.now)

    def reports(self) -> tuple[LoanReport, ...]:
        return self.context.results.take().loan_reports


@pytest.fixture
def asker() -> Asker:
    return Asker()


def loan(sequence: int, **changes: Any) -> Loan:
    granted = Loan(sequence, "loan-1", ((4, 5, 6),), 48, b"2", 10.0)
    return msgspec.structs.replace(granted, **changes)


REFUSED = (LoanReport("r"),)
SILENT = (LoanReport("r", is_refused=False),)


def test_a_loan_is_reported_with_its_blocks_and_its_horizon_counts_from_the_request(
    asker: Asker,
) -> None:
    asker.start()
    sequence = asker.asked("agent-h1")
    asker.now += 0.1
    asker.answer(loan(sequence))
    source = RemoteSource(FIRST, "loan-1", 1, ((4, 5, 6),), 48, 16)
    assert asker.reports() == (LoanReport("r", source, b"2"),)
    assert asker.beats.valid_until("r", "agent-h1") == 100.0 + 10.0 * (1 - CLOCK_DRIFT)
    assert asker.beats.valid_until("r", "agent-h2") < 0
    assert not asker.beats.due(asker.now + 2.4)
    (beat,) = asker.beats.due(asker.now + 2.5)
    assert beat.remote_ids == ("loan-1",), "it is renewed"
    assert asker.asks.num_open == 0
    asker.step(TIMEOUT)
    assert not asker.reports()


@pytest.mark.parametrize("why", ["refused", "no handshake", "stock", "quarantine", "unsendable"])
def test_the_next_holder_is_asked_when_the_first_one_lends_nothing(asker: Asker, why: str) -> None:
    if why == "no handshake":
        del asker.peers.agents["h1"]
    if why == "stock":
        asker.peers.agents["h1"] = FakePeer("agent-h1", has_extension=False)
    if why == "quarantine":
        asker.quarantined.add("h1")
    if why == "unsendable":
        asker.agent.failing = {"notify"}
        asker.start(replace(ORDER, holders=(FIRST,)))
        assert asker.reports() == SILENT
        assert asker.peers.forgotten == [FIRST]
        return
    asker.start()
    if why == "refused":
        asker.answer(Loan(asker.asked("agent-h1")))
    asker.answer(loan(asker.asked("agent-h2")), "agent-h2")
    (report,) = asker.reports()
    assert report.source is not None
    assert report.source.address == SECOND


@pytest.mark.parametrize(
    "changes",
    [
        {"last_key": b"1"},
        {"last_key": b""},
        {"num_tokens": 47},
        {"num_tokens": 64},
        {"num_tokens": 1 << 40},
        {"num_tokens": 16, "block_ids": ((4,),), "last_key": b"0"},
        {"block_ids": ((4, 5),)},
        {"block_ids": ((4, 5, 6), (7, 8, 9))},
        {"block_ids": ()},
    ],
)
def test_a_loan_that_does_not_fit_is_given_back(asker: Asker, changes: dict[str, Any]) -> None:
    asker.start(replace(ORDER, holders=(FIRST,)))
    asker.answer(loan(asker.asked("agent-h1"), **changes))
    assert asker.sent() == [("agent-h1", Read("loan-1"))]
    assert asker.reports() == REFUSED
    assert len(asker.beats) == 0


def test_a_holder_that_may_hold_the_prefix_and_lends_nothing_now_has_not_evicted_it(
    asker: Asker,
) -> None:
    asker.start()
    asker.answer(Loan(asker.asked("agent-h1"), may_hold_more=True))
    asker.answer(Loan(asker.asked("agent-h2")), "agent-h2")
    assert asker.reports() == SILENT


def test_only_the_agent_that_was_asked_can_answer(asker: Asker) -> None:
    asker.start()
    sequence = asker.asked("agent-h1")
    asker.answer(loan(sequence), "agent-h2")
    asker.answer(loan(sequence + 1))
    assert not asker.reports()
    assert not asker.sent(), "nothing is confirmed on a stranger's word"
    asker.answer(loan(sequence))
    assert asker.reports()[0].source is not None


def test_a_silent_holder_costs_its_share_of_the_time_and_is_left_out_for_a_while(
    asker: Asker,
) -> None:
    asker.start()
    asker.asked("agent-h1")
    asker.step(TIMEOUT / 2)
    second = asker.asked("agent-h2")
    asker.answer(Loan(second), "agent-h2")
    assert asker.reports() == SILENT
    asker.start()
    asker.answer(Loan(asker.asked("agent-h2")), "agent-h2")
    assert asker.reports() == SILENT
    assert not asker.peers.forgotten, "a late answer can still be given back"
    asker.step(SILENT_SECONDS)
    asker.peers.agents["h1"] = None
    asker.start()
    asker.start()
    assert asker.peers.forgotten == [FIRST], "it may have restarted"
    asker.peers.agents["h1"] = FakePeer("agent-h1-again")
    asker.step()
    asker.answer(loan(asker.asked("agent-h1-again")), "agent-h1-again")
    assert asker.reports()[0].source is not None


def test_a_late_answer_shows_that_the_holder_can_be_asked_again(asker: Asker) -> None:
    asker.start(replace(ORDER, holders=(FIRST,)))
    sequence = asker.asked("agent-h1")
    asker.step(TIMEOUT)
    asker.answer(Loan(sequence))
    asker.start()
    assert asker.asked("agent-h1") > sequence


def test_a_handshake_that_takes_too_long_ends_in_a_report(asker: Asker) -> None:
    asker.peers.agents = {"h1": None, "h2": None}
    asker.start()
    asker.step(TIMEOUT / 2)
    assert not asker.reports()
    assert asker.asks.num_open == 1
    asker.step(TIMEOUT / 2)
    assert asker.reports() == SILENT
    assert not asker.sent()


@pytest.mark.parametrize("why", ["too late", "request ended", "twice"])
def test_a_loan_that_no_request_uses_is_given_back(asker: Asker, why: str) -> None:
    asker.start(replace(ORDER, holders=(FIRST,)))
    sequence = asker.asked("agent-h1")
    if why == "too late":
        asker.step(TIMEOUT)
        assert asker.reports() == SILENT
    if why == "request ended":
        asker.asks.give_up("r")
    if why == "twice":
        asker.answer(loan(sequence))
        assert asker.reports()[0].source is not None
    asker.answer(loan(sequence, request_id="loan-2"))
    assert asker.sent() == [("agent-h1", Read("loan-2"))]
    assert not asker.reports()


def test_a_loan_in_use_is_not_confirmed_when_its_answer_is_repeated(asker: Asker) -> None:
    asker.start()
    sequence = asker.asked("agent-h1")
    asker.answer(loan(sequence))
    asker.answer(loan(sequence))
    assert not asker.sent()
