"""Where every live sequence, and every block that outlives one, is.

waiting ──────────────> running ──────> finished
   │                    ^     │            │ a remote still reads its blocks
   v                    │     v            v
 parked ─────────────> loaded waiting    delayed ──> freed
   │ aborted
   v
orphaned ──> freed when the load has ended
"""

from collections import Counter, deque
from collections.abc import Iterator

from engine_ext.reference.block_manager import BlockManager, require
from engine_ext.reference.sequence import Sequence


class Queues:
    """The scheduler changes them; others read."""

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        """Holds no blocks. First come, first served; the preempted come first."""
        self.parked: dict[str, Sequence] = {}
        """Remote KV is on its way into their blocks."""
        self.loaded: deque[Sequence] = deque()
        """Remote KV has arrived."""
        self.running: list[Sequence] = []
        """In order of admission."""
        self.orphaned: dict[str, list[int]] = {}
        """Blocks of requests aborted while a load may still write into them."""
        self.delayed: dict[str, list[int]] = {}
        """Blocks of finished requests that a remote still reads; two may share a block."""

    def live(self) -> Iterator[Sequence]:
        yield from self.waiting
        yield from self.parked.values()
        yield from self.loaded
        yield from self.running

    def find(self, request_id: str) -> Sequence | None:
        return next((seq for seq in self.live() if seq.request_id == request_id), None)

    def knows(self, request_id: str) -> bool:
        """Whether a transfer report may name this id."""
        has_blocks = request_id in self.orphaned or request_id in self.delayed
        return has_blocks or self.find(request_id) is not None

    def remove(self, seq: Sequence) -> None:
        if self.parked.pop(seq.request_id, None) is not None:
            return
        for queue in (self.running, self.loaded, self.waiting):
            if seq in queue:
                queue.remove(seq)
                return

    def check_integrity(self, blocks: BlockManager) -> None:
        """Raises IntegrityError."""
        ids = Counter(seq.request_id for seq in self.live())
        ids.update([*self.orphaned, *self.delayed])
        require(all(count == 1 for count in ids.values()), "a request is in two places")
        for seq in self.waiting:
            require(not seq.block_ids, f"{seq.request_id} waits and holds blocks")
            require(seq.num_computed_tokens == 0, f"{seq.request_id} waits and has KV")
        for seq in self.live():
            room = len(seq.block_ids) * blocks.block_size
            require(seq.num_computed_tokens <= room, f"{seq.request_id} has KV without blocks")
        held = [seq.block_ids for seq in self.live()]
        blocks.check_integrity([*held, *self.orphaned.values(), *self.delayed.values()])
