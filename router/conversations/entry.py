"""Prompts as digests of their prefixes, the entry that one turn leaves for the next, and how much
of its KV the next prompt may use.

Stock engines match KV by position and never compare tokens. A history that was edited, shortened or
stripped of its reasoning would be answered from KV of other tokens, with status 200. Messages that
only grow prove nothing, because chat templates move and drop text behind them. So an entry has
digests of its tokens (`token_prefix`), which `reuse` compares with those of the new prompt.
`decide_reuse` compares the messages: to recognize a turn, to name what differs, and where the
operator lets messages decide. A prompt that does not extend the messages of the last turn may then
only use the longest prefix that was a whole prompt before, never tokens that the last turn
*generated*.

A chat is counted in messages, a text in characters, a list of token ids in ids. Two prompts of the
same kind with the same digest at `count` are equal up to there.

The digest of a message covers what a chat template may read: role, content, tool calls and whatever
else is set. It leaves out reasoning traces, because clients strip them; `traceless` tells where the
first one is. Arguments of tool calls count by their value, because clients parse and rewrite them.
Anthropic's `cache_control` is left out, because clients move it along with the last message.

A store's content is untrusted input: every field of an entry has its type and its bounds, or there
is no entry. Field names are the wire format that routers of several versions share.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta, Struct
from msgspec.structs import asdict

from router.common.exact_json import SLOW_LIMIT, dumps, loads, read_number
from router.conversations.token_prefix import TokenPrefix
from router.openai.answers import AnswerChoice, Json

VERSION = 1
# How a router writes an entry. Any other JSON is read with more care.
ENTRY_START = b'{"v":%d,' % VERSION
DIGEST_BYTES = 16
SCOPE_DIGEST_BYTES = 8
MAX_COUNT = 2**53
MAX_PREFIXES = 16
# The latest time that the router accepts from an engine or a store.
MAX_UNIX_TIME_S = 1e11
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Text = Annotated[str, Meta(max_length=512)]
UnixTime = Annotated[float, Meta(ge=0, le=MAX_UNIX_TIME_S)]
InexactReason = Literal["", "reasoning", "rendering"]
Digest = Annotated[str, Meta(max_length=2 * DIGEST_BYTES)]
ScopeDigest = Annotated[str, Meta(max_length=2 * SCOPE_DIGEST_BYTES)]
S = TypeVar("S", bound=Struct)

# A prompt ends with the start of an answer, which templates write differently once the answer is
# there; and text at its end may be tokenized differently. So the last tokens are never safe.
UNSAFE_TAIL_TOKENS = 16
MAX_REMEMBERED_MODEL_CHARS = 256
ASSISTANT = "assistant"
CACHE_MARK = "cache_control"
SYSTEM_ROLES = ("system", "developer")
REASONING_KEYS = ("reasoning", "reasoning_content")
TEXT_PART_KEYS = frozenset(("type", "text", "cache_control"))
# LiteLLM returns what is not in its own answer type as the last one of these. No template reads it.
IGNORED_KEYS = frozenset((*REASONING_KEYS, CACHE_MARK, "provider_specific_fields"))
THINK_TAG = re.compile("</?think>")
MODEL_FIELDS = ("model", "cache_salt", "mm_processor_kwargs")
TOOL_FIELDS = ("tools", "functions")
RENDERING_FIELDS = (
    "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "add_special_tokens",
)  # fmt: skip
TEMPLATE_FIELDS = (*RENDERING_FIELDS, "truncate_prompt_tokens", "documents", "reasoning_effort")
# Templates with these arguments may write an empty trace before an answer, and leave it out of the
# history.
THINKING = ("enable_thinking", "thinking")


class PromptPrefix(Struct, frozen=True):
    """The first `count` units of a prompt (see `Prompt`), and how many tokens they are."""

    count: Count
    digest: Digest
    tokens: Count | None = None


class ReuseScope(Struct, frozen=True):
    """Digests of what must be equal in two turns besides their messages.

    `model` covers what KV depends on although no token shows it.
    """

    model: ScopeDigest
    tools: ScopeDigest
    template: ScopeDigest


class Prompt(Struct, frozen=True):
    """A prompt of one `kind`: chat, text or tokens.

    `content` is a text or a list of token ids, empty for a chat. `digests` are, of a chat only, the
    digests for each number of leading messages, none included. `size` is in bytes, roughly. The
    first `traceless` units hold no reasoning trace. `rewrites_history`: the template may render a
    past answer differently from its tokens.

    In a chat, the answer follows the first `asked` messages, of which the last one is not the
    assistant's. The last turn's answer follows the first `asked_before` and ends the first
    `answered`, both 0 in a first turn. The first `opening` messages are the system's and one more.
    `answer` is the last turn's answer, if it is one message.
    """

    kind: str
    content: str | list[int]
    scope: ReuseScope
    size: int
    traceless: int
    digests: tuple[str, ...] = ()
    has_media: bool = False
    asked: int = 0
    asked_before: int = 0
    answered: int = 0
    opening: int = 0
    rewrites_history: bool = False
    answer: Json | None = None

    @property
    def count(self) -> int:
        """Units of the prompt."""
        return len(self.digests) - 1 if self.digests else len(self.content)

    def digest_at(self, count: int) -> str | None:
        """Return the digest of the first `count` units; None where there are fewer."""
        if not 0 <= count <= self.count:
            return None
        return self.digests[count] if self.digests else _flat_digest(self.content[:count])

    def extends(self, prefix: PromptPrefix) -> bool:
        return self.digest_at(prefix.count) == prefix.digest

    def with_answer(self, answer: AnswerChoice | None) -> PromptPrefix | None:
        """Return the prompt followed by its answer, as the next turn would repeat it.

        Returns None where the answer is unknown or of another kind.
        """
        whole: str | list[int]
        if answer is None:
            return None
        if self.digests:
            if answer.message is None:
                return None
            content = _message_bytes({"role": "assistant", **answer.message})
            return PromptPrefix(len(self.digests), _chained(self.digests[-1], content))
        if isinstance(self.content, str):
            if answer.text is None:
                return None
            whole = self.content + answer.text
        else:
            if answer.token_ids is None:
                return None
            whole = [*self.content, *answer.token_ids]
        return PromptPrefix(len(whole), _flat_digest(whole))

    def reusable_prefixes(
        self, older: tuple[PromptPrefix, ...], tokens: int | None
    ) -> tuple[PromptPrefix, ...]:
        """Return those of the older prompts that this one extends, oldest first, and this prompt.

        `tokens` is the length of this prompt, None if the engine did not report it.
        """
        prefixes, count = [one for one in older if self.extends(one)], self.count
        digest = self.digest_at(count)
        is_known = tokens is not None and 0 <= tokens <= MAX_COUNT
        if is_known and digest is not None and self.traceless == count:
            prefixes = [one for one in prefixes if one.count < count]
            prefixes.append(PromptPrefix(count, digest, tokens))
        return tuple(prefixes[-MAX_PREFIXES:])

    def why_inexact(self, answer: AnswerChoice | None) -> InexactReason:
        """Return why a template may render the answer in the next turn differently from its
        tokens."""
        if answer is None:
            return "rendering"
        if self.rewrites_history or _has_reasoning(answer.message):
            return "reasoning"
        if answer.message is None:
            return ""
        content = answer.message.get("content")
        is_trimmed = isinstance(content, str) and content != content.strip()
        return "rendering" if is_trimmed or answer.message.get("tool_calls") else ""


class Entry(Struct, frozen=True, tag_field="v", tag=VERSION, forbid_unknown_fields=True):
    """The KV that a decode engine retains after a turn, and the prompt and answer it belongs to.

    Times are Unix seconds, and `params` are the `kv_transfer_params` that read the KV. `prompts`
    are the prefixes that were whole prompts of the conversation, oldest first. `whole` is the last
    prompt with its answer. `inexact` is why a chat template may render that answer differently from
    the generated tokens, or empty. `size` is the approximate length of prompt and answer in bytes.
    `tokens` are digests of the tokens whose KV is retained, None if the router does not know them.
    `reasoning` is the digest of the answer's reasoning, empty without.
    """

    decoder: Text
    params: Json
    created_at: UnixTime
    expires_at: UnixTime
    kind: Text
    scope: ReuseScope
    prompts: Annotated[tuple[PromptPrefix, ...], Meta(max_length=MAX_PREFIXES)]
    whole: PromptPrefix | None
    inexact: InexactReason
    size: Count
    tokens: TokenPrefix | None = None
    reasoning: Digest = ""

    def to_bytes(self) -> bytes:
        """Raises orjson.JSONEncodeError for params that are nested too deep."""
        fields = {"v": VERSION, **asdict(self)}
        for name in ("tokens", "reasoning"):  # which routers of an earlier version do not read
            if not fields[name]:
                del fields[name]
        try:
            return orjson.dumps(fields, asdict)  # of each Struct in a field
        except orjson.JSONEncodeError:  # numbers that only `dumps` writes
            return dumps(fields)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Entry | None:
        """Return None for anything that this version did not write; never raises."""
        if raw.startswith(ENTRY_START) and len(raw) <= SLOW_LIMIT and raw.find(b"-0") < 0:
            try:
                return _decode_entry(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                pass
        return decode_versioned(raw, cls)


_decode_entry = msgspec.json.Decoder(Entry, float_hook=read_number).decode


class ReuseMatch(StrEnum):
    """How a prompt relates to the retained KV: extends all of it, a prefix of it, or none."""

    HIT = "hit"
    CUT = "cut"
    MISMATCH = "mismatch"


HIT, CUT, MISMATCH = ReuseMatch


class ReuseDecision(Struct, frozen=True):
    """How much KV a prompt may use, and why not more.

    `reason` is model, tools, template, reasoning, rendering or history; empty for a hit. `tokens`
    is the number of leading tokens, all of them prompt before, that are certainly the same.
    """

    match: ReuseMatch
    reason: str = ""
    tokens: int = 0


def decide_reuse(entry: Entry, prompt: Prompt) -> ReuseDecision:
    """Decide how much of the entry's KV a request with this prompt may use."""
    scope = prompt.scope
    if scope.model != entry.scope.model:
        return ReuseDecision(MISMATCH, "model")
    if prompt.kind != entry.kind:
        return ReuseDecision(MISMATCH, "history")
    if scope.tools != entry.scope.tools:
        return ReuseDecision(MISMATCH, "tools")
    if scope.template != entry.scope.template:
        return ReuseDecision(MISMATCH, "template")
    tokens = 0
    for prefix in entry.prompts:
        if prefix.count <= prompt.traceless and prompt.extends(prefix):
            tokens = max(tokens, (prefix.tokens or 0) - UNSAFE_TAIL_TOKENS)
    if entry.whole is None or not prompt.extends(entry.whole):
        reason = "history"
    elif entry.inexact:
        reason = entry.inexact
    elif prompt.traceless < entry.whole.count:
        reason = "reasoning"
    else:
        return ReuseDecision(HIT, "", tokens)
    return ReuseDecision(CUT if tokens else MISMATCH, reason, tokens)


