"""Recent requests of this process: the ids that came back, and the turns of each id.

Both are hints: without them the router reuses less, or asks engines to retain KV that no request
reads. They are not shared with other processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from random import getrandbits
from typing import NamedTuple

from router.conversations.entry import Prompt, PromptPrefix

MAX_SESSIONS = 8192
MAX_TURNS = 4  # of a session: a chat, its title, two sub-agents
MAX_MARKS = 8
MAX_SOURCES = 4096
# The more conversations of a kind were left, the fewer are retained on trial: one in 2 ** bits.
TRIAL_BITS, MAX_TRIAL_BITS = 2, 10


class StoredTurn(NamedTuple):
    """A turn that left an entry under `key`. Its prompt has `size` messages.

    `marks` are prefixes of its prompt, shortest first: the number of messages and their digest.
    """

    key: str
    size: int
    marks: tuple[tuple[int, str], ...]


class RecentSessions:
    """The ids that requests named recently, with the last turns of each, oldest first."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, tuple[StoredTurn, ...]] = OrderedDict()

    def note_request(self, session: str) -> bool:
        """Return True if the session had a request before this one."""
        is_known = session in self._sessions
        self._sessions.setdefault(session, ())
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return is_known

    def add(
        self, session: str, key: str, prompt: Prompt, earlier: Iterable[PromptPrefix] = ()
    ) -> None:
        """Note that the turn with this prompt left an entry under `key`.

        `earlier` are prefixes of the prompt that were prompts themselves.
        """
        turns = self._sessions.get(session)
        if turns is None or not prompt.asked:
            return
        own = {prompt.opening - 1, prompt.asked_before, prompt.answered, prompt.asked} - {0}
        known = {one.count: one.digest for one in earlier if one.count <= prompt.asked}
        known |= {count: prompt.digest_at(count) or "" for count in own}
        made = StoredTurn(key, prompt.asked, tuple(sorted(known.items())[-MAX_MARKS:]))
        rest = [one for one in turns if one.key != key]
        self._sessions[session] = (*rest, made)[-MAX_TURNS:]

    def find_other(self, session: str, prompt: Prompt) -> str | None:
        """Return the key of the turn that the prompt changes, where it extends no turn exactly.

        That is a turn of which the prompt repeats at least half. A prompt without answers in it may
        be a title request or a sub-agent, which begins a conversation of its own: it changes a turn
        only if it was a prompt before.
        """
        found, most = None, 0
        for turn in self._sessions.get(session, ()):
            common = _common(turn, prompt)
            if common >= most and 2 * common >= turn.size:
                found, most = turn.key, common
        return found if prompt.asked_before or most == prompt.asked else None

    def forget(self, session: str, key: str) -> None:
        """Note that the entry under `key` is taken."""
        turns = self._sessions.get(session)
        if turns:
            self._sessions[session] = tuple([one for one in turns if one.key != key])


def _common(turn: StoredTurn, prompt: Prompt) -> int:
    """Return the number of messages that the prompt is known to share with the turn's."""
    for count, digest in reversed(turn.marks):
        if prompt.digest_at(count) == digest:
            return count
    return 0


class ReturnTracker:
    """Counts conversations that were not continued, by source: the tenant, and the kind of id.

    If many conversations in a row were not continued, the next ones will not be either: a client
    sends a new id with each request, or asks single questions. Then few of them are retained, until
    one is continued.
    """

    def __init__(self) -> None:
        self._unreturned: OrderedDict[object, int] = OrderedDict()

    def note_new(self, source: object) -> None:
        self._unreturned[source] = self._unreturned.get(source, 0) + 1
        self._unreturned.move_to_end(source)
        if len(self._unreturned) > MAX_SOURCES:
            self._unreturned.popitem(last=False)

    def note_return(self, source: object) -> None:
        if self._unreturned.get(source):
            self._unreturned[source] = 0

    def may_return(self, source: object, limit: int) -> bool:
        """Return False if `limit` conversations in a row were not continued."""
        return self._unreturned.get(source, 0) < limit

    def is_worth_retaining(self, sources: Iterable[object], limit: int) -> bool:
        """Return False if `limit` conversations of a source in a row were not continued, but True
        now and then even so, by chance."""
        left = max([self._unreturned.get(source, 0) for source in sources])
        if left < limit:
            return True
        return not getrandbits(min(left.bit_length() + TRIAL_BITS, MAX_TRIAL_BITS))
