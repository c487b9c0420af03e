"""The resume buffer: what a client has of a stream, so that another decode engine can resume it.

A decode engine dies, freezes, is stopped, or runs out of KV blocks in mid-stream; another one then
continues the stream after the tokens that the client has. The router knows these tokens from the
engine. A capable decode engine that is asked (`tell_token_ids`) puts a comment into each event:

    : token_ids BwAACAAA
    data: {"id": ...}

which has the ids of the event's tokens, in the form of the field `begun`: three bytes for each, in
base64, so that pieces can be concatenated. The comment is removed on the way to the client.

An event with a finish reason waits for the end of the stream, with all that follows: the finish
reason is wrong if the engine is being stopped, and it is `cache_threshold` if the engine has no
room for the rest of the answer and asks for another engine.

Of a non-streamed answer that a decode engine has returned, the buffer holds what the engine
reported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from router.fleet.engine import Engine
from router.http_client.answer_limits import MemoryBudget
from router.http_client.engine_answer import AnswerTap
from router.http_client.sse import (
    DONE,
    GAP,
    MAX_EVENT_BYTES,
    comment_lines,
    end_of_last_event,
    events_in,
)
from router.openai.answers import (
    ERROR_KEY,
    FINISH_REASON,
    TOKEN_ID_CHARS,
    GeneratedTokens,
    choices_of,
    ends_inside_event,
    error_in,
    parse_object,
)
from router.proxy.internal_fields import events_without_fields
from router.proxy.kv_params import PROMPT_IDS, KvParams, with_field

# Which ids an engine is asked for: the prompt's, too, unless they are known.
OUTPUT, ALL = b'"output"', b'"all"'
COMMENT = comment_lines(rb"(prompt_)?token_ids")
COMMENT_NAME = b"token_ids "
IDS = re.compile(rb"[A-Za-z0-9+/]*")
# How most blocks begin: with ids, and a chunk.
USUAL_BLOCK = re.compile(rb': token_ids ((?:[A-Za-z0-9+/]{4})*)\ndata: \{"id"')
PREEMPTED = re.compile(b'"stop_reason"' + GAP + b'"preempted"')
# The `resume_cause` of a stream that goes back to the drained engine that it has left.
RETURNED = "returned"
FAILED = frozenset((b"abort", b"error"))
REJECTION = b"cache_threshold"
ID = re.compile(rb'\{\s*"id"\s*:\s*("[^"\\]*")')
CREATED = re.compile(rb'"created"\s*:\s*\d+')
# From a finish reason on. The params of a turn are among them, and grow with its prompt.
MAX_ENDING_BYTES = MAX_EVENT_BYTES


class ResumeBuffer:
    """An AnswerTap that records a stream. It stands before the tap of a turn, if there is one, and
    must be closed.

    `is_full`: not everything could be recorded. `is_cut`: the engine ended the stream before the
    answer's end, perhaps with the event `error`. `is_preempted`: it did so for lack of KV blocks.
    `num_resumes`: how often another engine was to continue. `resume_cause`: why one is to, until it
    does. `last` is the end of the stream, which the owner of the stream sends. `left`: the drained
    engine that the stream left last.
    """

    __slots__ = ("_created", "_ending", "_id", "_is_renaming", "_max_resumes", "_memory",
                 "_output_ids", "_prompt_ids", "_renamings", "_unsent", "error", "first_byte",
                 "inner", "is_cut", "is_full", "is_preempted", "last", "left", "num_resumes",
                 "renders", "resume_cause")  # fmt: skip
    by_request: ClassVar[bool] = False
    """Another engine gets a request like the client's, and no `begun` (`id_resume`,
    `replay_buffer`)."""

    def __init__(self, memory: MemoryBudget, renders: Mapping[str, str], max_resumes: int) -> None:
        self.renders = renders
        self.num_resumes, self.resume_cause = 0, ""
        self.first_byte: float | None = None
        self.left: Engine | None = None
        self.inner: AnswerTap | None = None
        self.is_full = self.is_cut = self.is_preempted = False
        self.error = self.last = b""
        self._max_resumes = max_resumes
        self._memory = memory
        # In base64.
        self._prompt_ids, self._output_ids = b"", bytearray()
        # Further fields of tokens that no client has; None for a stream, of which it has all.
        self._unsent: bytes | None = None
        # The stream from the finish reason on.
        self._ending: bytearray | None = None
        # As the first engine wrote them, and what replaces those of later engines.
        self._id = self._created = b""
        self._renamings: list[tuple[bytes, bytes]] = []
        self._is_renaming = True

    @property
    def num_tokens(self) -> int:
        """How many tokens the client has."""
        return len(self._output_ids) // TOKEN_ID_CHARS

    @property
    def num_all_tokens(self) -> int:
        """How many tokens the prompt and the answer so far have."""
        return len(self._prompt_ids) // TOKEN_ID_CHARS + self.num_tokens

    @property
    def can_resume(self) -> bool:
        """True if another engine may be asked to continue the answer, and knows enough for it."""
        return self.is_complete and self.num_resumes < self._max_resumes

    @property
    def is_complete(self) -> bool:
        """True if all tokens so far are known, and the answer has not ended."""
        is_known = bool(self._prompt_ids and self._output_ids) and not self.is_full
        return is_known and not self.last

    def note_resume(self, cause: str, is_free: bool) -> None:
        """Note that another engine is to continue. `is_free`: this resume does not count towards
        the limit."""
        self.num_resumes, self.resume_cause = self.num_resumes + 1, cause
        self._max_resumes += is_free

    def take_returned(self, begun: GeneratedTokens) -> bool:
        """Record the tokens of a returned answer, of which no client has anything, in the place of
        all others. Return False if there is no room."""
        self._memory.size -= self._size
        logprobs = bytes(begun.logprobs)
        self._prompt_ids = begun.prompt_token_ids.encode()
        self._output_ids = bytearray(begun.output_token_ids.encode())
        self._unsent = b',"logprobs":%s' % logprobs if logprobs else b""
        has_room = self._memory.has_room(self._size)
        self._memory.size += self._size
        return has_room

    def begun(self) -> bytes:
        """Return the field `begun` for the engine that is to continue."""
        ids = b'"prompt_token_ids":"%s","output_token_ids":"%s"' % (
            self._prompt_ids,
            self._output_ids,
        )
        if self._unsent is not None:
            return b"{%s%s}" % (ids, self._unsent)
        return b'{%s,"spoken":%d}' % (ids, self.num_tokens)

    def keep_prompt(self, params: KvParams | None) -> None:
        """Record the prompt's ids, if the params have them."""
        found = None if params is None else PROMPT_IDS.search(params.raw)
        if found is not None:
            self._keep_prompt_ids(found[1])

    def asking_for_ids(self, params: KvParams | None) -> KvParams:
        """Return the params of a decode leg with the request to report the ids of its tokens."""
        return with_field(params, b'"tell_token_ids":' + (OUTPUT if self._prompt_ids else ALL))

    def start_leg(self, inner: AnswerTap | None) -> None:
        """Record another engine's answer from here on, and pass it to `inner`."""
        self.inner = inner
        self._take_ending()
        self.last, self.error = b"", b""
        self._renamings, self._is_renaming = [], True
        self.is_cut = self.is_preempted = False

    def close(self) -> None:
        """Forget everything, and give its memory back."""
        self._memory.size -= self._size
        self._prompt_ids, self._output_ids, self._unsent = b"", bytearray(), None
        self.is_full = True
        self._take_ending()

    @property
    def _size(self) -> int:
        return len(self._prompt_ids) + len(self._output_ids) + len(self._unsent or b"")

    def passing(self, block: bytes, last: bool) -> bytes:
        if self.is_cut:
            return b""
        usual = None if last or self._ending is not None else _match_usual(block)
        if usual is not None and self._reserve(ids := usual[1]):
            self._output_ids += ids
            block = block[usual.end(1) + 1 :]
        else:
            block, self.is_cut = self._before_ending(block, last)
            if block.find(COMMENT_NAME) >= 0:
                block = COMMENT.sub(self._record_ids, block)
            # Engines that report ids have internal fields in the last events alone.
            if self.inner is None:
                block = events_without_fields(block)
        if self._is_renaming and block:
            block = self._renamed(block)
        return self._handed_on(block, last)

    def _handed_on(self, block: bytes, last: bool) -> bytes:
        """Return what the client gets now. The end of the stream is left to its owner."""
        if self.inner is not None:
            return self.inner.passing(block, last and not self.is_cut)
        if self.is_cut:
            return block
        if last:
            self.last, block = block, b""
        return block

    def _before_ending(self, block: bytes, last: bool) -> tuple[bytes, bool]:
        """Return what may pass, and True if the engine cut the stream. Nothing passes from an error
        on; a finish reason passes only with all that follows."""
        passes = b""
        if self._ending is None or block.find(ERROR_KEY) >= 0:
            ending, error = _find_ending(block, last)
            if error < len(block):
                self.error = block[error:]
                return (block[:ending] if self._ending is None else b""), True
        if self._ending is None:
            if last:  # an event that has not ended belongs to the ending
                ending = min(ending, end_of_last_event(block))
            if ending == len(block) and not last:
                return block, False
            passes, block = block[:ending], block[ending:]
            self._ending = bytearray()
        self._ending += block
        self._memory.size += len(block)
        if len(self._ending) > MAX_ENDING_BYTES or not self._memory.has_room(0):
            self.is_full = True
        elif not last:
            return passes, False
        elif not _is_whole(bytes(self._ending)):
            return passes, True
        held = self._take_ending()
        if REJECTION in FINISH_REASON.findall(held):
            # An engine that has sent no token, and reports no preemption, rejects the request.
            has_begun = self.num_tokens > 0 or passes.find(COMMENT_NAME) >= 0
            self.is_preempted = has_begun or PREEMPTED.search(held) is not None
            if self.is_preempted:
                return passes, True
        return passes + held, False

    def _take_ending(self) -> bytes:
        ending, self._ending = bytes(self._ending or b""), None
        self._memory.size -= len(ending)
        return ending

    def _record_ids(self, comment: re.Match[bytes]) -> bytes:
        is_prompt, ids = comment[1], comment[2]
        if IDS.fullmatch(ids) is None or len(ids) % TOKEN_ID_CHARS:
            self.is_full = True  # another engine would send these tokens again
        elif is_prompt:
            self._keep_prompt_ids(ids)
        elif self._reserve(ids):
            self._output_ids += ids
        return b""

    def _keep_prompt_ids(self, ids: bytes) -> None:
        if not self._prompt_ids and self._reserve(ids):
            self._prompt_ids = ids

    def _reserve(self, ids: bytes) -> bool:
        """Reserve memory for ids. Return False if there is none now, or was none before: a record
        with a gap is of no use."""
        self.is_full = self.is_full or not self._memory.has_room(len(ids))
        if not self.is_full:
            self._memory.size += len(ids)
        return not self.is_full

    def _renamed(self, block: bytes) -> bytes:
        """Give all events of a stream the id and the time of its first event."""
        if not self._renamings:
            self._find_renamings(block)
        for theirs, ours in self._renamings:
            block = block.replace(theirs, ours)
        return block

    def _find_renamings(self, block: bytes) -> None:
        """Find out from an engine's first event what to replace in its events."""
        for event in events_in(block):
            name, created = ID.match(event.data or b""), CREATED.search(event.data or b"")
            if name is None or created is None:
                continue
            if self._id:
                self._renamings = [(name[1], self._id), (created[0], self._created)]
            else:
                self._id, self._created = name[1], created[0]
                self._is_renaming = False
            return


