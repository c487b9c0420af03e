"""What is known of other engines comes, stays while it is used, and goes without a trace."""

import math
from dataclasses import dataclass, field

import pytest

from engine_ext.common.access import OPEN, Access, SharedSecret
from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import CONFIGURATION, CacheGeometry, EngineIdentity, PeerAddress
from engine_ext.wire.dialer import PeerRank
from engine_ext.wire.errors import EXTENSION_VERSION
from engine_ext.wire.handshake import HandshakePayload, decode_payload, encode_payload
from engine_ext.worker import peers as peers_module
from engine_ext.worker.agent import PeerHandle
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.peers import MAX_CONNECTING_THERE, PeerError, Peers, compatibility_problem
from engine_ext.worker.validator import TRUSTING, Validator
from tests.unit.engine_ext.scheduler.fakes import FakeAgent, SlowValidator, metadata_of, regions

FACTORS = {"model": "m"}
TTL = 3600.0


@dataclass
class Answered:
    """A handshake that is answered at once, or never."""

    payload: HandshakePayload | None
    is_closed: bool = False

    def receive(self) -> HandshakePayload | None:
        return self.payload

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Everybody:
    """A dialer: every engine answers, each with an agent of its name, but for `silent` ones."""

    dialled: list[Answered] = field(default_factory=list)
    layers: dict[int, slice] = field(default_factory=dict)
    """Those of a stage; all, where nothing is said."""

    def dial(self, peer: PeerRank) -> Answered:
        name = peer.address.engine_id
        handshake = Answered(None if name.startswith("silent") else self._say(name, peer.stage))
        self.dialled.append(handshake)
        return handshake

    def _say(self, name: str, stage: int) -> HandshakePayload:
        return payload_of(name, stage, self.layers.get(stage, slice(None)))

    def close(self) -> None:
        pass


def payload_of(engine_id: str, stage: int = 0, layers: slice = slice(None)) -> HandshakePayload:
    agent = f"agent of {engine_id}" + (f", stage {stage}" if stage else "")
    held = regions()[layers]
    names = [region.name for region in held]
    version = None if engine_id.startswith("stock") else EXTENSION_VERSION
    metadata = metadata_of(engine_id, agent, held, disagg_ext=version, region_names=names)
    return decode_payload(encode_payload(metadata, FACTORS))


@dataclass
class Known:
    agent: FakeAgent
    peers: Peers
    dialer: Everybody
    in_use: list[PeerHandle]

    def meet(self, engine_id: str, now: float = 0.0, host: str = "10.0.0.1") -> PeerHandle:
        address = PeerAddress(engine_id, host, 5600)
        self.peers.connect(address, now)
        self.peers.step(now)
        handle = self.peers.connect(address, now)
        assert handle is not None
        return handle


@pytest.fixture
def known() -> Known:
    return acquainted(TRUSTING)


def acquainted(validator: Validator, access: Access = OPEN) -> Known:
    agent, dialer, in_use = FakeAgent(), Everybody(), list[PeerHandle]()
    context = WorkerContext(
        agent=agent,
        config=ConnectorConfig(engine_id="us", engine_ttl=TTL, access=access),
        geometry=CacheGeometry(16, 32),
        identity=EngineIdentity("us", "10.0.0.9", 5600, compat_factors=FACTORS),
        regions=regions(),
        clock=lambda: 0.0,
        dialer=dialer,
        validator=validator,
    )
    peers = Peers(context, is_in_use=lambda handle: any(handle is one for one in in_use))
    return Known(agent, peers, dialer, in_use)


@pytest.mark.parametrize("step", ["prepare", "notify"])
def test_an_introduction_that_fails_half_way_leaves_no_agent_behind(
    known: Known, step: str
) -> None:
    known.agent.failing.add(step)
    for _ in range(3):
        with pytest.raises(PeerError, match=f"injected: {step}"):
            known.meet("p")
        known.peers.step(0)
    assert known.agent.peers == []
    known.agent.failing.clear()
    known.meet("p")
    assert known.agent.peers == ["agent of p"]


