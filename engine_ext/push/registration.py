"""Push mode on D: blocks that wait for P's WRITE. Each registration ends in exactly one report.

    connecting --> registered --(written)--> reported ok
        |              |  \\--(P failed)----> reported failed
        |              +--(deadline, abort)--> withdrawing --(P answered, or grace over)--> reported
        +--(no handshake)--> reported failed

Where P has more ranks than we do, several write: the registration has ended well when all have, and
badly when one has not and the others have said that they will not, or a grace has passed.
Blocks are given back only when P can no longer write into them: it said so, or a grace passed that
is longer than a transfer, a shorter one where P cannot be reached. A number tells one registration
of a request from the next, so that what comes late is not taken for an answer. P remembers how each
one ended: what was lost on the way is asked for again.
"""

import enum
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine_ext.base.config import ConnectorConfig
from engine_ext.base.types import (
    CacheGeometry,
    ConnectorStats,
    EngineIdentity,
    PushRegistration,
    PushWithdrawal,
)
from engine_ext.layout.plan import without_holes
from engine_ext.transfer.agent import Agent, AgentError, PeerHandle
from engine_ext.transfer.heartbeats import HeartbeatTracker
from engine_ext.transfer.peer import PeerError, Peers
from engine_ext.transfer.results import Results
from engine_ext.wire.notifications import (
    PushExtension,
    PushRegistered,
    Withdraw,
    encode_extension,
    encode_registration,
)

logger = logging.getLogger(__name__)


class State(enum.Enum):
    CONNECTING = "connecting"
    REGISTERED = "registered"
    WITHDRAWING = "withdrawing"


@dataclass(slots=True)
class Waiting:
    registration: PushRegistration
    generation: int
    deadline: float
    state: State = State.CONNECTING
    peers: dict[str, PeerHandle] = field(default_factory=dict)
    """Those that may still write, by name."""
    ranks: list[str] = field(default_factory=list)
    """The names of all ranks that we face, in their order, whether they have written or not."""
    is_spoilt: bool = False
    """One of them will not write."""
    ask_again_at: float = 0.0

    def replace(self, peers: list[PeerHandle]) -> None:
        """An engine that was met again may have come back under other names."""
        for name, peer in zip(self.ranks, peers, strict=True):
            if self.peers.pop(name, None) is not None:
                self.peers[peer.name] = peer
        self.ranks = [peer.name for peer in peers]