def find_answer_change(entry: Entry, prompt: Prompt) -> str:
    """Return what the client changed in the last turn's answer when it repeated the answer:
    reasoning_missing, reasoning_changed or line_break. Empty if nothing or something else was
    changed."""
    message, whole = prompt.answer, entry.whole
    if message is None or whole is None or whole.count != prompt.answered:
        return ""
    if prompt.extends(whole):
        returned = digest_reasoning(message)
        if returned == entry.reasoning or not entry.reasoning:
            return ""
        return "reasoning_changed" if returned else "reasoning_missing"
    text, before = message.get("content"), prompt.digests[prompt.asked_before]
    for original in (text.removeprefix("\n"), text.lstrip()) if isinstance(text, str) else ():
        content = _message_bytes({**message, "content": original})
        if _chained(before, content) == whole.digest:
            return "line_break"
    return ""


def digest_reasoning(message: Json | None) -> str:
    """Return the digest of a message's reasoning, empty without. vLLM reads the second name only
    where the first one is not set."""
    for text in map((message or {}).get, REASONING_KEYS):
        if text and isinstance(text, str):
            return _flat_digest(text)
    return ""


def decode_versioned(raw: bytes, kind: type[S]) -> S | None:
    """Decode a tagged struct from a store; return None for anything else."""
    try:
        content = loads(raw)
        if not isinstance(content, dict) or "v" not in content:  # msgspec does not require the tag
            return None
        return msgspec.convert(content, kind)
    except (orjson.JSONDecodeError, msgspec.ValidationError, RecursionError):
        return None


