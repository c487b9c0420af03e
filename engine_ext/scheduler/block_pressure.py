"""Which requests wait for blocks at a decode engine, and which give blocks up, so that two engines
never wait for each other.

Theory of operation
-------------------
In push mode two engines hold blocks for one request. P keeps a finished prompt until D has room for
it. D may take blocks, and register them, for a prompt that P has yet to compute. If D's cache is
full of such blocks and P's cache is full of finished prompts, each waits for the other for ever.
P cannot give way: it has sent its answer, and nothing would compute the prompt again. D can give
way: blocks that P has not written hold nothing. All rules are therefore D's:

1. A registration for a prompt that P is not known to hold is *early*. While there is room, requests
   register early, so that P writes while it computes. Early registrations leave a part of the
   cache free (`EARLY_SHARE`).
2. A request that finds no room asks P (`AwaitPrompt`) and takes no blocks before P holds its
   prompt. The host skips it meanwhile. P answers when it holds the prompt, or never will.
3. A request that finds no room although P holds its prompt, or that needs no prompt of P (one that
   was preempted, say), reclaims early registrations, the newest first, as many as it needs. P
   answers that it gives them back, or that it has written by then. A request whose blocks were
   given back follows rule 2.
4. If no early registration is left and nothing has moved for TURN_SECONDS, a turn that is retained
   for the next request of its conversation is revoked, also while other requests run: a prefill
   engine will compute that prompt. A request that runs alone and has no room to grow counts as one
   that finds no room.
5. Some hosts cannot take a parked request back (vLLM with its own scheduler class ends it, or keeps
   blocks reserved for it). Such a host registers early only as long as the longest possible request
   still fits beside.

Why nothing waits for ever: sort what holds blocks by kind. (1) Requests that run at D end by
themselves, or preempt requests of their own engine. (2) Requests whose prompt P holds wait for (1),
for WRITEs between blocks that both sides have, and for answers to rule 3, which need no block
anywhere. They do not wait for early registrations, which are reclaimed, nor for turns. (3) Prompts
at P wait for what P runs and for P's finished prompts, which (2) fetches; D renews their leases
meanwhile. (4) Early registrations wait for (3), and nothing waits for them. Each kind waits only
for the kinds above it, at whichever engine, so there is no cycle among any number of engines,
retries included. A registration is given back at most once, so there is no livelock. A P or D that
dies, leaves or loses messages ends by its timeouts.

The argument does not cover an engine that is P for one request and D for another at once: its
decode requests may wait behind prefills, in pull mode as well. For that case, for an earlier
version at the other end (which cannot be asked), and in case the argument is wrong, there is a
backstop. If a request waits for room, nothing runs and nothing has moved for `STALLED_SECONDS`, the
newest registration is withdrawn; if there is none and decode requests wait, the newest lease is
revoked. That request ends by its load-failure policy.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

EARLY_SHARE = 0.9
"""The share of the cache that early registrations may take. A single one may take more."""
SPARE_BLOCKS = 2
"""Blocks in each group, beside the longest request."""
LATE_SECONDS = 1.0
"""A loaded request starts within this time, unless it lacks blocks."""
TURN_SECONDS = 1.0
"""The least time between two revoked turns, and before the first one."""
STALLED_SECONDS = 20.0


@dataclass(slots=True)
class EarlyBlockLimit:
    """How many blocks early registrations may take in all."""

    block_size: int
    num_blocks: int | None = None
    """Blocks of the cache, or None for no limit."""
    num_groups: int = 1
    longest: int | None = None
    """The most tokens of one request, or None if that is not known."""
    host_takes_back: bool = True
    """The host queues a request whose blocks were given back for new blocks."""

    def of(self, num_tokens: int) -> int:
        """Return the most blocks that a request of so many tokens takes, in all groups together."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def may_grow(self, taken: int, more: int) -> bool:
        if self.num_blocks is None:
            return True
        if self.host_takes_back:
            return not taken or taken + more <= EARLY_SHARE * self.num_blocks
        if self.longest is None:
            return False
        # A host uses blocks of its own, and sometimes adds one to a request in each group.
        beside = self.of(self.longest) + SPARE_BLOCKS * self.num_groups
        return taken + more + beside <= self.num_blocks


