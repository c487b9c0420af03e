"""A stranger with a NIXL agent who knows the protocol and every answer that the engines gave.

Each attack is tried on engines without a secret, where it succeeds, and on engines that share one,
where nothing is read, nothing written and no block moved. The stranger may also have the NIXL
metadata of both engines, as if they had leaked: then no message of its counts all the same.
"""

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from engine_ext.common.access import OPEN, Access, SharedSecret, parse_networks
from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import CacheGeometry, FinishStatus, TransferResults
from engine_ext.layout.match import match_peer
from engine_ext.wire import notifications as wire
from engine_ext.wire.errors import CONNECTOR_VERSION, WireError
from engine_ext.wire.handshake import (
    AgentMetadata,
    HandshakePayload,
    decode_metadata,
    decode_payload,
    encode_payload,
)
from engine_ext.wire.listener import HandshakeServer
from engine_ext.worker.agent import NixlAgent, PeerHandle, TransferState
from engine_ext.worker.sealed import seal
from tests.integration.memory_engine import (
    BLOCK_SIZE,
    BLOCKS,
    LAYERS,
    TOKENS,
    Memory,
    contents,
    is_right,
    layer_regions,
)
from tests.integration.processes import wait_for
from tests.integration.stranger import GARBAGE, agent_called, forged, handshake, registration
from tests.integration.stranger import stranger as agent_of_a_stranger
from tests.unit.engine_ext.scheduler.fakes import Request, told

T = TypeVar("T")

BLOCK_BYTES = 1024
SECRET = Access(SharedSecret.of(b"what only the engines know"))
MODES = {"no secret": OPEN, "secret": SECRET}
GEOMETRY = CacheGeometry(BLOCK_SIZE, BLOCKS)
PROMPT_BLOCKS = (tuple(range(1, BLOCKS)),)


@dataclass
class Engines:
    prefiller: Memory
    decoder: Memory
    is_open: bool
    params: dict[str, Any]
    """What P answered for the request `p-1`, whose KV it holds."""

    @property
    def both(self) -> tuple[Memory, Memory]:
        return self.prefiller, self.decoder


class Stranger:
    """Memory of the same shape, an agent, and a side channel of its own."""

    def __init__(self, port: int, mode: str = "pull", host: str = "127.0.0.1") -> None:
        self.cache: npt.NDArray[np.uint8] = np.full((LAYERS, BLOCKS, BLOCK_BYTES), 66, np.uint8)
        self.regions = layer_regions(self.cache)
        self.agent = NixlAgent(self.regions, ["UCX"], 0)
        self.host, self.port = host, port
        factors = {
            "model": "bytes",
            "connector_version": str(CONNECTOR_VERSION),
            "transfer_mode": mode,
        }
        self.listener = HandshakeServer(
            host, port, {(0, 0): encode_payload(self.metadata(), factors)}
        )

    def metadata(self) -> AgentMetadata:
        return AgentMetadata(
            engine_id="stranger",
            agent_metadata=self.agent.metadata(),
            kv_caches_base_addr=[region.base_addr for region in self.regions],
            device_id=0,
            num_blocks=BLOCKS,
            block_lens=[BLOCK_BYTES] * LAYERS,
            block_strides=[BLOCK_BYTES] * LAYERS,
            kv_cache_layout=GEOMETRY.kv_cache_layout,
            block_size=BLOCK_SIZE,
            attn_backend_name=GEOMETRY.attn_backend_name,
            region_names=[region.name for region in self.regions],
        )

    def move(self, operation: str, payload: HandshakePayload) -> TransferState:
        """READ or WRITE of all the blocks of the engine whose handshake that is."""
        metadata = decode_metadata(payload)
        name = self.agent.add_remote(metadata.agent_metadata)
        layout = match_peer(GEOMETRY, self.regions, metadata)
        peer = PeerHandle(name, layout, self.agent.prepare(name, layout))
        batch = layout.to_read(PROMPT_BLOCKS, PROMPT_BLOCKS, 0, TOKENS, TOKENS)
        start = self.agent.start_read if operation == "READ" else self.agent.start_write
        transfer = start(peer, batch.local, batch.remote, b"")
        state = [TransferState.RUNNING]

        def has_ended() -> bool:
            state[0] = self.agent.poll(transfer)
            return state[0] is not TransferState.RUNNING

        wait_for(has_ended, f"the {operation} is over")
        return state[0]

    def polling(self, condition: Callable[[], T]) -> Callable[[], T]:
        """The condition, where it needs the stranger's NIXL to answer."""

        def poll() -> T:
            self.agent.notifications()
            return condition()

        return poll

    def has_read(self) -> bool:
        values = contents(1)[:, 1:, None]
        return bool((self.cache[:, 1:] == values).any(axis=2).all())

    def close(self) -> None:
        self.listener.close()
        self.agent.close()