def prompt_of(body: Json) -> Prompt | None:
    """Return a request's prompt; None for one that cannot be compared with another prompt.

    Raises orjson.JSONEncodeError for messages that are nested too deep.
    """
    messages, prompt = body.get("messages"), body.get("prompt")
    tools = _present(body, TOOL_FIELDS)
    if body.get("tool_choice") == "none":
        tools = {**tools, "tool_choice": "none"}  # an engine may leave them out of the prompt
    parts = (_present(body, MODEL_FIELDS), tools, _present(body, TEMPLATE_FIELDS))
    scope = ReuseScope(*map(_scope_digest, parts))
    if isinstance(messages, list):
        arguments = body.get("chat_template_kwargs")
        rewrites = isinstance(arguments, dict) and not arguments.keys().isdisjoint(THINKING)
        return _chat(messages, scope, rewrites)
    if body.get("prompt_embeds") is not None or body.get("echo"):
        return None
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Prompt("text", prompt, scope, len(prompt), len(prompt))
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return Prompt("tokens", prompt, scope, 4 * len(prompt), len(prompt))
    return None


def _present(body: Json, names: tuple[str, ...]) -> Json:
    if body.keys().isdisjoint(names):
        return {}
    return {name: body[name] for name in names if body.get(name) not in (None, [], {})}