def test_an_unused_engine_is_forgotten_and_connected_again(known: Known) -> None:
    known.meet("left")
    known.meet("used")
    for now in range(0, int(TTL) + 60, 60):
        known.meet("used", now)
    assert known.agent.peers == ["agent of used"]
    known.meet("left", TTL + 100)
    assert sorted(known.agent.peers) == ["agent of left", "agent of used"]


def test_an_engine_that_a_transfer_runs_with_is_kept_whatever_the_time(known: Known) -> None:
    known.in_use.append(known.meet("p"))
    known.peers.step(10 * TTL)
    assert known.agent.peers == ["agent of p"]
    known.in_use.clear()
    known.peers.step(11 * TTL)
    assert known.agent.peers == []


def test_an_engine_known_by_two_addresses_is_removed_with_the_second(known: Known) -> None:
    known.meet("p", host="10.0.0.1")
    known.meet("p", now=TTL - 1, host="10.0.0.2")
    known.peers.step(TTL + 1)
    assert set(known.agent.peers) == {"agent of p"}
    known.peers.step(3 * TTL)
    assert len(known.agent.peers) == 1  # The double counts twice what NIXL counts once.


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ((1, 1), None),
        ((2, 1), "3 layers here of 2"),
        ((2, 2), "4 layers here of 2"),
    ],
)
def test_of_an_engine_of_two_stages_each_layer_is_found_once(
    known: Known, stages: tuple[int, int], problem: str | None
) -> None:
    """`stages`: how many layers each says that it has, the first the first ones."""
    known.dialer.layers = {0: slice(stages[0]), 1: slice(2 - stages[1], 2)}
    address = PeerAddress("p", "10.0.0.1", 5600, pp_size=2)
    assert known.peers.connect_all(address, 0) is None
    known.peers.step(0)
    if problem is not None:
        with pytest.raises(PeerError, match=problem):
            known.peers.connect_all(address, 0)
        return
    handles = known.peers.connect_all(address, 0)
    assert handles is not None
    assert [len(handle.layout.layers) for handle in handles] == list(stages)


def test_stages_and_ranks_together_are_bounded(known: Known) -> None:
    with pytest.raises(PeerError, match="at most 64"):
        known.peers.connect_all(PeerAddress("p", "10.0.0.1", 5600, pp_size=65), 0)
    assert not known.dialer.dialled


def test_handshakes_under_way_are_bounded(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "MAX_CONNECTING", 3)
    for number in range(3):
        known.peers.connect(PeerAddress(f"silent {number}", "10.0.0.1", 5600), 0)
    with pytest.raises(PeerError, match="3 handshakes are under way"):
        known.peers.connect(PeerAddress("p", "10.0.0.1", 5600), 0)
    known.peers.step(100)
    known.peers.step(101)
    assert known.meet("p", 102)


def test_handshakes_with_one_host_wait_for_their_turn_and_for_no_other_host(known: Known) -> None:
    everybody = known.dialer
    lost = PeerAddress("silent", "10.0.0.1", 5600, tp_size=64)
    assert known.peers.connect_all(lost, 0) is None
    assert known.peers.num_connecting == MAX_CONNECTING_THERE
    assert known.peers.connect(PeerAddress("p", "10.0.0.1", 5600), 0) is None
    assert len(everybody.dialled) == MAX_CONNECTING_THERE
    assert known.meet("p", host="10.0.0.2")
    known.peers.step(100)
    assert known.meet("p", 100)


def test_more_engines_on_one_host_than_have_a_turn_connect_in_two_rounds(known: Known) -> None:
    engines = [PeerAddress(f"p{i}", "10.0.0.1", 5600 + i) for i in range(MAX_CONNECTING_THERE + 8)]
    for met in (MAX_CONNECTING_THERE, len(engines)):
        for address in engines:
            known.peers.connect(address, 0)
        known.peers.step(0)
        assert known.peers.num_ready == met


