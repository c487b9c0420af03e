"""Loans: other engines read the longest prefix that this engine's own prefix cache holds.

    reader's worker   AskLoan(keys)  -->  holder's worker  -->  scheduler half, between two steps
    scheduler half    the host finds and pins the blocks: a new loan, or one more reader of one
    holder's worker   grants the lease and the reader's horizon, then  -->  reader: Loan(blocks)
    reader            READs, renews by Renew and confirms by Read, as for every lease

    none --ask--> lent --(Shortage, drain, new weights)--> revoked --+
                    +----------(read, declined, expired)-------------+--> reported: the host unpins

Who owns what
    The host owns the pin: it keeps the blocks under the loan's id, as those of a finished request,
    until the id comes in `TransferResults.finished_sending`. This class owns which blocks are lent.
    The workers' lease tables own when a loan ends. The answer leaves after the grant, so no reader
    is faster than its lease. Readers of one prefix share a loan, and each has a horizon of its own.
    A reader that asks again gets another loan of the same blocks: to a lease, one engine is one
    reader, so its first request to confirm would end the others' loan.

Keys name full blocks by all tokens up to their end, in the host's own way (`scheme`). Equal keys of
equal schemes mean equal KV, so the keys are the proof. The host finds only blocks that a finished
step has written.

Bounds
    `MAX_LOANS` loans and `LOAN_SHARE` of the cache; a block that is in several loans counts once.
    A longer prefix is cut, and when nothing is left or found, the answer is a refusal. A request
    that lacks blocks revokes all loans first, and none is granted until it has some. The blocks are
    free when the readers have confirmed, and at the latest `LOAN_SECONDS` later, because no horizon
    is longer.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.types import (
    LOAN_PREFIX,
    BlockIds,
    LeaseGrant,
    LoanAnswer,
    LoanRequest,
    Revoke,
)
from engine_ext.scheduler.orders import Orders
from engine_ext.scheduler.report_deadlines import AwaitedReports

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

MAX_LOANS = 64
LOAN_SHARE = 0.125
LOAN_SECONDS = 10.0
"""The length of the lease from the grant and from each renewal."""


class PrefixCache(Protocol):
    """The host's prefix cache, as far as it lends."""

    @property
    def scheme(self) -> str:
        """The name of the method that makes keys, with the block size. The keys of different
        methods are never compared."""

    def find(self, keys: Sequence[bytes]) -> BlockIds:
        """Return the blocks of the longest known prefix, without holes, by KV-cache group, or ()
        without one. They stay in the cache until the host's next allocation."""

    def pin(self, loan_id: str, block_ids: BlockIds) -> None:
        """Keep the blocks that `find` returned until the loan is reported in
        `finished_sending`."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The key of a loan's last block, and all blocks by KV-cache group."""

    last_key: bytes
    block_ids: BlockIds


NOTHING = Prefix(b"", ())


