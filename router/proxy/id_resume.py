"""How a stream of stock vLLM continues on another engine: by its token ids.

Engines with our extension report the ids of their tokens in comments and continue from them
(`resume_buffer`). Stock vLLM reports them too, if it is asked to (`return_token_ids`), and takes
ids for a prompt: `prompt` of a completion, `kv_transfer_params.prompt_token_ids` of a chat (vLLM
0.31 and newer; read and run in 0.32 and 0.33). So another engine continues by a request like the
client's own, with three differences: the prompt is followed by the tokens that the client has, and
max_tokens and min_tokens are smaller by their number. A chat keeps the parsers of its engine.

What such an engine cannot know:

* Text that no client has. The detokenizer holds a part of a character back, and a tool parser what
  may begin a call. So the answer is cut behind tokens whose text was sent as a whole: /detokenize
  shows it for the last ones (`_sent_ids`). What follows is computed again.
* Penalties and stop strings, which look at generated tokens only, and a grammar that has begun. If
  such an answer is greedy, it is given once more (`replay_buffer`), else it ends with an error. So
  does one in which a call of a tool has begun.
* The state of a reasoning parser. It follows from the prompt's ids in most parsers. A stream that
  goes on in another field than it broke off (content, reasoning) ends with an error.

A sampled answer continues from another random state than the engine's that is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import orjson

from router.common.exact_json import dumps, number
from router.fleet.engine import Engine
from router.http_client.answer_limits import MemoryBudget
from router.http_client.errors import UpstreamError
from router.http_client.sse import with_data
from router.openai.answers import (
    ERROR_KEY,
    Json,
    choices_of,
    chunks_in,
    ids_in,
    parse_object,
)
from router.openai.request_fields import MAX_COMPLETION_TOKENS, MAX_TOKENS, MIN_TOKENS
from router.proxy.first_token import can_hand_over, wants_logprobs
from router.proxy.internal_fields import events_without_fields
from router.proxy.request import Body, Request
from router.proxy.request_buffer import NotContinuedError, RequestBuffer
from router.proxy.side_requests import send_side_request
from router.proxy.token_ids import FIELDS, MARK, RETURN_TOKEN_IDS

DETOKENIZE = "/detokenize"
# The hash of a tokenizer on our identity page.
TOKENIZER = "tokenizer"
# Fields that make an engine look at the tokens that it has generated itself, or follow a grammar.
NOT_CONTINUED = (
    "stop", "presence_penalty", "frequency_penalty", "bad_words", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "functions",
)  # fmt: skip
# vLLM's max_tokens of a completion that names none. A chat without has no limit.
DEFAULT_MAX_TOKENS = 16
# Where the text of a chunk is.
TEXT_FIELDS = ("content", "reasoning", "reasoning_content")
# The last blocks of a stream, in which the end of its text is looked for.
TAIL_BLOCKS = 8
# Tokens whose text may not have been sent: a character has four bytes, and a tool parser waits for
# a few more.
MAX_UNSENT_TOKENS = 8
# Seconds in which such a place is found.
CUT_TIMEOUT_S = 5.0
# Engines that are asked for a text, one after another, until one answers.
MAX_ASKED = 3
# The text of bytes that are no character. An engine that continues behind them writes the text of
# the whole prompt with the first character that is one (tokenizers 0.23).
PART_OF_CHARACTER = "\ufffd"
# How most blocks end: with the ids of the only choice of one chunk.
IDS_BEFORE_END = b',"token_ids":['
USUAL_END = b"]}]}\n\n"
# Before them, at most FAR bytes away.
NOT_FINISHED, FAR = b'"finish_reason":null', 96
# What comes before the text of such a block.
TEXT_START = re.compile(rb'"(?:content|reasoning|reasoning_content|text)":"')
SPACES = b" \t\r\n"
TOOL_CALLS, FUNCTION_CALL = b'"tool_calls"', b'"function_call"'
CHOICE, ROLE = b'"choices":[{', b'"role"'
# Most of FIELDS, found in half the time.
COMPACT_FIELDS = re.compile(rb',"(prompt_)?token_ids":(null|\[[\d,]*\])')


def may_continue(body: Body) -> bool:
    """Return True if token ids are all that another engine needs to continue this request."""
    if not can_hand_over(body) or any(body.get(name) for name in NOT_CONTINUED):
        return False
    if body.get("include_reasoning") is False:  # then chunks have no ids
        return False
    if body.get("tool_choice") not in (None, "none", "auto"):
        return False
    given = body.get("response_format")
    return given is None or (isinstance(given, Mapping) and given.get("type") == "text")


class TextChunk(NamedTuple):
    """The ids of a chunk, the name of the field with its text, and the text."""

    ids: list[int]
    field: str
    text: str


class IdBuffer(RequestBuffer):
    """The resume buffer of a stream of stock vLLM, whose chunks have `token_ids`.

    `hides_ids`: the ids are taken out, because neither the client nor a turn wants them.
    """

    __slots__ = (
        "_after_text", "_before_text", "_group", "_has_begun", "_hides_ids", "_num", "_num_before",
        "_num_bytes_before", "_shift", "_tail", "_tail_field",
    )  # fmt: skip

    def __init__(
        self, memory: MemoryBudget, engine: Engine, max_resumes: int, hides_ids: bool
    ) -> None:
        super().__init__(memory, engine.capabilities.render_hashes, max_resumes)
        self._hides_ids, self._group = hides_ids, engine.spec.group
        self._num = self._num_before = self._num_bytes_before = 0
        self._tail: deque[bytes] = deque(maxlen=TAIL_BLOCKS)
        self._tail_field = ""
        # All bytes of most chunks of an engine, but for the text and its id.
        self._before_text = self._after_text = b""
        # What is added to the offsets in the text of log-probabilities.
        self._shift = 0
        # The engine that continues has sent text.
        self._has_begun = True

    @property
    def num_tokens(self) -> int:
        return self._num

    def is_continued_by(self, engine: Engine) -> bool:
        """Return True if the engine takes ids, and they mean the same to it: the operator has put
        it into the same group, and its tokenizer is not known to be another one."""
        theirs = engine.capabilities.render_hashes
        differs = TOKENIZER in theirs and theirs[TOKENIZER] != self.renders.get(TOKENIZER)
        is_alike = engine.spec.group == self._group and not (differs and self.renders)
        return engine.capabilities.takes_token_ids and is_alike

    def continuing_ids(self) -> bytes:
        """Return the prompt's ids and those of the answer as a JSON array."""
        return b"[%b,%b]" % (self._prompt_ids, bytes(self._output_ids))

    @property
    def num_unseen(self) -> int | None:
        """How many tokens have come from an engine that continues, if it has sent no text."""
        return None if self._has_begun else self._num - self._num_before

    def chunks(self) -> list[TextChunk]:
        """Return the last chunks of the stream."""
        return [*_chunks_in(b"".join(self._tail))]

    def cut(self, num_unsent: int, chunks: Iterable[TextChunk]) -> None:
        """Forget the last tokens, of which the client has no text. `chunks`: those that are left in
        the tail."""
        if num_unsent:
            kept = self._output_ids.rsplit(b",", num_unsent)[0]
            self._memory.size -= len(self._output_ids) - len(kept)
            self._output_ids = bytearray(kept)
            self._num -= num_unsent
        self._before_text = b""
        self._num_before, self._num_bytes_before = self._num, len(self._output_ids)
        self._has_begun = False
        last = [chunk for chunk in chunks if chunk.text]
        self._tail_field = last[-1].field if last else self._tail_field
        # The blocks have the offsets of the engine that has sent them.
        self._shift += _end_of_text(b"".join(self._tail))
        self._tail.clear()

    def passing(self, block: bytes, last: bool) -> bytes:
        if self.is_cut:
            return b""
        usual = -1 if last or self._ending is not None else self._find_usual_ids(block)
        if usual > 0:
            self._tail.append(block)
            self._keep_ids(block[usual + len(IDS_BEFORE_END) : -len(USUAL_END)])
            if self._hides_ids:
                block = block[:usual] + b"}]}\n\n"
        else:
            block, self.is_cut = self._before_ending(block, last)
            block = self._without_ids(block)
        if self._num_before and block:
            block = self._rewritten(block)
        if self._is_renaming and block:
            block = self._renamed(block)
        return self._handed_on(block, last)

    def _find_usual_ids(self, block: bytes) -> int:
        """Return where the field with the ids begins in a block that is one chunk with ids, and
        neither an error, an end nor a call of a tool; -1 for another block. Most blocks are one."""
        before = self._before_text
        if before and block.startswith(before):
            # It is a chunk like the one before, if its text has no quote.
            at = block.find(b'"', len(before))
            start = at + len(self._after_text)
            if (
                block.startswith(self._after_text, at)
                and block.find(b"\n") == len(block) - 2
                and block.endswith(USUAL_END)
                and block[start : -len(USUAL_END)].isdigit()
            ):
                return start - len(IDS_BEFORE_END)
        if (
            block.endswith(USUAL_END)
            and block.find(b"\n") == len(block) - 2
            and self._prompt_ids
            and self._has_begun
            and (at := block.rfind(IDS_BEFORE_END)) > 0
            and at + len(IDS_BEFORE_END) + len(USUAL_END) < len(block)
            and block.find(b"]", at) == len(block) - len(USUAL_END)  # no other list behind the ids
            and block.rfind(NOT_FINISHED, max(0, at - FAR), at) >= 0
            and block.find(ERROR_KEY) < 0
            and block.find(TOOL_CALLS) < 0
        ):
            self._note_usual(block, at)
            return at
        return -1

    def _note_usual(self, block: bytes, usual: int) -> None:
        """Keep what surrounds the text of one chunk, whose ids begin at `usual`. Most chunks behind
        it are the same there, which shows in half the time that they are usual."""
        text = TEXT_START.search(block)
        if text is not None:
            end = block.find(b'"', text.end())
            if block[end - 1 : end] != b"\\":
                self._before_text = block[: text.end()]
                self._after_text = block[end : usual + len(IDS_BEFORE_END)]

    def _without_ids(self, block: bytes) -> bytes:
        """Record the ids in any events, and take them out."""
        if not block:
            return block
        self._tail.append(block)
        if block.find(TOOL_CALLS) >= 0 or block.find(FUNCTION_CALL) >= 0:
            self.is_full = True
        fields = COMPACT_FIELDS
        found = fields.findall(block)
        if len(found) < block.count(MARK):
            fields = FIELDS
            found = [(one[0] or one[2], one[1] or one[3]) for one in fields.findall(block)]
        for is_prompt, written in found:
            if is_prompt and written != b"null":
                if not self._has_begun and not self._is_prompt(written):
                    self._give_up()
                    return b""
                self._keep_prompt_ids(written[1:-1])
        lists = (written for is_prompt, written in found if not is_prompt and written != b"null")
        output = [ids for ids in map(_without_brackets, lists) if ids]
        self._keep_ids(b",".join(output))
        if block.count(CHOICE) > len(output) + block.count(ROLE) and _lacks_ids(block):
            self.is_full = True
        if self._hides_ids and found:
            block = fields.sub(b"", block)
        return block if self.inner is not None else events_without_fields(block)

    def _is_prompt(self, written: bytes) -> bool:
        """Return True for the ids that the engine was to continue: it could have rendered the
        messages instead, and would then write the answer from its start."""
        given = b"[%b,%b]" % (self._prompt_ids, bytes(self._output_ids[: self._num_bytes_before]))
        return written == given or written.translate(None, SPACES) == given.translate(None, SPACES)

    def _keep_ids(self, written: bytes) -> None:
        added = b",%b" % written if self._output_ids else written
        if written and self._reserve(added):
            self._output_ids += added
            self._num += written.count(b",") + 1

    def _rewrite(self, written: bytes, content: Json) -> bytes:
        """Make an event of an engine that continues one of the whole answer: without a second role
        and a second prompt, and with numbers of the whole answer."""
        if not self._has_begun and not self._begins_alike(content):
            raise NotContinuedError
        return with_data(written, dumps(content)) if self._join(content) else b""

    def _begins_alike(self, content: Json) -> bool:
        """Return False if the text goes on in another field than it broke off."""
        for choice in choices_of(content):
            field, text = _text_of(choice)
            if text:
                self._has_begun = True
                return self._tail_field in ("", field)
        return True

    def _join(self, content: Json) -> bool:
        """Make a chunk one of the whole answer. Return False for one that has nothing. Raises
        NotContinuedError."""
        content.pop("prompt_token_ids", None)
        usage = content.get("usage")
        if isinstance(usage, dict):
            for name, sign in (("prompt_tokens", -1), ("completion_tokens", 1)):
                if type(usage.get(name)) is int:
                    usage[name] += sign * self._num_before
        is_role = False
        for choice in choices_of(content):
            choice.pop("prompt_token_ids", None)
            delta, logprobs = choice.get("delta"), choice.get("logprobs")
            if isinstance(delta, dict) and delta.pop("role", None) is not None:
                is_role = not any(delta.values()) and not choice.get("finish_reason")
            offsets = logprobs.get("text_offset") if isinstance(logprobs, dict) else None
            if isinstance(logprobs, dict) and isinstance(offsets, list):
                if not all(isinstance(one, int | float) for one in offsets):
                    raise NotContinuedError
                logprobs["text_offset"] = [one + self._shift for one in offsets]
        return not is_role


