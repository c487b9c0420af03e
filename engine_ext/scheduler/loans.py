"""Loans: an engine reads the longest prefix of a prompt that another engine's prefix cache holds.

    borrower's scheduler half   LoanAsk   --> worker half (engine_ext/worker/loan_asks.py)
    borrower's worker           AskLoan(keys) --> holder's worker --> its scheduler half
    holder's scheduler half     the host finds and pins the blocks: a new loan, or one more reader
    holder's worker             grants the lease and the reader's horizon, then --> Loan(blocks)
    borrower                    READs, renews by Renew and confirms by Read, as for every lease

Keys name full blocks by all tokens up to their end, in the host's own way (`scheme`). Equal keys of
equal schemes mean equal KV, so the keys are the proof. The host finds only blocks that a finished
step has written.

Lending (`Loans`)
    none --ask--> lent --(Shortage, drain, new weights)--> revoked --+
                    +----------(read, declined, expired)-------------+--> reported: the host unpins

    The host owns the pin: it keeps the blocks under the loan's id, as those of a finished request,
    until the id comes in `TransferResults.finished_sending`. `Loans` owns which blocks are lent.
    The workers' lease tables own when a loan ends. The answer leaves after the grant, so no reader
    is faster than its lease. Readers of one prefix share a loan, and each has a horizon of its own.

    There are `MAX_LOANS` loans and `LOAN_SHARE` of the cache; a block in several loans counts once.
    A longer prefix is cut, and when nothing is left or found, the answer is a refusal. A request
    that lacks blocks revokes all loans first, and none is granted until it has some. The blocks are
    free when the readers have confirmed, and at the latest `LOAN_SECONDS` later, because no horizon
    is longer.

Borrowing (`Borrows`)
    NAMED --ask--> ASKED ---granted----> OFFERED --blocks--> READING --loaded--> OVER
      | ^            |                     |                   |
      v | ended      | refused, late       | no blocks         | failed
    FOLLOWING        +---------------------+-------------------+--> OVER, and computed

    NAMED      the request has `holders`, and the host has not looked at it yet
    FOLLOWING  another request is borrowing the blocks that this one lacks
    ASKED      the worker half asks the holders (engine_ext/worker/loan_asks.py) and reports once.
               Until then, and for `loan_timeout` and LATE_SECONDS at most, the host passes the
               request over
    OFFERED    the loan is a load of `Loads`, like a retained turn. The worker half renews its lease
    READING    as any load

    A request that follows another one looks again when that one has loaded or computes, because the
    host's own cache may hold the prefix then. It asks by itself if the other one takes too long.

    Nothing is borrowed for a request that loads KV from elsewhere, nor into a cache whose blocks
    depend on more than the tokens before them (windows, states, draft layers). The tensor ranks of
    an engine would each have to ask, so there may be only one.
"""

import enum
import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.orders import Decline, LeaseGrant, LoanAnswer, LoanAsk, Revoke, Untrack
from engine_ext.common.types import (
    LOAN_PREFIX,
    BlockIds,
    CacheGeometry,
    Clock,
    EngineIdentity,
    EngineRequest,
    Holder,
    LoanReport,
    LoanRequest,
    RemoteSource,
    TransferResults,
)
from engine_ext.scheduler.loadable_tokens import LoadableTokens
from engine_ext.scheduler.loads import Loads
from engine_ext.scheduler.orders import Orders
from engine_ext.scheduler.params import TransferRole
from engine_ext.scheduler.report_deadlines import AwaitedReports
from engine_ext.wire.notifications import MAX_KEYS

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

MAX_LOANS = 64
LOAN_SHARE = 0.125
LOAN_SECONDS = 10.0
"""The length of the lease from the grant and from each renewal."""
OFFER_SECONDS = 2.0
"""How long a loan waits for blocks of this engine before it is given back."""
LATE_SECONDS = 5.0
"""How long after `loan_timeout` a request waits for the worker half's report."""


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
        # A reader that asks again gets another loan: to a lease, one engine is one reader, so its
        # first request to confirm would end the loan of the others.
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


class PromptKeys(Protocol):
    """The host's way to name full blocks."""

    @property
    def scheme(self) -> str:
        """The name of the method that makes keys, with all that KV depends on besides tokens."""

    def keys_of(self, request: EngineRequest) -> Sequence[bytes]:
        """Return the keys of the full blocks of the request's tokens, in order. None are returned
        for a request whose blocks other engines cannot name."""


def may_borrow(geometry: CacheGeometry, identity: EngineIdentity) -> bool:
    """Return True if such an engine may borrow."""
    is_alone = identity.tp_size == identity.pp_size == 1
    sees_all = all(window is None for window in geometry.group_windows)
    is_plain = sees_all and not geometry.lookahead and not geometry.is_staged
    return geometry.may_load and is_alone and is_plain