def _match_usual(block: bytes) -> re.Match[bytes] | None:
    """Match a block that is one chunk with ids, and neither an error nor an end. Most blocks are,
    and this finds it out in a fifth of the time."""
    usual = USUAL_BLOCK.match(block)
    if usual is None:
        return None
    at = usual.end()
    if block.find(b"\n", at) != len(block) - 2 or block.find(ERROR_KEY, at) >= 0:
        return None
    return usual if FINISH_REASON.search(block, at) is None else None


def _find_ending(block: bytes, last: bool) -> tuple[int, int]:
    """Return where the ending begins, and where an event begins that reports an error; the block's
    length if there is none. The ending begins with a finish reason, with an error, or with [DONE]:
    an engine may end a stream without a reason, and clients stop reading there."""
    ending = len(block)
    may_fail = block.find(ERROR_KEY) >= 0
    if not may_fail and FINISH_REASON.search(block) is None and block.find(DONE) < 0:
        return ending, ending
    for event in events_in(block, last):
        if may_fail and _is_error(event.data):
            return min(ending, event.start), event.start
        if ending == len(block) and (
            FINISH_REASON.search(block, event.start, event.end) is not None
            or (event.data is not None and event.data.startswith(DONE))
        ):
            ending = event.start
    return ending, len(block)


def _is_error(data: bytes | None) -> bool:
    """Return True for an error, and for an `error` that is empty unless there are choices."""
    content = None if data is None else parse_object(data)
    if content is None:
        return False
    is_empty_error = content.get("error") is not None and not choices_of(content)
    return is_empty_error or error_in(content) is not None


def _is_whole(ending: bytes) -> bool:
    """Return True if an ending has a finish reason, and none of a failure. Some engines report a
    rejection as an abort; that is detected at the first event."""
    reasons = FINISH_REASON.findall(ending)
    return bool(reasons) and FAILED.isdisjoint(reasons) and not ends_inside_event(ending)
