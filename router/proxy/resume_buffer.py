"""What the client has of a stream, token by token, so that another decoder can go on where one has
died, frozen, or was stopped.

A decoder that offers it, and is asked (`tell_token_ids`), puts a comment before what an event says:

    : token_ids BwAACAAA
    data: {"id": ...}

which names the tokens that the event says, in the form of `begun` (three bytes each, in base64, so
that pieces can be put together as they come). No client sees it. An event with a finish reason
waits for the stream's end: what an engine says there may not be true, if it is being stopped, and
one that has no room for all of the answer says `cache_threshold`, for another to go on.

Of an answer that is not streamed, and that a decoder has handed back, it holds what that one told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from router.http_client.engine_answer import AnswerTap
from router.http_client.sse import MAX_EVENT_BYTES, end_of_last_event
from router.openai.answers import parse_object
from router.openai.generated_tokens import TOKEN_ID_CHARS, GeneratedTokens
from router.proxy.prefill_answer import PROMPT_IDS, Params, with_field

# What is not known of the prompt yet has to be told, too.
OUTPUT, ALL = b'"output"', b'"all"'
# At the beginning of a line, which is looked at second: what begins with letters is found sooner.
COMMENT = re.compile(rb": (?<![^\n]: )(prompt_)?token_ids ([^\r\n]*)\r?\n")
IDS = re.compile(rb"[A-Za-z0-9+/]*")
MARK = b"token_ids "
# How most blocks begin: with ids, and an event that is no error.
USUAL = re.compile(rb': token_ids ((?:[A-Za-z0-9+/]{4})*)\ndata: \{"id"')
# Where an end begins. What begins with letters is found sooner, again.
FINISH = re.compile(rb'finish_reason"(?<="finish_reason")\s*:\s*"')
DONE, DATA = b"[DONE]", (b"data: ", b"data:")
DONE_LINE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]")
FAILED = re.compile(rb'"finish_reason"\s*:\s*"(?:abort|error)"')
REFUSED = re.compile(rb'"finish_reason"\s*:\s*"cache_threshold"')
BACK = re.compile(rb'"stop_reason"\s*:\s*"preempted"')
ERROR = re.compile(rb'^data: ?\{\s*"error"\s*:', re.MULTILINE)
ID = re.compile(rb'^data: ?\{\s*"id"\s*:\s*("[^"\\]*")', re.MULTILINE)
CREATED = re.compile(rb'"created"\s*:\s*\d+')
END = b"\n\n"
# Bytes behind a finish, which wait for the stream's end: a turn's params grow with its prompt.
MAX_HELD_BYTES = MAX_EVENT_BYTES


class ByteBudget(Protocol):
    """Bytes that all resume buffers hold together."""

    size: int

    def has_room(self, more: int) -> bool: ...


class ResumeBuffer:
    """A Tap before that of a turn, if there is one. It must be closed.

    `is_full`: it has not kept all. `is_cut`: the engine has ended the stream before the answer's
    end, perhaps with the event `error`; `is_preempted`: for want of room. `num_resumes`: how often
    another engine was to go on; `resume_cause`: why one is to, until it does. `last` is what the
    reader of the stream says at its end, as of every Tap.
    """

    __slots__ = ("_created", "_held", "_id", "_max_resumes", "_output", "_prompt", "_renamings",
                 "_room", "_unspoken", "error", "first_byte", "inner", "is_cut", "is_full",
                 "is_preempted", "last", "num_resumes", "renders", "resume_cause")  # fmt: skip

    def __init__(self, room: ByteBudget, renders: Mapping[str, str], max_resumes: int) -> None:
        self.renders = renders
        self._max_resumes = max_resumes
        self.is_cut = self.is_preempted = False
        self.error = b""
        self.num_resumes, self.resume_cause = 0, ""
        self.last = b""
        self.first_byte: float | None = None
        # Ids, in base64.
        self._prompt, self._output = b"", bytearray()
        self._room, self.is_full = room, False
        self.inner: AnswerTap | None = None
        # What else is told of tokens that no client has; of a stream's it has all.
        self._unspoken: bytes | None = None
        # From the finish on.
        self._held: bytearray | None = None
        # As the first decoder has said them, and what others say in their place.
        self._id = self._created = b""
        self._renamings: list[tuple[bytes, bytes]] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the client has."""
        return len(self._output) // TOKEN_ID_CHARS

    @property
    def can_resume(self) -> bool:
        """Whether another engine may be asked, could be told all that it needs, and there is
        something left."""
        return self.is_complete and self.num_resumes < self._max_resumes

    @property
    def is_complete(self) -> bool:
        return bool(self._prompt and self._output) and not self.is_full and not self.last

    def note_resume(self, kind: str, is_free: bool) -> None:
        """Another engine is to go on, for that reason. `is_free`: no matter how often it may."""
        self.num_resumes, self.resume_cause = self.num_resumes + 1, kind
        self._max_resumes += is_free

    def take_returned(self, begun: GeneratedTokens) -> bool:
        """What was said of an answer that no client has, instead of what was known. False: there is
        no room for it."""
        self._room.size -= self._size
        logprobs = bytes(begun.logprobs)
        self._prompt = begun.prompt_token_ids.encode()
        self._output = bytearray(begun.output_token_ids.encode())
        self._unspoken = b',"logprobs":%s' % logprobs if logprobs else b""
        has_room = self._room.has_room(self._size)
        self._room.size += self._size
        return has_room

    def begun(self) -> bytes:
        """For who is to go on: what the client has, as if it had said that itself; or what it is
        to be told."""
        ids = b'"prompt_token_ids":"%s","output_token_ids":"%s"' % (self._prompt, self._output)
        if self._unspoken is not None:
            return b"{%s%s}" % (ids, self._unspoken)
        return b'{%s,"spoken":%d}' % (ids, self.num_tokens)

    def keep_prompt(self, params: Params | None) -> None:
        found = None if params is None else PROMPT_IDS.search(params.raw)
        if found is not None:
            self._keep_prompt(found[1])

    def asking_for_ids(self, params: Params | None) -> Params:
        """A decoder's params, which is to tell what it says."""
        return with_field(params, b'"tell_token_ids":' + (OUTPUT if self._prompt else ALL))

    def start_leg(self, inner: AnswerTap | None) -> None:
        """Another answer passes from here on."""
        self.inner = inner
        self._let_go()
        self.last, self.error, self._renamings = b"", b"", None
        self.is_cut = self.is_preempted = False

    def close(self) -> None:
        self._room.size -= self._size
        self._prompt, self._output, self._unspoken = b"", bytearray(), None
        self.is_full = True
        self._let_go()

    @property
    def _size(self) -> int:
        return len(self._prompt) + len(self._output) + len(self._unspoken or b"")

    def passing(self, block: bytes, last: bool) -> bytes:
        if self.is_cut:
            return b""
        told = None if last or self._held is not None else _told_in_usual(block)
        if told is not None and self._has_room(told[1]):
            self._output += told[1]
            block = block[told.end(1) + 1 :]
        else:
            block, self.is_cut = self._without_end(block, last)
            if block.find(MARK) >= 0:
                block = COMMENT.sub(self._note, block)
        if block and self._renamings != []:
            block = self._renamed(block)
        if self.inner is not None:
            return self.inner.passing(block, last and not self.is_cut)
        if self.is_cut:
            return block
        if last:
            self.last, block = block, b""
        return block

    def _without_end(self, block: bytes, last: bool) -> tuple[bytes, bool]:
        """What may pass, nothing from an error on and a finish only with all that follows; and
        whether the stream was cut there."""
        wrong = ERROR.search(block) if block.find(b'"error"') >= 0 else None
        if wrong is not None:
            self.error = block[wrong.start() :]
            if self._held is not None:
                return b"", True
            finish = _finish_in(block)
            first = wrong.start() if finish < 0 else min(finish, wrong.start())
            return block[: _start_of_event(block, first)], True
        passes = b""
        if self._held is None:
            finish = _finish_in(block)
            start = len(block) if finish < 0 else _start_of_event(block, finish)
            if last:  # what it has begun to say besides is no event
                start = min(start, end_of_last_event(block))
            passes, block = block[:start], block[start:]
            self._held = bytearray() if block or last else None
        if self._held is None:
            return passes, False
        self._held += block
        self._room.size += len(block)
        if len(self._held) > MAX_HELD_BYTES or not self._room.has_room(0):
            self.is_full = True
        elif not last:
            return passes, False
        elif not _is_whole(bytes(self._held)):
            return passes, True
        held = self._let_go()
        if REFUSED.search(held) is not None:
            # Whoever has said nothing, and does not say that it was preempted, refuses to begin.
            is_said = self.num_tokens > 0 or passes.find(MARK) >= 0
            self.is_preempted = is_said or BACK.search(held) is not None
            if self.is_preempted:
                return passes, True
        return passes + held, False

    def _let_go(self) -> bytes:
        """What was held of an end."""
        held, self._held = bytes(self._held or b""), None
        self._room.size -= len(held)
        return held

    def _note(self, found: re.Match[bytes]) -> bytes:
        if IDS.fullmatch(found[2]) is None or len(found[2]) % TOKEN_ID_CHARS:
            # Who goes on would say these again.
            self.is_full = True
        elif found[1]:
            self._keep_prompt(found[2])
        elif self._has_room(found[2]):
            self._output += found[2]
        return b""

    def _keep_prompt(self, ids: bytes) -> None:
        if not self._prompt and self._has_room(ids):
            self._prompt = ids

    def _has_room(self, ids: bytes) -> bool:
        """Takes it, too. What was not kept once is never whole again."""
        self.is_full = self.is_full or not self._room.has_room(len(ids))
        if not self.is_full:
            self._room.size += len(ids)
        return not self.is_full

    def _renamed(self, block: bytes) -> bytes:
        """All events of a stream have one id, and were begun at one time."""
        if self._renamings is None:
            self._renamings = self._renamings_of(block)
        for theirs, ours in self._renamings or ():
            block = block.replace(theirs, ours)
        return block

    def _renamings_of(self, block: bytes) -> list[tuple[bytes, bytes]] | None:
        """None where no event has come yet."""
        name, created = ID.search(block), CREATED.search(block)
        if name is None or created is None:
            return None
        if not self._id:
            self._id, self._created = name[1], created[0]
            return []
        return [(name[1], self._id), (created[0], self._created)]


