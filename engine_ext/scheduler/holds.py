"""What is held of our own requests when they have finished: leases for a remote reader, turns for
the next one.

    expected --(finished with KV)--> held --(reported)--> gone
        +-----(finished without; a turn that does not fit)--> gone

A request's state is the container it is in.
"""

from dataclasses import dataclass

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.prefix_hashes import Keys, digest
from engine_ext.common.types import (
    BlockIds,
    CacheGeometry,
    EngineRequest,
    FinishDecision,
    LeaseCancel,
    LeaseGrant,
    PushOffer,
)
from engine_ext.scheduler.answers import Answers
from engine_ext.scheduler.orders import Orders
from engine_ext.scheduler.retain import RetainedTurns

NOT_KEPT = FinishDecision(False, None)


@dataclass(frozen=True, slots=True)
class ForReader:
    """A remote engine will read what we prefill."""

    transfer_id: str | None
    """The router's name for it, in push mode."""
    hands_over: bool
    """It goes on from what we have sampled."""
    num_tokens: int
    """Of the request as it came: its prompt, and what had been generated elsewhere."""


@dataclass(frozen=True, slots=True)
class ForNextTurn:
    """Our answer's KV is kept for the conversation's next turn."""

    is_firm: bool
    """The reader may be a stock engine, or may treat this engine as one. It cannot learn that the
    turn is gone, so the turn stays for its full time."""