def test_engines_are_bounded_and_the_one_left_alone_longest_makes_room(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "MAX_PEERS", 3)
    busy = known.meet("busy", 0)
    known.in_use.append(busy)
    for number in range(1, 6):
        known.meet(f"p{number}", number)
    assert sorted(known.agent.peers) == ["agent of busy", "agent of p4", "agent of p5"]
    known.in_use += [known.meet(name, 10) for name in ("p4", "p5")]
    with pytest.raises(PeerError, match="3 engines are in use"):
        known.meet("one more", 11)


def test_zero_is_never() -> None:
    raw = {"kv_connector": "DisaggConnector", "kv_connector_extra_config": {"engine_ttl": 0}}
    assert ConnectorConfig.from_kv_transfer_config(raw).engine_ttl == math.inf


ADDRESS = PeerAddress("p", "10.0.0.1", 5600)


def test_metadata_is_loaded_when_it_has_been_validated_and_not_before() -> None:
    validator = SlowValidator()
    known = acquainted(validator)
    for _ in range(3):
        assert known.peers.connect(ADDRESS, 0) is None
        known.peers.step(0)
    assert known.agent.peers == []
    assert validator.num_pending == 1
    validator.judge()
    known.peers.step(0)
    assert known.peers.connect(ADDRESS, 0) is not None
    assert known.agent.peers == ["agent of p"]


def test_refused_metadata_is_not_loaded_and_the_reason_is_reported() -> None:
    validator = SlowValidator()
    known = acquainted(validator)
    known.peers.connect(ADDRESS, 0)
    known.peers.step(0)
    validator.judge("malformed")
    known.peers.step(0)
    with pytest.raises(PeerError, match="malformed"):
        known.peers.connect(ADDRESS, 0)
    assert known.agent.peers == []


def test_a_verdict_that_does_not_come_is_waited_for_as_long_as_a_handshake() -> None:
    validator = SlowValidator()
    known = acquainted(validator)
    known.peers.connect(ADDRESS, 0)
    known.peers.step(0)
    known.peers.step(5)
    with pytest.raises(PeerError, match="no handshake within 5 s"):
        known.peers.connect(ADDRESS, 5)
    assert not validator.waiting[0].is_wanted
    assert known.dialer.dialled[0].is_closed


@pytest.mark.parametrize("is_mixed", [False, True])
def test_only_metadata_of_a_peer_with_the_secret_is_loaded_without_validation(
    is_mixed: bool,
) -> None:
    validator = SlowValidator()
    known = acquainted(validator, Access(SharedSecret.of(b"0123456789abcdef"), is_mixed))
    assert known.meet("holder").name == "agent of holder"
    known.peers.connect(PeerAddress("stock", "10.0.0.1", 5600), 0)
    known.peers.step(0)
    assert validator.num_pending == 1


@pytest.mark.parametrize("stock_hash", [None, "hash of stock"])
@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [("c1", "c1", True), ("c1", "c2", False), ("c1", None, True), (None, "c2", True)],
)
def test_engines_of_other_configurations_are_incompatible(
    ours: str | None, theirs: str | None, fits: bool, stock_hash: str | None
) -> None:
    """Engines of stock, and of our releases before the digest, have none."""
    own, other = (
        FACTORS if digest is None else {**FACTORS, CONFIGURATION: digest}
        for digest in (ours, theirs)
    )
    metadata = metadata_of("p", "agent of p", regions(), disagg_ext=EXTENSION_VERSION)
    payload = decode_payload(encode_payload(metadata, other, stock_hash))
    problem = compatibility_problem(own, payload, stock_hash)
    if fits:
        assert problem is None
    else:
        assert problem == "incompatible engines: configuration (c1 here, c2 there)"