class Shortage(enum.Enum):
    """What a request that the host asks about lacked before."""

    NONE = enum.auto()
    BLOCKS = enum.auto()
    """The host asked in an earlier step and had no blocks for the request."""
    BLOCKS_TO_GROW = enum.auto()
    """The request ran alone and was preempted for lack of another block. If it is computed again,
    the same happens again."""


class HostBlockSupply:
    """The host's free blocks, as far as a connector can see them: the host asks about a waiting
    request and gives it blocks in the same step, or has none."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step = 0
        self._waiting: dict[str, int] = {}
        """Waiting requests, with the step in which the host first asked about each."""
        self._loaded: dict[str, float] = {}
        """Loaded requests that the host has not started, with the time of the load's end."""
        self._running: set[str] = set()
        self._preempted: set[str] = set()
        """Preempted requests: it is no progress when they run again."""
        self._preempted_alone: set[str] = set()
        """Requests that were the last to run when they were preempted."""
        self._moved_at = clock()
        """When a request last took blocks or freed some."""
        self._revoked_at = clock()

    def next_step(self) -> bool:
        """Return True if nothing runs, and the host has lacked blocks for a loaded request for
        LATE_SECONDS. The host does not ask about such a request."""
        self._step += 1
        if self._running or not self._loaded:
            return False
        return self._clock() - next(iter(self._loaded.values())) >= LATE_SECONDS

    def ask(self, request_id: str) -> Shortage:
        """Note that the host asks about this request. Return what it lacked before."""
        self.preempted(request_id)
        self._loaded.pop(request_id, None)
        first = self._waiting.setdefault(request_id, self._step)
        if request_id in self._preempted_alone:
            self._preempted_alone.discard(request_id)
            return Shortage.BLOCKS_TO_GROW
        return Shortage.BLOCKS if first < self._step else Shortage.NONE

    def preempted(self, request_id: str) -> None:
        """Note that the request has lost its blocks. A host that does not report this asks about it
        again."""
        if request_id not in self._running:
            return
        self._running.discard(request_id)
        self._preempted.add(request_id)
        if not self._running:
            self._preempted_alone.add(request_id)

    def pass_over(self, request_id: str) -> None:
        """Note that the request waits for something else. Its next attempt counts as the first."""
        self._waiting.pop(request_id, None)

    def admitted(self, request_id: str, *, runs: bool) -> None:
        """Note that the request has blocks. `runs`: it is computed from now on, and not loaded."""
        self._waiting.pop(request_id, None)
        self._loaded.pop(request_id, None)
        if runs:
            self._running.add(request_id)
        if request_id not in self._preempted:
            self.moved()

    def loaded(self, request_id: str) -> None:
        """Note that the KV is loaded. The request runs as soon as the host has the blocks it
        lacks."""
        self._loaded[request_id] = self._clock()

    def left(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._loaded.pop(request_id, None)
        self._running.discard(request_id)
        self._preempted.discard(request_id)
        self._preempted_alone.discard(request_id)
        self.moved()

    def moved(self) -> None:
        """Note that blocks may have become free, or will without any help."""
        self._moved_at = self._clock()

    def may_revoke_turn(self, shortage: Shortage) -> bool:
        """Return True every TURN_SECONDS while requests wait and nothing moves."""
        now = self._clock()
        if shortage is Shortage.BLOCKS_TO_GROW:
            return True
        if now - max(self._moved_at, self._revoked_at) < TURN_SECONDS:
            return False
        self._revoked_at = now
        return True

    def is_stalled(self) -> bool:
        """Return True every STALLED_SECONDS while nothing runs or moves."""
        if self._running or self._clock() - self._moved_at < STALLED_SECONDS:
            return False
        self.moved()
        return True