class Registrations:
    def __init__(
        self,
        agent: Agent,
        peers: Peers,
        beats: HeartbeatTracker,
        sequence: Iterator[int],
        results: Results,
        config: ConnectorConfig,
        geometry: CacheGeometry,
        identity: EngineIdentity,
        stats: ConnectorStats,
    ) -> None:
        self._agent = agent
        self._peers = peers
        self._beats = beats
        self._sequence = sequence
        self._results = results
        self._config = config
        self._geometry = geometry
        self._identity = identity
        self._stats = stats
        self._waiting: dict[str, Waiting] = {}
        self._declines: list[PushWithdrawal] = []

    @property
    def num_active(self) -> int:
        return len(self._waiting)

    @property
    def owes_messages(self) -> bool:
        """Something is to be said, and the handshake for it still runs."""
        return bool(self._declines)

    def register(self, registration: PushRegistration, now: float) -> None:
        deadline = now + self._config.push_deadline
        waiting = Waiting(registration, next(self._sequence), deadline)
        self._waiting[registration.request_id] = waiting

    def withdraw(self, withdrawal: PushWithdrawal, now: float) -> None:
        waiting = self._waiting.get(withdrawal.request_id)
        if waiting is None:
            self._declines.append(withdrawal)
        elif waiting.state is State.CONNECTING:
            self._end(waiting, ok=False)
            self._declines.append(withdrawal)
        elif waiting.state is State.REGISTERED:
            self._withdraw(waiting, now)

    def written(self, request_id: str, sender: str, generation: int | None = None) -> bool:
        """That agent's WRITE has landed. False: for no registration that waits for it."""
        waiting = self._find(request_id, sender, generation)
        if waiting is None:
            return False
        self._settle(waiting, sender)
        return True

    def failed(
        self, request_id: str, sender: str, generation: int, reason: str, now: float
    ) -> None:
        waiting = self._find(request_id, sender, generation)
        if waiting is None:
            return
        if waiting.state is not State.WITHDRAWING:
            logger.warning("request %s: P will not write: %.200s", request_id, reason)
        waiting.is_spoilt = True
        self._settle(waiting, sender)
        if waiting.peers and waiting.state is State.REGISTERED:
            self._withdraw(waiting, now)

    def _settle(self, waiting: Waiting, sender: str) -> None:
        del waiting.peers[sender]
        if not waiting.peers:
            self._end(waiting, ok=not waiting.is_spoilt)

    def step(self, now: float) -> None:
        for waiting in list(self._waiting.values()):
            try:
                self._advance(waiting, now)
            except (PeerError, AgentError) as error:
                logger.warning("request %s: %s", waiting.registration.request_id, error)
                self._end(waiting, ok=False)
            except Exception:
                logger.exception("request %s", waiting.registration.request_id)
                self._end(waiting, ok=False)
        declines, self._declines = self._declines, []
        for withdrawal in declines:
            self._say_decline(withdrawal, now)

    def _advance(self, waiting: Waiting, now: float) -> None:
        address = waiting.registration.target.address
        if waiting.state is State.CONNECTING:
            self._register(waiting, now)
        elif waiting.state is State.WITHDRAWING and waiting.deadline <= now:
            self._end(waiting, ok=False)
        elif waiting.state is State.WITHDRAWING:
            self._ask_again(waiting, now)
        elif waiting.deadline <= now:
            logger.warning("request %s: P has not written", waiting.registration.request_id)
            self._withdraw(waiting, now)
        elif self._beats.silence(address, now) >= self._config.silence_timeout:
            self._lose(waiting, "P is silent", now)
        else:
            self._ask_again(waiting, now)

    def _register(self, waiting: Waiting, now: float) -> None:
        address = waiting.registration.target.address
        peers = self._peers.connect_all(address, now)
        if peers is None:
            return
        waiting.ranks = [peer.name for peer in peers]
        waiting.ask_again_at = now + self._config.heartbeat_interval
        message = encode_registration(self._message(waiting))
        try:
            for peer in peers:
                self._agent.notify(peer.name, message)
                waiting.state = State.REGISTERED
                waiting.peers[peer.name] = peer
        except AgentError:
            self._peers.forget(address)
            if not waiting.peers:
                raise
            waiting.is_spoilt = True
            self._withdraw(waiting, now)

    def _ask_again(self, waiting: Waiting, now: float) -> None:
        """The same message once more, to peers that remember what they answered."""
        speaks = any(peer.has_extension for peer in waiting.peers.values())
        if waiting.ask_again_at > now or not speaks:
            return
        try:
            peers = self._peers.connect_all(waiting.registration.target.address, now)
        except PeerError as error:
            self._lose(waiting, str(error), now)
            return
        if peers is not None:
            waiting.ask_again_at = now + self._config.heartbeat_interval
            waiting.replace(peers)
            self._ask(waiting)

    def _ask(self, waiting: Waiting) -> None:
        question = self._question(waiting)
        is_well = True
        for peer in [peer for peer in waiting.peers.values() if peer.has_extension]:
            try:
                self._agent.notify(peer.name, question)
            except AgentError as error:
                logger.warning("request %s: %s", waiting.registration.request_id, error)
                is_well = False
        if not is_well:
            self._peers.forget(waiting.registration.target.address)

    def _question(self, waiting: Waiting) -> bytes:
        if waiting.state is State.REGISTERED:
            return encode_registration(self._message(waiting))
        target = waiting.registration.target
        return encode_extension(
            Withdraw(
                waiting.registration.request_id,
                waiting.generation,
                target.remote_request_id,
                target.transfer_id,
            )
        )

    def _lose(self, waiting: Waiting, problem: str, now: float) -> None:
        """P cannot be reached; what it has under way ends in the grace."""
        logger.warning("request %s: %s", waiting.registration.request_id, problem)
        if waiting.state is State.REGISTERED:
            self._withdraw(waiting, now)
        waiting.deadline = min(waiting.deadline, now + self._config.withdraw_grace)
        self._peers.forget(waiting.registration.target.address)

    def _withdraw(self, waiting: Waiting, now: float) -> None:
        waiting.state = State.WITHDRAWING
        waiting.deadline = now + self._config.write_bound
        waiting.ask_again_at = now
        self._ask_again(waiting, now)

    def _say_decline(self, withdrawal: PushWithdrawal, now: float) -> None:
        """Nothing was registered, but P need not keep the blocks."""
        target = withdrawal.target
        message = Withdraw(withdrawal.request_id, 0, target.remote_request_id, target.transfer_id)
        try:
            peers = self._peers.connect_all(target.address, now)
        except PeerError as error:
            logger.warning("engine %s was not told: %s", target.address.engine_id, error)
            return
        if peers is None:
            self._declines.append(withdrawal)
        for peer in peers or ():
            self._tell(peer, message)

    def _tell(self, peer: PeerHandle, message: Withdraw) -> None:
        """Stock has no word for it."""
        if not peer.has_extension:
            return
        try:
            self._agent.notify(peer.name, encode_extension(message))
        except AgentError as error:
            logger.warning("%s was not told: %s", peer.name, error)

    def _message(self, waiting: Waiting) -> PushRegistered:
        registration, target = waiting.registration, waiting.registration.target
        first = registration.first_token // self._geometry.block_size
        last = -(-registration.last_token // self._geometry.block_size)
        return PushRegistered(
            request_id=registration.request_id,
            decode_engine_id=self._identity.engine_id,
            decode_host=self._identity.host,
            decode_port=self._identity.port,
            decode_tp_size=self._identity.tp_size,
            local_block_ids=without_holes(
                tuple(ids[first:last] for ids in registration.local_block_ids),
                self._geometry.group_windows,
            ),
            remote_engine_id=target.address.engine_id,
            remote_host=target.address.host,
            remote_port=target.address.port,
            remote_tp_size=target.tp_size,
            remote_pp_size=target.pp_size,
            transfer_id=target.transfer_id,
            disagg=PushExtension(
                generation=waiting.generation,
                first_token=registration.first_token,
                last_token=registration.last_token,
                digest=registration.digest,
                remote_request_id=target.remote_request_id,
                tp_rank=self._geometry.tp_rank,
            ),
        )

    def _find(self, request_id: str, sender: str, generation: int | None) -> Waiting | None:
        waiting = self._waiting.get(request_id)
        if waiting is None or sender not in waiting.peers:
            return None
        if generation is None and waiting.peers[sender].has_extension:
            return None
        return waiting if generation in (None, waiting.generation) else None

    def _end(self, waiting: Waiting, *, ok: bool) -> None:
        del self._waiting[waiting.registration.request_id]
        if ok:
            self._stats.pushes_received += 1
        else:
            self._stats.pushes_missed += 1
        self._results.received(waiting.registration.request_id, ok=ok)
