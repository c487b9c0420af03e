"""Who waits for blocks at this engine, and who gives way, so that no two engines wait crosswise.

Theory of operation
-------------------
In push mode two engines hold blocks for one request: P keeps a finished prompt until D has room for
it, and D may take blocks, and register them, for a prompt that P has yet to compute. If D's cache
is full of the latter, and P's of the former, each waits for the other for ever. P cannot give way:
its answer is out, and nothing would compute the prompt again. D can: blocks that P has not written
hold nothing. The rules, all of them D's:

1. A registration for a prompt that P is not known to hold is *early*. While there is room, requests
   register early: P writes while it computes. Early registrations leave `EARLY_SHARE` of the cache.
2. A request that finds no room asks P (`AwaitPrompt`) and takes none before P holds its prompt. The
   host passes it over meanwhile. P answers when it holds the prompt, or never will.
3. A request that finds no room though P holds its prompt, or that needs no prompt of P's (one that
   was preempted, say), reclaims early registrations, the newest first, as many as it needs. P
   answers that it gives back, or has written by then. What was given back goes by rule 2.
4. Where no early registration is left and nothing runs, a turn that waits for the conversation's
   next request is revoked: a prefill engine computes that prompt. A request that runs alone and has
   no room to grow counts as one that finds no room.
5. A host that cannot take a parked request back (vLLM with its own scheduler class, which ends it
   or goes on reserving blocks for it) registers early only as long as the longest request there can
   be still fits beside.

Why nothing waits for ever: order what holds blocks by kind. (1) What runs at D ends by itself, or
preempts its own engine's requests. (2) Requests whose prompt P holds wait for (1), for WRITEs
between blocks that both sides have, and for answers to rule 3, which need no block anywhere; not
for early registrations, which are taken back, nor for turns. (3) Prompts at P wait for what P runs
and for P's finished prompts, which (2) fetches; D renews their leases meanwhile. (4) Early
registrations wait for (3), and nobody waits for them. Each kind waits for those above it only, at
whichever engine these are, so there is no cycle among any number of engines, retries included. A
registration is given back at most once, so nothing goes round either. A P or D that dies, leaves
or loses messages ends by its timeouts as ever.

The argument leaves out an engine that is P for one request and D for another at once: its decode
requests may wait behind prefills, in pull mode as well. For that, for an earlier version at the
other end (which cannot be asked), and in case that the argument is wrong, there is a backstop:
where somebody waits for room, nothing runs and nothing has moved for `STALLED_SECONDS`, the newest
registration is withdrawn or, where there is none and decode requests wait, the newest lease is
revoked. That request ends by its load-failure policy.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

EARLY_SHARE = 0.9
"""Of the cache, that early registrations may take; one alone may take more."""
SPARE_BLOCKS = 2
"""In each group, beside the longest request."""
LATE_SECONDS = 1.0
"""A request that is loaded starts within this, unless it lacks blocks."""
TURN_SECONDS = 1.0
"""Between two turns that are revoked, and before the first one."""
STALLED_SECONDS = 20.0


@dataclass(slots=True)
class EarlyBlocks:
    """How many blocks early registrations may take in all."""

    block_size: int
    num_blocks: int | None = None
    """Of the cache; None: unlimited."""
    num_groups: int = 1
    longest: int | None = None
    """Most tokens of one request; None: not known."""
    host_takes_back: bool = True
    """It puts a request whose load was given back among those that wait for blocks."""

    def of(self, num_tokens: int) -> int:
        """What a request of so many tokens takes at most, in all groups together."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def may_grow(self, taken: int, more: int) -> bool:
        if self.num_blocks is None:
            return True
        if self.host_takes_back:
            return not taken or taken + more <= EARLY_SHARE * self.num_blocks
        if self.longest is None:
            return False
        # A host has blocks of its own, and adds one to a request in each group now and then.
        beside = self.of(self.longest) + SPARE_BLOCKS * self.num_groups
        return taken + more + beside <= self.num_blocks


class Lack(enum.Enum):
    """What a request that the host asks about has been short of."""

    NOTHING = enum.auto()
    ROOM = enum.auto()
    """The host asked in an earlier step, and had no blocks for it."""
    ROOM_TO_GROW = enum.auto()
    """It ran alone, and was preempted for want of another block: computed again, it would be so
    again."""


class HostBlockSupply:
    """What a connector sees of its host's blocks: the host asks about a waiting request, and gives
    it blocks in the same step, or has none."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step = 0
        self._waiting: dict[str, int] = {}
        """Requests, and the step in which the host first asked about each."""
        self._loaded: dict[str, float] = {}
        """Since when their KV is there; the host has not started them yet."""
        self._running: set[str] = set()
        self._preempted: set[str] = set()
        """That they run again is no progress."""
        self._cramped: set[str] = set()
        """Those that were the last to run when they were preempted."""
        self._moved_at = clock()
        """When a request last took blocks or gave some up."""
        self._revoked_at = clock()

    def next_step(self) -> None:
        self._step += 1

    def ask(self, request_id: str) -> Lack:
        """The host asks about this request."""
        self.preempted(request_id)
        self._loaded.pop(request_id, None)
        first = self._waiting.setdefault(request_id, self._step)
        if request_id in self._cramped:
            self._cramped.discard(request_id)
            return Lack.ROOM_TO_GROW
        return Lack.ROOM if first < self._step else Lack.NOTHING

    def preempted(self, request_id: str) -> None:
        """Its blocks are others' by now. A host that does not say so asks about it again."""
        if request_id not in self._running:
            return
        self._running.discard(request_id)
        self._preempted.add(request_id)
        if not self._running:
            self._cramped.add(request_id)

    def pass_over(self, request_id: str) -> None:
        """It waits for something else: when that has come, its next try counts as the first."""
        self._waiting.pop(request_id, None)

    def admitted(self, request_id: str, *, runs: bool) -> None:
        """It has blocks. `runs`: and is computed from now on; else something is loaded first."""
        self._waiting.pop(request_id, None)
        self._loaded.pop(request_id, None)
        if runs:
            self._running.add(request_id)
        if request_id not in self._preempted:
            self.moved()

    def loaded(self, request_id: str) -> None:
        """Its KV is there, and it runs as soon as the host has whatever blocks it lacks."""
        self._loaded[request_id] = self._clock()

    def has_late_starter(self) -> bool:
        """Nothing runs, and the host has lacked blocks for one of those for a while: it does not
        ask about it."""
        if self._running or not self._loaded:
            return False
        return self._clock() - next(iter(self._loaded.values())) >= LATE_SECONDS

    def left(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._loaded.pop(request_id, None)
        self._running.discard(request_id)
        self._preempted.discard(request_id)
        self._cramped.discard(request_id)
        self.moved()

    def moved(self) -> None:
        """Blocks may have become free, or will without anybody's help."""
        self._moved_at = self._clock()

    def may_revoke_turn(self, lack: Lack) -> bool:
        """True once in a while, for as long as requests wait and nothing runs."""
        now = self._clock()
        if lack is Lack.ROOM_TO_GROW:
            return True
        if self._running or now - max(self._moved_at, self._revoked_at) < TURN_SECONDS:
            return False
        self._revoked_at = now
        return True

    def is_stalled(self) -> bool:
        """True once in a while."""
        if self._running or self._clock() - self._moved_at < STALLED_SECONDS:
            return False
        self.moved()
        return True
