"""Borrowing: a request loads the longest prefix of its prompt that another engine's cache holds.

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

A request asks when the host first looks at it: only then it is known what the host's own cache
lacks, and a request in a long queue pins no blocks of another engine. It asks once.

A request that follows another one looks again when that one has loaded or computes, because the
host's own cache may hold the prefix then. It follows once, so that refusals do not add up, and
again only if the other request's client has disconnected. It asks by itself if the other one takes
too long.

Nothing is borrowed for a request that loads KV from elsewhere, nor into a cache whose blocks depend
on more than the tokens before them (windows, states, draft layers). The tensor ranks of an engine
would each have to ask, so there may be only one.
"""

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import (
    CacheGeometry,
    Clock,
    Decline,
    EngineIdentity,
    EngineRequest,
    Holder,
    LoanAsk,
    LoanReport,
    RemoteSource,
    TransferResults,
    Untrack,
)
from engine_ext.scheduler.loadable_tokens import LoadableTokens
from engine_ext.scheduler.loads import Loads
from engine_ext.scheduler.orders import Orders
from engine_ext.scheduler.params import TransferRole
from engine_ext.wire.notifications import MAX_KEYS

logger = logging.getLogger(__name__)

OFFER_SECONDS = 2.0
"""How long a loan waits for blocks of this engine before it is given back."""
LATE_SECONDS = 5.0
"""How long after `loan_timeout` a request waits for the worker half's report."""


class PromptKeys(Protocol):
    """The host's way to name full blocks, as in `engine_ext.scheduler.loans.PrefixCache`."""

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