@pytest.fixture(params=list(MODES))
def access(request: pytest.FixtureRequest) -> Access:
    return MODES[request.param]


@pytest.fixture(params=["pull"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


push = pytest.mark.parametrize("mode", ["push"], indirect=True)


@pytest.fixture
def ports(free_ports: Callable[[int], list[int]]) -> list[int]:
    return free_ports(3)


@pytest.fixture
def engines(access: Access, mode: Any, ports: list[int]) -> Iterator[Engines]:
    """P holds `p-1`'s KV for a reader; D holds none."""
    prefiller, decoder = (
        Memory(
            name,
            port,
            BLOCK_BYTES,
            # The stranger knows the request's id, which is all that he needs.
            ConnectorConfig(
                engine_id=name,
                transfer_mode=mode,
                access=access,
                trust_request_ids=True,
                # The validator's process may still be starting.
                handshake_timeout=60,
            ),
        )
        for name, port in zip(("p", "d"), ports, strict=False)
    )
    prefiller.fill(1)
    request = Request("p-1", {"do_remote_decode": True}, TOKENS, TOKENS)
    scheduler = prefiller.connector.scheduler
    scheduler.on_new_request(request)
    answer = scheduler.request_finished(request, PROMPT_BLOCKS, FinishStatus.LENGTH_CAPPED)
    prefiller.step()
    wait_for(lambda: prefiller.connector.worker.stats().leases_active, "the lease is granted")
    yield Engines(prefiller, decoder, access.secret is None, answer.kv_transfer_params or {})
    decoder.connector.shutdown()
    prefiller.connector.shutdown()


@pytest.fixture
def stranger(ports: list[int], mode: str) -> Iterator[Stranger]:
    made = Stranger(ports[2], mode)
    yield made
    made.close()


def leaked(engine: Memory) -> HandshakePayload:
    """What the handshake would tell an engine."""
    return decode_payload(engine.connector.worker.get_handshake_payload())


def tell(
    engine: Memory,
    messages: list[bytes],
    has_arrived: Callable[[], object],
    name: str = "stranger",
) -> None:
    """From an agent of that name."""
    agent = agent_called(name)
    target = agent.add_remote_agent(decode_metadata(leaked(engine)).agent_metadata)
    for message in messages:
        agent.send_notif(target, message)

    def arrived() -> object:
        agent.get_new_notifs()  # What an agent sends leaves when it polls.
        return has_arrived()

    wait_for(arrived, "the messages have arrived")


def has_ignored(engine: Memory, number: int) -> Callable[[], bool]:
    worker = engine.connector.worker
    return lambda: worker.stats().notifications_unsealed >= number


def name_of(engine: Memory) -> str:
    """NIXL's, of the engine's agent; anybody may call an agent of his so."""
    with agent_of_a_stranger() as agent:
        return agent.add_remote(decode_metadata(leaked(engine)).agent_metadata)


def load(engines: Engines, params: dict[str, Any], request_id: str = "d-1") -> bool:
    """D's request, up to where it waits for KV. False: it is computed locally."""
    request = Request(request_id, params, TOKENS)
    scheduler = engines.decoder.connector.scheduler
    scheduler.on_new_request(request)
    missing, _ = scheduler.get_num_new_matched_tokens(request, 0)
    if not missing:
        return False
    scheduler.update_state_after_alloc(request, (tuple(range(BLOCKS - 1, 0, -1)),), missing)
    engines.decoder.step()
    return True


def results_of(engine: Memory, stranger: Stranger | None = None) -> TransferResults:
    results = engine.connector.worker.get_transfer_results
    return wait_for(stranger.polling(results) if stranger else results, "something has ended")


def unmoved(engines: Engines) -> None:
    """P's KV is as it was, is still held, and is what D gets."""
    assert (engines.prefiller.cache == contents(1)[:, :, None]).all()
    assert not engines.prefiller.connector.worker.get_transfer_results()
    assert engines.prefiller.connector.worker.stats().leases_active == 1
    assert load(engines, engines.params)
    assert results_of(engines.decoder) == TransferResults(finished_recving=frozenset(["d-1"]))
    assert is_right(engines.decoder)


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_memory_is_open_to_who_shakes_hands_unless_there_is_a_secret(
    engines: Engines, stranger: Stranger, operation: str
) -> None:
    if not engines.is_open:
        with pytest.raises(WireError, match="requires the shared secret"):
            handshake(engines.params)
        assert not stranger.has_read()
        unmoved(engines)
        return
    assert stranger.move(operation, handshake(engines.params)) is TransferState.DONE
    if operation == "READ":
        assert stranger.has_read()
    else:
        assert (engines.prefiller.cache[:, 1:] == 66).all()


@pytest.mark.parametrize(
    "message", [wire.encode_read_done("p-1"), wire.encode_extension(wire.Read("p-1"))]
)
def test_a_forged_confirmation_ends_a_lease_unless_there_is_a_secret(
    engines: Engines, message: bytes
) -> None:
    prefiller = engines.prefiller
    if engines.is_open:
        tell(prefiller, [message], lambda: not prefiller.connector.worker.stats().leases_active)
        freed = results_of(prefiller).finished_sending
        assert freed == {"p-1"}
    else:
        tell(prefiller, [message], has_ignored(prefiller, 1))
        unmoved(engines)


FORGED = (
    *GARBAGE,
    *forged("p-1"),
    *forged("d-1"),
    seal(SharedSecret.of(b"what the stranger made up"), "stranger", "p", b"p-1:1"),
)


@pytest.mark.parametrize("mode", ["pull", "push"], indirect=True)
@pytest.mark.parametrize("access", [SECRET], ids=["secret"])
def test_no_forged_message_counts_where_there_is_a_secret_under_whatever_name_it_comes(
    engines: Engines, stranger: Stranger, mode: str
) -> None:
    hello = wire.encode_extension(wire.Hello(stranger.agent.metadata()))
    messages = [*FORGED, hello, wants_kv(stranger)]
    for victim, other in (engines.both, engines.both[::-1]):
        tell(victim, messages, has_ignored(victim, len(messages)))
        for_both = has_ignored(victim, 2 * len(messages))
        tell(victim, messages, for_both, name=name_of(other))
        assert victim.connector.worker.stats().notifications_unknown == 0
    assert stranger.agent.notifications() == []
    assert (stranger.cache == 66).all()
    if mode == "pull":
        unmoved(engines)
    else:
        assert not engines.prefiller.connector.worker.get_transfer_results()


def wants_kv(stranger: Stranger) -> bytes:
    """Write `p-1`'s KV into the stranger's memory."""
    return registration("p-1", "stranger", stranger.host, stranger.port, PROMPT_BLOCKS)


@push
def test_a_prefiller_writes_its_kv_to_a_stranger_who_asks_unless_there_is_a_secret(
    engines: Engines, stranger: Stranger
) -> None:
    prefiller = engines.prefiller
    asks = [wants_kv(stranger)]
    if engines.is_open:
        has_written = stranger.polling(lambda: prefiller.connector.worker.stats().pushes_ok)
        tell(prefiller, asks, has_written, stranger.agent.name)
        assert stranger.has_read()
    else:
        tell(prefiller, asks, has_ignored(prefiller, 1))
        assert prefiller.connector.worker.stats().handshakes_ok == 0
        assert (stranger.cache == 66).all()
        assert prefiller.connector.worker.stats().leases_active == 1


@push
def test_a_decoder_takes_a_forged_end_of_a_push_for_true_unless_there_is_a_secret(
    engines: Engines,
) -> None:
    """P has another name for the request and does not write; the stranger says that it has."""
    decoder = engines.decoder
    params = {**engines.params, "remote_request_id": "another", "transfer_id": "t"}
    assert load(engines, params)
    worker = decoder.connector.worker
    wait_for(lambda: worker.stats().handshakes_ok, "D has registered")
    done = [wire.encode_extension(wire.PushDone("d-1", generation)) for generation in range(1, 20)]
    name = name_of(engines.prefiller)
    if engines.is_open:
        tell(decoder, done, lambda: worker.stats().pushes_received, name)
        assert results_of(decoder) == TransferResults(finished_recving=frozenset(["d-1"]))
        assert not is_right(decoder)
    else:
        tell(decoder, done, has_ignored(decoder, len(done)), name)
        assert not worker.get_transfer_results()
        assert worker.stats().pushes_active == 1


def test_a_decoder_reads_what_a_stranger_has_for_it_unless_there_is_a_secret(
    engines: Engines, stranger: Stranger
) -> None:
    params = told_by(stranger, engines)
    assert load(engines, params)
    ended = results_of(engines.decoder, stranger)
    assert ended.finished_recving == {"d-1"}
    assert (not ended.failed_recving) == engines.is_open
    assert (engines.decoder.cache[:, 1:] == 66).all() == engines.is_open
    assert engines.decoder.cache.any() == engines.is_open


def told_by(stranger: Stranger, engines: Engines) -> dict[str, Any]:
    """Who can lie about where the blocks are can make the proof fit."""
    return told(
        engines.params,
        remote_engine_id="stranger",
        remote_host=stranger.host,
        remote_port=stranger.port,
    )


INSIDE = Access(peers=parse_networks("allowed_peers", ["127.0.0.1"]))


@pytest.mark.parametrize("access", [OPEN, INSIDE], ids=["anywhere", "allowed_peers"])
def test_an_address_outside_is_dialled_unless_allowed_peers_says_not(
    engines: Engines, ports: list[int], access: Access
) -> None:
    """The whole of 127/8 is this machine."""
    outside = Stranger(ports[2], host="127.0.0.2")
    params = told_by(outside, engines)
    try:
        is_followed = load(engines, params)
        assert is_followed == (access is OPEN)
        if is_followed:
            assert not results_of(engines.decoder, outside).failed_recving
            return
        assert (engines.decoder.cache == 0).all()
        unmoved(engines)
    finally:
        outside.close()


@push
@pytest.mark.parametrize("access", [OPEN, INSIDE], ids=["anywhere", "allowed_peers"])
def test_an_address_outside_is_pushed_to_unless_allowed_peers_says_not(
    engines: Engines, ports: list[int], access: Access
) -> None:
    outside = Stranger(ports[2], "push", host="127.0.0.2")
    prefiller = engines.prefiller
    stats = prefiller.connector.worker.stats
    try:
        asks = [wants_kv(outside)]
        has_ended = outside.polling(lambda: stats().pushes_ok or stats().pushes_failed)
        tell(prefiller, asks, has_ended, outside.agent.name)
        assert outside.has_read() == (access is OPEN)
        assert stats().pushes_failed == (access is INSIDE)
    finally:
        outside.close()


def test_ucxs_own_port_asks_for_no_secret_and_is_a_matter_for_the_network(
    ports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What docs/security.md warns of: over TCP, who reaches UCX's port and knows an address needs
    no metadata. The stranger's NIXL is told of an agent of its own, at the engine's port."""
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    before = listening_ports()
    engine = Memory(
        "p", ports[0], BLOCK_BYTES, ConnectorConfig(engine_id="p", num_threads=0, access=SECRET)
    )
    (its_port,) = listening_ports() - before - {ports[0]}
    engine.fill(1)
    monkeypatch.setenv("UCX_TLS", "tcp")
    before = listening_ports()
    decoy = Stranger(ports[1])
    (decoys_port,) = listening_ports() - before - {ports[1]}
    stranger = Stranger(ports[2])
    told = decoy.metadata()
    told.agent_metadata = told.agent_metadata.replace(
        decoys_port.to_bytes(2, "big"), its_port.to_bytes(2, "big")
    )
    its_address = engine.cache.ctypes.data
    for number, address in enumerate(told.kv_caches_base_addr):
        there = its_address + number * BLOCKS * BLOCK_BYTES
        told.kv_caches_base_addr[number] = there
        told.agent_metadata = told.agent_metadata.replace(
            address.to_bytes(8, "little"), there.to_bytes(8, "little")
        )
    try:
        assert stranger.move("READ", decode_payload(encode_payload(told, {}))) is TransferState.DONE
        assert stranger.has_read()
    finally:
        stranger.close()
        decoy.close()
        engine.connector.shutdown()


def listening_ports() -> set[int]:
    """TCP ports of this process, but for those of agents that nobody has any more."""
    gc.collect()
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    sockets = {os.readlink(link) for link in links if os.path.islink(link)}
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return {
        int(row[1].partition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    }