def _without_brackets(written: bytes) -> bytes:
    return written[1:-1].strip()


def _lacks_ids(block: bytes) -> bool:
    """Return True if a chunk has text and no ids."""
    return any(chunk.text and not chunk.ids for chunk in _chunks_in(block))


def _chunks_in(block: bytes) -> Iterator[TextChunk]:
    for content in chunks_in(block):
        for choice in choices_of(content):
            yield TextChunk(ids_in(choice.get("token_ids")) or [], *_text_of(choice))


def _text_of(choice: Json) -> tuple[str, str]:
    """Return the name of the field with a chunk's text, and the text."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        text = choice.get("text")
        return "text", text if isinstance(text, str) else ""
    for name in TEXT_FIELDS:
        if isinstance(text := delta.get(name), str) and text:
            return name, text
    return "content", ""


def _end_of_text(block: bytes) -> int:
    """Return where the text ends by the log-probabilities of a completion; 0 if it has none."""
    end = 0
    for content in chunks_in(block):
        for choice in choices_of(content):
            found = choice.get("logprobs")
            if isinstance(found, dict) and found.get("text_offset") and found.get("tokens"):
                end = found["text_offset"][-1] + len(found["tokens"][-1])
    return end


async def find_cut(request: Request, engines: Sequence[Engine], buffer: IdBuffer) -> bool:
    """Cut the answer behind tokens whose whole text the client has. Return False if no such place
    is found. The first of the `engines` that answers tells the texts of ids."""
    chunks, body = buffer.chunks(), request.body
    is_told = body.get(RETURN_TOKEN_IDS) is True or wants_logprobs(body.get("logprobs"))
    if (unseen := buffer.num_unseen) is not None:  # the last engine has failed at once
        if unseen and is_told:
            return False
        buffer.cut(unseen, ())
        return True
    with_text = [at for at, chunk in enumerate(chunks) if chunk.text]
    if not with_text:
        return False
    # The last text, and the ids that came with it and since: a character may be in several chunks.
    text = chunks[with_text[-1]].text
    begin = with_text[-2] + 1 if len(with_text) > 1 else 0
    ids = [one for chunk in chunks[begin:] for one in chunk.ids]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CUT_TIMEOUT_S):
            for num in range(len(ids), max(0, len(ids) - MAX_UNSENT_TOKENS - 1), -1):
                unsent = len(ids) - num
                if unsent and is_told:  # what the client has of these tokens would come again
                    return False
                if await _is_text_of(request, engines, ids[:num], text):
                    buffer.cut(unsent, chunks)
                    return True
    return False


async def _is_text_of(
    request: Request, engines: Sequence[Engine], ids: list[int], text: str
) -> bool:
    """Return True if an engine writes just this text for the ids."""
    asked: Body = {"tokens": ids}
    if request.body.get("model") is not None:
        asked["model"] = request.body["model"]
    for engine in engines[:MAX_ASKED]:
        try:
            answer = await send_side_request(request, engine, DETOKENIZE, asked, "detokenize")
        except UpstreamError:
            continue
        told = (parse_object(answer.body) or {}).get("prompt") if answer.status == 200 else None
        # Some tokenizers drop a space at the start of a text.
        is_text = told == text or (text[:1] == " " and told == text[1:])
        return is_text and not text.endswith(PART_OF_CHARACTER)
    return False


def continuing_body(body: Body, buffer: IdBuffer) -> Body | None:
    """Return the client's body for the rest of its answer; None if nothing may follow. A chat's ids
    are not in it."""
    is_chat = "messages" in body
    changed: Body = {}
    # As in vLLM: only chats know the second name, which takes precedence.
    name = MAX_TOKENS
    if is_chat and body.get(MAX_COMPLETION_TOKENS) is not None:
        name = MAX_COMPLETION_TOKENS
    most = number(body.get(name, None if is_chat else DEFAULT_MAX_TOKENS))
    if most is not None:
        changed[name] = int(most) - buffer.num_tokens
        if changed[name] < 1:
            return None
    if type(body.get(MIN_TOKENS)) is int:
        changed[MIN_TOKENS] = max(0, body[MIN_TOKENS] - buffer.num_tokens)
    if not is_chat:
        changed["prompt"] = orjson.Fragment(buffer.continuing_ids())
    return {**body, **changed}