def _told_in_usual(block: bytes) -> re.Match[bytes] | None:
    """The ids before the one event that a block is, if it is neither the stream's end nor an error.
    As most are, and seen at a fifth of the price."""
    told = USUAL.match(block)
    if told is None or block.find(b"\n", told.end()) != len(block) - len(END):
        return None
    return told if FINISH.search(block, told.end()) is None else None


def _finish_in(block: bytes) -> int:
    """Somewhere in the first event that ends the stream; -1 where none does. An engine may end it
    without a reason, and clients stop reading there."""
    found = FINISH.search(block)
    finish = -1 if found is None else found.start()
    done = block.find(DONE)
    while done >= 0 and block[block.rfind(b"\n", 0, done) + 1 : done] not in DATA:
        done = block.find(DONE, done + 1)
    return finish if done < 0 or 0 <= finish < done else done


def says_done(block: bytes) -> bool:
    """Return True if the block has a [DONE] event: text of an answer may contain [DONE] as well."""
    return block.find(DONE) >= 0 and DONE_LINE.search(block) is not None


def ends_inside_event(ending: bytes) -> bool:
    """Return True if a stream with this end stops inside an event and has sent no [DONE]."""
    rest = ending[end_of_last_event(ending) :].strip()
    if not rest or says_done(ending):
        return False
    line = rest.splitlines()[-1]
    is_whole = line.startswith(b"data:") and parse_object(line[5:]) is not None
    return not is_whole and not line.startswith(b":")


def _start_of_event(block: bytes, inside: int) -> int:
    end = block.rfind(END, 0, inside)
    return 0 if end < 0 else end + len(END)


def _is_whole(ending: bytes) -> bool:
    """Return True if the ending has a finish reason other than a failure or an abort. Some engines
    report a rejection as an abort; those are detected at the first event."""
    if FINISH.search(ending) is None or FAILED.search(ending) is not None:
        return False
    return not ends_inside_event(ending)