class BorrowState(enum.Enum):
    NAMED = "named"
    FOLLOWING = "following"
    ASKED = "asked"
    OFFERED = "offered"
    READING = "reading"
    OVER = "over"


TIMED = (BorrowState.ASKED, BorrowState.OFFERED)
"""The states with a deadline."""
OPEN = (BorrowState.ASKED, BorrowState.OFFERED, BorrowState.READING)
"""The states of a request that another one may follow."""


@dataclass(slots=True)
class Borrow:
    """A request's loan, from its arrival to its end."""

    holders: tuple[Holder, ...]
    state: BorrowState = BorrowState.NAMED
    follows: str = ""
    """The request that this one follows, or has followed."""
    keys: tuple[bytes, ...] = ()
    needed: bytes = b""
    """The key of the last block that a loan must have to be worth it."""
    deadline: float = 0.0
    """The time at which the request waits no longer for the other one or for the report of its own
    loan, and at which an offered loan is given back."""
    num_tokens: int | None = None
    """The tokens that are being loaded, or were loaded: 0 if the loan has failed, None if the
    holders do not hold the prefix or none was asked."""
    lender: int = 0
    """The place of the engine that has granted a loan among the holders that were named."""


class Borrows:
    """One per engine. It writes the orders for the worker half into `orders`."""

    def __init__(
        self,
        orders: Orders,
        loads: Loads,
        loadable: LoadableTokens,
        config: ConnectorConfig,
        block_size: int,
        clock: Clock,
    ) -> None:
        self._orders = orders
        self._loads = loads
        self._loadable = loadable
        self._least = max(1, config.recompute_threshold)
        self._block_size = block_size
        self._clock = clock
        self._longest_ask = config.loan_timeout + LATE_SECONDS
        # The other request asks, waits for blocks, connects, reads, and awaits an answer.
        reading = OFFER_SECONDS + 3 * config.prefill_load_timeout
        self._longest_follow = self._longest_ask + reading
        self._prompt_keys: PromptKeys | None = None
        self._borrows: dict[str, Borrow] = {}
        self._num_timed = 0
        """Requests with a deadline."""

    def borrow_with(self, keys: PromptKeys) -> None:
        self._prompt_keys = keys

    def name(self, request_id: str, holders: tuple[Holder, ...]) -> None:
        """Note the engines that may hold the beginning of a request's prompt."""
        if self._prompt_keys is not None:
            self._borrows[request_id] = Borrow(holders)

    def waits(self, request: EngineRequest, num_computed_tokens: int) -> bool:
        """Return True while the request waits for a loan, its own or the one of a request with the
        same prefix. `num_computed_tokens` are in the host's own cache."""
        borrow = self._borrows.get(request.request_id)
        if borrow is None:
            return False
        if borrow.state is BorrowState.FOLLOWING and self._follows_no_longer(borrow):
            borrow.state = BorrowState.NAMED
        # Not when the request arrives: only now it is known what the host's own cache lacks, and a
        # request in a long queue pins no blocks of another engine.
        if borrow.state is BorrowState.NAMED:
            borrow.state = self._look(request, borrow, num_computed_tokens)
        return self.is_passed_over(request.request_id)

    def is_passed_over(self, request_id: str) -> bool:
        """Return True while the request waits for a loan's report, its own or another request's."""
        borrow = self._borrows.get(request_id)
        return borrow is not None and borrow.state in (BorrowState.ASKED, BorrowState.FOLLOWING)

    def _look(self, request: EngineRequest, borrow: Borrow, num_computed: int) -> BorrowState:
        """Ask the holders or follow another request, if it is worth it. Return the next state."""
        least = num_computed + self._least
        holders = tuple(one.address for one in borrow.holders if one.expected_tokens >= least)
        is_loaded = self._loads.is_open(request.request_id)
        if not holders or is_loaded or self._loadable.limit(request) < least:
            return BorrowState.OVER
        assert self._prompt_keys is not None
        borrow.keys = tuple(self._prompt_keys.keys_of(request)[:MAX_KEYS])
        if len(borrow.keys) * self._block_size < least:
            return BorrowState.OVER
        borrow.needed = borrow.keys[-(-least // self._block_size) - 1]
        # It follows once, so that refusals do not add up, and again only if the other request has
        # ended meanwhile.
        if borrow.follows not in self._borrows:
            borrow.follows = self._leader(borrow.needed)
            if borrow.follows:
                borrow.deadline = self._clock() + self._longest_follow
                return BorrowState.FOLLOWING
        scheme = self._prompt_keys.scheme
        ask = LoanAsk(request.request_id, holders, scheme, borrow.keys, least)
        self._orders.append(ask)
        self._num_timed += 1
        borrow.deadline = self._clock() + self._longest_ask
        return BorrowState.ASKED

    def _leader(self, needed: bytes) -> str:
        """Return a request that is borrowing the blocks up to this key, or an empty string."""
        for name, borrow in self._borrows.items():
            if borrow.needed == needed and borrow.state in OPEN:
                return name
        return ""

    def _follows_no_longer(self, borrow: Borrow) -> bool:
        other = self._borrows.get(borrow.follows)
        is_over = other is None or other.state not in OPEN
        return is_over or borrow.deadline <= self._clock()

    def _answered(self, report: LoanReport) -> None:
        """Offer the loan to the request. If the request has ended, or is another one under the same
        name, give the loan back."""
        borrow = self._borrows.get(report.request_id)
        is_asked = borrow is not None and borrow.state is BorrowState.ASKED
        if borrow is None or not is_asked or not self._fits(borrow, report):
            if borrow is not None and is_asked:
                self._num_timed -= 1
                borrow.state = BorrowState.OVER
                borrow.num_tokens = None if report.is_refused else 0
            if report.source is not None:
                self._give_back(report.request_id, report.source)
            return
        assert report.source is not None
        address = report.source.address
        borrow.lender = next((one.index for one in borrow.holders if one.address == address), 0)
        num_tokens = report.source.num_tokens or 0
        self._loads.offer(report.request_id, report.source, TransferRole.PREFILL, num_tokens, True)
        borrow.state, borrow.deadline = BorrowState.OFFERED, self._clock() + OFFER_SECONDS
        borrow.num_tokens = 0

    def _fits(self, borrow: Borrow, report: LoanReport) -> bool:
        """Return True if there is a loan, and it is for the tokens of this request."""
        if report.source is None:
            return False
        num_blocks = (report.source.num_tokens or 0) // self._block_size
        return borrow.keys[num_blocks - 1 : num_blocks] == (report.last_key,)

    def _give_back(self, request_id: str, source: RemoteSource) -> None:
        self._orders.append(Untrack(request_id))
        self._orders.append(Decline(source))

    def allocated(self, request_id: str, num_tokens: int) -> None:
        """Note that the request has blocks, and that so many tokens are loaded into them."""
        borrow = self._borrows.get(request_id)
        if borrow is not None and borrow.state is BorrowState.OFFERED:
            self._num_timed -= 1
            borrow.num_tokens = num_tokens
            borrow.state = BorrowState.READING if num_tokens > 0 else BorrowState.OVER

    def update(self, results: TransferResults) -> None:
        """Note which loads have ended, and which loans were granted or refused."""
        for request_id in results.finished_recving if self._borrows else ():
            borrow = self._borrows.get(request_id)
            if borrow is not None and borrow.state is BorrowState.READING:
                borrow.state = BorrowState.OVER
                if request_id in results.failed_recving:
                    borrow.num_tokens = 0
        for report in results.loan_reports:
            self._answered(report)

    def step(self) -> None:
        """Give back the loans that have waited for blocks too long, and give up those whose report
        has not come."""
        if not self._num_timed:
            return
        now = self._clock()
        for request_id, borrow in self._borrows.items():
            if borrow.state in TIMED and borrow.deadline <= now:
                is_offered = borrow.state is BorrowState.OFFERED
                self._end(request_id, borrow)
                if is_offered:
                    self._loads.drop(request_id)
                else:
                    borrow.num_tokens = 0
                    logger.warning("request %s: no report about its loan", request_id)

    def drop(self, request_id: str) -> None:
        """Give up the loan, unless it is being read: the caller drops the load."""
        borrow = self._borrows.get(request_id)
        if borrow is not None and borrow.state is not BorrowState.READING:
            self._end(request_id, borrow)

    def finish(self, request_id: str) -> dict[str, int]:
        """Note that the request has ended. Return the fields of its answer about the loan, which
        docs/wire-protocol.md describes."""
        borrow = self._borrows.pop(request_id, None)
        if borrow is None:
            return {}
        num_tokens = 0 if borrow.state is BorrowState.READING else borrow.num_tokens
        self._end(request_id, borrow)
        if num_tokens is None:
            return {}
        lender = {"lender": borrow.lender} if num_tokens else {}
        return {"borrowed_tokens": num_tokens, **lender}

    def _end(self, request_id: str, borrow: Borrow) -> None:
        if borrow.state is BorrowState.ASKED:
            self._orders.append(Untrack(request_id))
        self._num_timed -= borrow.state in TIMED
        borrow.state = BorrowState.OVER