class Loans:
    """One per engine. It writes the orders for the worker half into `orders`."""

    def __init__(
        self,
        orders: Orders,
        block_size: int,
        num_blocks: int,
        checksums: bool,
        awaited: AwaitedReports,
    ) -> None:
        self._orders = orders
        self._awaited = awaited
        self._checksums = checksums
        self._block_size = block_size
        self._max_blocks = int(LOAN_SHARE * num_blocks)
        self._cache: PrefixCache | None = None
        self._lent: dict[str, Prefix] = {}
        """The loans that readers may still join, by id."""
        self._readers: dict[str, set[str]] = {}
        """The readers of each of these."""
        self._ending: dict[str, Prefix] = {}
        """The revoked loans whose blocks are still pinned, by id."""
        self._pins: tuple[Counter[int], ...] = ()
        """By KV-cache group, how many loans have each pinned block."""
        self._count = 0
        self._run_id = secrets.token_hex(4)
        self._is_stopped = False
        self._lacks_room = False

    def __len__(self) -> int:
        return len(self._lent) + len(self._ending)

    def lend_from(self, cache: PrefixCache) -> None:
        self._cache = cache

    def ask(self, request: LoanRequest) -> None:
        """Answer a request, by a loan or by a refusal."""
        prefix, may_hold_more = self._find(request)
        loan_id = self._lend(request, prefix) if prefix.block_ids else ""
        if prefix.block_ids and not loan_id:
            prefix, may_hold_more = NOTHING, True
        num_tokens = len(prefix.block_ids[0]) * self._block_size if loan_id else 0
        where = prefix.block_ids, num_tokens, prefix.last_key, may_hold_more
        self._orders.append(LoanAnswer(request.reader, request.sequence, loan_id, *where))

    def make_room(self) -> bool:
        """Revoke all loans because a request of this engine lacks blocks, and refuse new ones until
        `room_found`. Return False if there was none."""
        self._lacks_room = True
        return self.revoke_all()

    def room_found(self) -> None:
        """Note that a request got blocks, or gave some back."""
        self._lacks_room = False

    def revoke_all(self) -> bool:
        """Revoke all loans. Return False if there was none."""
        revoked = bool(self._lent)
        self._orders.extend(map(Revoke, self._lent))
        self._ending.update(self._lent)
        self._lent.clear()
        self._readers.clear()
        return revoked

    def stop(self) -> None:
        """Revoke all loans and refuse new ones."""
        self._is_stopped = True
        self.revoke_all()

    def resume(self) -> None:
        self._is_stopped = False

    def reported(self, request_id: str) -> None:
        """Note that no engine reads the loan any more, so the host unpins its blocks."""
        prefix = self._lent.pop(request_id, None) or self._ending.pop(request_id, NOTHING)
        self._readers.pop(request_id, None)
        for pins, group in zip(self._pins, prefix.block_ids, strict=False):
            pins.subtract(group)
            for block in group:
                if not pins[block]:
                    del pins[block]

    def _find(self, request: LoanRequest) -> tuple[Prefix, bool]:
        """Return the prefix that may be lent, or NOTHING, and True if the cache may hold more."""
        cache = self._cache
        if cache is None or self._is_stopped or self._lacks_room:
            return NOTHING, True
        if request.scheme != cache.scheme:
            logger.warning(
                "no loan for agent %s: it names blocks by %.200r, this engine by %r. Engines lend "
                "to each other if block size, hash algorithm, PYTHONHASHSEED and release are equal",
                request.reader,
                request.scheme,
                cache.scheme,
            )
            return NOTHING, True
        found = cache.find(request.keys[: self._max_blocks])
        blocks = self._cut(found)
        num_found, count = (min(map(len, one), default=0) for one in (found, blocks))
        is_cut = count < num_found or num_found == self._max_blocks < len(request.keys)
        prefix = Prefix(request.keys[count - 1], blocks) if count else NOTHING
        return prefix, is_cut or request.is_cut

    def _lend(self, request: LoanRequest, prefix: Prefix) -> str:
        """Return the id of a loan of this prefix, a new one or one that the reader joins, or "" if
        there are too many loans."""
        for loan_id, lent in self._lent.items():
            if lent == prefix and request.reader not in (readers := self._readers[loan_id]):
                readers.add(request.reader)
                return loan_id
        if len(self) >= MAX_LOANS:
            return ""
        self._count += 1
        loan_id = f"{LOAN_PREFIX}{self._run_id}-{self._count:08}"
        blocks = prefix.block_ids
        assert self._cache is not None
        self._cache.pin(loan_id, blocks)
        self._awaited.keep(loan_id)
        self._pins = self._pins or tuple(Counter() for _ in blocks)
        for pins, group in zip(self._pins, blocks, strict=True):
            pins.update(group)
        self._lent[loan_id], self._readers[loan_id] = prefix, {request.reader}
        sums = blocks if self._checksums else ()
        self._orders.append(LeaseGrant(loan_id, LOAN_SECONDS, True, sums, LOAN_SECONDS))
        return loan_id

    def _cut(self, blocks: BlockIds) -> BlockIds:
        """Return the beginning of these blocks that may be pinned beside the others."""
        if not blocks:
            return ()
        excess = max(0, self._num_pinned(blocks) - self._max_blocks)
        num_blocks = min(map(len, blocks)) - -(-excess // len(blocks))
        return tuple(group[: max(0, num_blocks)] for group in blocks)

    def _num_pinned(self, more: BlockIds) -> int:
        """Return how many blocks are pinned together with these, each counted once."""
        pinned = self._pins or (Counter[int](),) * len(more)
        groups = zip(pinned, more, strict=True)
        return sum(len(pins) + sum(one not in pins for one in group) for pins, group in groups)