class Holds:
    """One per engine. Writes into `orders` what the worker half is to do."""

    def __init__(
        self, orders: Orders, answers: Answers, config: ConnectorConfig, geometry: CacheGeometry
    ) -> None:
        self._orders = orders
        self._answers = answers
        self._config = config
        self._block_size = geometry.block_size
        self._has_state = geometry.has_state
        self._expected: dict[str, ForReader | ForNextTurn] = {}
        self._held: set[str] = set()
        self._leases: dict[str, None] = {}
        """The members of `_held` that are leases for a remote reader, the newest last."""
        self._keeps_turns = True
        self._turns = RetainedTurns(int(config.retain_share * geometry.num_blocks))

    @property
    def num_held(self) -> int:
        return len(self._held)

    def expect_reader(
        self, request: EngineRequest, transfer_id: str | None, hands_over: bool
    ) -> None:
        num_tokens = len(request.token_ids)
        self._expected[request.request_id] = ForReader(transfer_id, hands_over, num_tokens)
        self._orders.expects.append(request.request_id)
        if transfer_id is not None and self._config.transfer_mode == "push":
            self._orders.transfer_names.append((request.request_id, transfer_id))

    def expect_next_turn(self, request_id: str, is_firm: bool) -> None:
        self._expected[request_id] = ForNextTurn(is_firm)

    def is_expected(self, request_id: str) -> bool:
        """The request runs, and its KV is to be held when it has finished."""
        return request_id in self._expected

    def finish(
        self, request: EngineRequest, block_ids: BlockIds, has_kv: bool, attempt: int = 0
    ) -> FinishDecision:
        """`attempt`: of a `PushOffer`."""
        decision = self._finish(request, block_ids, has_kv, attempt)
        self._expected.pop(request.request_id, None)
        return decision

    def fail(self, request_id: str) -> FinishDecision:
        """`finish` raised, so nobody hears where the KV is: what is held by then ends at once."""
        expected = self._expected.pop(request_id, None)
        if any(grant.request_id == request_id for grant in self._orders.grants):
            self._held.add(request_id)
            self._orders.revokes.append(request_id)
            return FinishDecision(True, None)
        self.reported(request_id)
        if isinstance(expected, ForReader):
            self._orders.cancels.append(LeaseCancel(request_id, expected.transfer_id))
        return NOT_KEPT

    def revoke(self, request_id: str) -> bool:
        """True: it was held; it ends before its time."""
        if request_id not in self._held:
            return False
        self._orders.revokes.append(request_id)
        return True

    def give_up(self, request_id: str) -> None:
        """End a lease or a turn early. A firm turn stays."""
        if not self._turns.is_firm(request_id):
            self.revoke(request_id)

    def stop_keeping_turns(self) -> None:
        """No turn waits any more, but those that are firm. Leases run on, for their readers."""
        self._keeps_turns = False
        self.end_turns()

    def end_turns(self) -> bool:
        """True: none is left, for none was firm."""
        self._orders.revokes += self._turns.clear()
        return not len(self._turns)

    def revoke_oldest_turn(self) -> bool:
        """Revoke the oldest turn so that a request can use its blocks. Returns False if no turn
        may be revoked."""
        oldest = self._turns.remove_oldest()
        if oldest is not None:
            self._orders.revokes.append(oldest)
        return oldest is not None

    def revoke_newest_lease(self) -> str | None:
        """Revoke the newest lease and return its request id. None if there is no lease."""
        newest = next(reversed(self._leases), None)
        if newest is not None:
            del self._leases[newest]
            self._orders.revokes.append(newest)
        return newest

    def keep_turns(self) -> None:
        self._keeps_turns = True

    def reported(self, request_id: str) -> None:
        """The worker half holds it no more: the host frees its blocks."""
        self._held.discard(request_id)
        self._leases.pop(request_id, None)
        self._turns.remove(request_id)

    def _finish(
        self, request: EngineRequest, block_ids: BlockIds, has_kv: bool, attempt: int
    ) -> FinishDecision:
        expected = self._expected.get(request.request_id)
        keys = request.content_keys if has_kv and expected is not None else None
        match expected:
            case ForReader() as reader if keys is not None:
                return self._lease(request, keys, block_ids, reader, attempt)
            case ForReader(transfer_id):
                self._orders.cancels.append(LeaseCancel(request.request_id, transfer_id))
            case ForNextTurn(is_firm) if keys is not None:
                return self._retain(request, keys, block_ids, is_firm)
        return NOT_KEPT

    def _lease(
        self,
        request: EngineRequest,
        keys: Keys,
        block_ids: BlockIds,
        reader: ForReader,
        attempt: int,
    ) -> FinishDecision:
        self._held.add(request.request_id)
        self._leases[request.request_id] = None
        blocks = self._to_sum(request, block_ids)
        seconds = self._config.lease_duration
        self._orders.grants.append(LeaseGrant(request.request_id, seconds, block_ids=blocks))
        if self._config.transfer_mode == "push":
            num_tokens = request.num_computed_tokens
            # Who registers knows the request as it came, or all that is handed over to it; a state
            # is of all, whoever knows them.
            is_all = reader.hands_over or self._has_state
            known = num_tokens if is_all else min(num_tokens, reader.num_tokens)
            content = digest(request.token_ids, keys, known)
            name, transfer_id = request.request_id, reader.transfer_id
            self._orders.offers.append(
                PushOffer(name, block_ids, num_tokens, content, transfer_id, attempt)
            )
        answer = self._answers.of_prefill(request, keys, block_ids, reader.hands_over)
        return FinishDecision(True, answer)

    def _to_sum(self, request: EngineRequest, block_ids: BlockIds) -> BlockIds:
        return self._answers.listed(request, block_ids) if self._config.checksums else ()

    def _retain(
        self, request: EngineRequest, keys: Keys, block_ids: BlockIds, is_firm: bool
    ) -> FinishDecision:
        num_blocks = -(-request.num_computed_tokens // self._block_size)
        if not (self._keeps_turns and self._turns.fits(num_blocks)):
            return NOT_KEPT
        seconds = self._config.retain_seconds
        self._held.add(request.request_id)
        blocks = self._to_sum(request, block_ids)
        self._orders.grants.append(LeaseGrant(request.request_id, seconds, False, blocks))
        self._orders.revokes += self._turns.add(request.request_id, num_blocks, is_firm)
        answer = self._answers.of_turn(request, keys, block_ids, seconds, is_firm=is_firm)
        return FinishDecision(True, answer)