def _scope_digest(fields: Json) -> str:
    if not fields:
        return EMPTY_SCOPE
    model = fields.get("model")
    if len(fields) == 1 and type(model) is str and len(model) <= MAX_REMEMBERED_MODEL_CHARS:
        return _digest_of_model(model)
    return _digest(dumps(fields, orjson.OPT_SORT_KEYS), SCOPE_DIGEST_BYTES)


@lru_cache(maxsize=256)  # most requests name one of few models, and nothing else that counts
def _digest_of_model(model: str) -> str:
    return _digest(dumps({"model": model}), SCOPE_DIGEST_BYTES)


def _chat(messages: list[Any], scope: ReuseScope, rewrites_history: bool) -> Prompt:
    chain, size = [EMPTY_CHAT], 0
    has_media = False
    traceless = len(messages)
    for number, message in enumerate(messages, 1):
        plain = _plain_bytes(message)
        content = plain or _message_bytes(message)
        size += len(content)
        chain.append(_chained(chain[-1], content))
        if not isinstance(message, dict) or (plain and "think>" not in message["content"]):
            continue
        if type(message.get("content")) is list:
            has_media = has_media or any(map(_is_media, message["content"]))
        if number <= traceless and _has_reasoning(message):
            traceless = number - 1
    roles = [one.get("role") if isinstance(one, dict) else None for one in messages]
    asked = _asked_in(roles, len(roles))
    answered = _after_last_answer(roles, asked)
    asked_before = _asked_in(roles, answered)
    opening = next((n for n, role in enumerate(roles, 1) if role not in SYSTEM_ROLES), len(roles))
    return Prompt(
        kind="chat",
        content="",
        scope=scope,
        size=size,
        traceless=traceless,
        digests=tuple(chain),
        has_media=has_media,
        asked=asked,
        asked_before=asked_before,
        answered=answered,
        opening=opening,
        rewrites_history=rewrites_history,
        answer=messages[answered - 1] if answered == asked_before + 1 else None,
    )


def _asked_in(roles: list[object], end: int) -> int:
    """Return the number of messages before those of the assistant that end the first `end`."""
    while end and roles[end - 1] == ASSISTANT:
        end -= 1
    return end


def _after_last_answer(roles: list[object], end: int) -> int:
    """Return the number of messages up to the last one of the assistant; 0 if there is none."""
    while end and roles[end - 1] != ASSISTANT:
        end -= 1
    return end


def digest_answer(messages: Iterable[Json]) -> str:
    """Return a digest by which an answer is recognized, although its client trimmed it, left out
    its reasoning, gave tool calls other ids, or split it into several messages.

    Raises orjson.JSONEncodeError for messages that are nested too deep.
    """
    texts: list[object] = []
    calls: list[object] = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text", part) if isinstance(part, dict) else part
            if isinstance(text, str) and "think>" in text:
                text = THINK_TAG.split(text)[-1]
            texts.append(text.strip() if isinstance(text, str) else text)
        given = message.get("tool_calls")
        for call in given if isinstance(given, list) else ():
            known = _canonical_call(call)
            calls.append(known[1:] if isinstance(known, list) else known)
    return _digest(dumps([[text for text in texts if text], calls], orjson.OPT_SORT_KEYS))


def _message_bytes(message: object) -> bytes:
    """Return equal bytes for an engine's answer and a client's repetition of it.

    Raises orjson.JSONEncodeError for a message that is nested too deep.
    """
    if not (plain := _plain_bytes(message)):
        canonical = _canonical(message)
        plain = _plain_bytes(canonical) or dumps(canonical, orjson.OPT_SORT_KEYS)
    return plain


def _plain_bytes(message: object) -> bytes:
    """Return the bytes of a message that has only a role and a text, as most have, else b"". They
    cost less than JSON, and no JSON is the same."""
    if isinstance(message, dict) and len(message) == 2:
        role, content = message.get("role"), message.get("content")
        if role and content and type(role) is str and type(content) is str:
            return f"{len(role)} {role}{content}".encode("utf-8", "surrogatepass")
    return b""


def _canonical(message: object) -> object:
    """Return the message without what does not count."""
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    kept = {
        name: value
        for name, value in message.items()
        if name not in IGNORED_KEYS and value not in (None, "", [], {})
    }
    if isinstance(content, list) and content:
        kept["content"] = parts = [_without_cache_mark(part) for part in content]
        if len(parts) == 1 and isinstance(parts[0], dict):
            part = parts[0]  # a single part of text is equivalent to the text
            if part.keys() == {"type", "text"} and part["type"] == "text":
                kept["content"] = part["text"]
    calls = kept.get("tool_calls")
    if isinstance(calls, list):
        kept["tool_calls"] = [_canonical_call(call) for call in calls]
    if isinstance(function := kept.get("function_call"), dict):
        kept["function_call"] = _canonical_call({"function": function})
    return kept


def _without_cache_mark(part: object) -> object:
    """Return the part without Anthropic's mark, which clients move along with the last message."""
    if not isinstance(part, dict) or CACHE_MARK not in part:
        return part
    return {name: part[name] for name in part if name != CACHE_MARK}


def _canonical_call(call: object) -> object:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    return [call.get("id"), function.get("name"), _canonical_arguments(function.get("arguments"))]


def _canonical_arguments(arguments: object) -> object:
    """Return equal values for arguments that differ in spacing, order, or as text and object.

    Arguments that are no JSON are returned as they are.
    """
    if arguments in (None, ""):
        return "{}"
    try:
        value = _parse_by_value(arguments) if isinstance(arguments, str) else arguments
        return dumps(value, orjson.OPT_SORT_KEYS).decode()
    except (msgspec.MsgspecError, orjson.JSONEncodeError, RecursionError, ValueError):
        return arguments


def _number_by_value(text: str) -> object:
    """1.0 and 1e0 are the integer 1, as a client in JavaScript writes it."""
    value = float(text)
    if math.isinf(value):
        return text
    return int(value) if value.is_integer() and abs(value) < MAX_COUNT else value


_parse_by_value = msgspec.json.Decoder(float_hook=_number_by_value).decode


def _has_reasoning(message: Json | None) -> bool:
    """Return True if the message has a reasoning trace, in a field of its own or in its text."""
    if message is None:
        return False
    if any(map(message.get, REASONING_KEYS)):
        return True
    text = message.get("content")
    return isinstance(text, str) and "think>" in text and THINK_TAG.search(text) is not None


def _is_media(part: object) -> bool:
    """Return True unless the part is certainly text: engines go by other keys than `type`, too."""
    if not isinstance(part, dict):
        return False
    return part.get("type") != "text" or not part.keys() <= TEXT_PART_KEYS


def _chained(previous: str, content: bytes) -> str:
    return _digest(previous.encode("ascii") + content)


def _flat_digest(content: str | list[int]) -> str:
    if isinstance(content, str):
        return _digest(content.encode("utf-8", "surrogatepass"))
    return _digest(dumps(content))


def _digest(content: bytes, size: int = DIGEST_BYTES) -> str:
    return hashlib.blake2b(content, digest_size=size).hexdigest()


EMPTY_CHAT = _digest(b"chat")
EMPTY_SCOPE = _digest(b"{}", SCOPE_DIGEST_BYTES)
