"""Compare the first token of a decode engine with the one that its prefill engine computed.

A transfer that goes wrong silently (wrong, zeroed or swapped blocks) gives an answer with status
200. A prefill engine computes the first token anyway, so the router can notice such a transfer.

*Which requests.* Those with temperature 0 or top_k 1 and a prompt of up to MAX_TOKENS_WITH_IDS, and
a share (`kv_canary`) of all. While any pair of engines is avoided, all of them. The two legs must
be at engines of vLLM, without hand-over of the first token, on the endpoints of chats and
completions. They run one after the other, or together (a push). Not compared:

* answers of several choices, and requests that one engine answers (they have no such legs);
* `min_tokens`, of which the prefill leg has none of the client's: it may sample an end;
* grammars (`response_format`, `structured_outputs`, `guided_*`, a required tool), `logit_bias`,
  `bad_words`, `allowed_token_ids`, `repetition_penalty` and logits processors: the token is chosen
  among others than the log-probabilities are of;
* `echo`, `prompt_logprobs`, `logprob_token_ids` and `thinking_token_budget`;
* fields for log-probabilities that ask for none, because the legs would have them twice.

*What.* The prefill leg returns the twenty likeliest tokens, which is the most that vLLM returns by
default. The decode leg of that share of requests returns them as well. The decode leg of other
greedy requests returns token ids only, which costs its engine little. The router removes from the
answer what its client did not ask for. If the client asked for log-probabilities, both engines
return these anyway.

*When they differ.* The first token of a greedy request must not be less likely at the prefill
engine than this engine's own token by more than GREEDY_BOUND. The likeliest token of the prefill
engine must have the same log-probability at the decode engine, give or take LOGPROB_BOUND. A token
outside of an engine's list is at most as likely as the last one in it, and only the gap to that one
counts. So a flat distribution, whose order is noise, never differs.

*Bounds.* Measured between healthy stock engines of vLLM 0.32 and 0.33 on a CPU, with chunked
prefill and several requests at once, on random models, whose attention is sharper than usual:

    P and D                               requests  other tokens  largest gap  largest difference
    both of one rank, bfloat16, float32        800             0         0.00                0.00
    P of two ranks, D of one, bfloat16        1350            54         0.47                0.41
    P of two ranks, D of one, float32          150             0         0.00             0.00003

The bounds are twice the largest noise. (The log-probabilities of bfloat16 logits between 16 and 32
are multiples of 1/8.) The tokens alone showed 89 of 90 loads of zeroed blocks, 89 of 90 swaps, 86
of 90 loads of another request's blocks, and 57 of 90 loads in which each block was where the one
before it belongs: not all of these change the answer. On flat distributions, where the likeliest
token has 5 %, they showed 78 of the zeroed blocks and of the swaps, and 41 of the last kind.

*Effect.* A difference is a failed KV load of the pair (`KvDiffersError`): the pair is avoided, and
the prompt is computed again. All further legs of the request have a `cache_salt` of their own,
because the prefix caches of both engines may hold the wrong blocks by now. If one decode engine
then computes the prompt alone and differs as well, no KV was wrong: the engines do not compute
alike, so the router compares nothing of this prefill engine any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from math import isfinite
from random import random
from secrets import token_hex
from typing import NamedTuple

import orjson

from router.common.exact_json import dumps, number
from router.fleet.engine import Engine
from router.fleet.kv_protocol import WITHOUT_VLLM_FIELDS
from router.http_client.engine_answer import EngineAnswer
from router.http_client.sse import with_data
from router.openai.answers import Json, choices_of, ids_in, json_events, parse_object
from router.openai.errors import EngineRejectedError, KvDiffersError
from router.proxy.answer_check import PrefillAnswer
from router.proxy.first_token import wants_logprobs
from router.proxy.leg_errors import note_load_failure
from router.proxy.load_failure import LoadFailure
from router.proxy.messages import RETURN_IDS, BodyHalves
from router.proxy.request import COMPLETIONS
from router.proxy.run import Run
from router.proxy.token_ids import FIELDS, ID_FIELDS, MARK, RETURN_TOKEN_IDS

logger = logging.getLogger("disagg_router.proxy")
# Natural logarithms of probabilities.
GREEDY_BOUND = 1.0
LOGPROB_BOUND = 1.0
CHATS = "/v1/chat/completions"
AS_IDS = b'"return_tokens_as_token_ids":true'
CHAT_LOGPROBS = b'"logprobs":true,"top_logprobs":20,' + AS_IDS
COMPLETION_LOGPROBS = b'"logprobs":20,' + AS_IDS
LOGPROBS, LOGPROBS_KEY = frozenset(("logprobs",)), b'"logprobs"'
LOGPROB_FIELDS = frozenset(("logprobs", "top_logprobs", "return_tokens_as_token_ids"))
# vLLM samples below this as at 0.
GREEDY_TEMPERATURE = 1e-5
# Engines report tokens that they cannot sample with -9999.
MASKED = -1000.0
# Seconds in which the prefill leg beside a decode leg has to answer, once the latter has begun to.
# The decode engine had to wait for the whole prompt's KV, so it usually has.
PREFILL_ANSWER_TIMEOUT_S = 1.0
# Engines return the ids of the prompt as well, so a longer prompt is not compared by ids.
MAX_TOKENS_WITH_IDS = 16_384
PART_OF_CHARACTER = "\ufffd"
# A request with a value in one of these fields is not compared.
EXCLUDED = frozenset(
    (
        "allowed_token_ids", "bad_words", "echo", "guided_choice", "guided_grammar",
        "guided_json", "guided_regex", "logit_bias", "logits_processors", "logprob_token_ids",
        "min_completion_tokens", "min_tokens", "prompt_logprobs", "structured_outputs",
        "thinking_token_budget", "vllm_xargs",
    )
)  # fmt: skip
FREE_TOOL_CHOICES = (None, "auto", "none")
BAD_REQUEST = frozenset((400, 422))
DIFFERS = "the decode engine's first token is not the one that the prefill engine computed"


class FirstToken(NamedTuple):
    """The first token of an answer, and what the engine has reported of its probability.

    `logprobs` are those of this token and of the likeliest ones, by name. `rest` is an upper bound
    of all others, None without a list.
    """

    name: str
    logprobs: Mapping[str, float] = {}
    rest: float | None = None


def difference(prefilled: FirstToken, decoded: FirstToken, is_greedy: bool) -> float | None:
    """Return by how many bounds two engines differ, at least: more than 1 is too much. None if they
    cannot be compared."""
    found: list[float] = []
    if prefilled.logprobs and decoded.logprobs:
        best = max(prefilled.logprobs, key=prefilled.logprobs.__getitem__)
        most = decoded.logprobs.get(best, decoded.rest)
        if most is not None:
            gap = prefilled.logprobs[best] - most
            found.append((abs(gap) if best in decoded.logprobs else gap) / LOGPROB_BOUND)
    if is_greedy:
        most = prefilled.logprobs.get(decoded.name, prefilled.rest)
        if prefilled.name == decoded.name:
            found.append(0.0)
        elif most is not None and prefilled.name in prefilled.logprobs:
            found.append((prefilled.logprobs[prefilled.name] - most) / GREEDY_BOUND)
    return max(found, default=None)


def choose_canary(run: Run) -> Canary | None:
    """Return the canary of a request whose first token is to be compared, else None."""
    request, body = run.request, run.request.body
    is_sampled = random() < run.gateway.limits.kv_canary or (
        bool(run.gateway.fleet.unreachable_pairs.failing)
    )
    temperature = number(body.get("temperature"))
    is_greedy = body.get("top_k") == 1 or (
        isinstance(temperature, (int, float)) and temperature < GREEDY_TEMPERATURE
    )
    if not (is_sampled or (is_greedy and request.tokens <= MAX_TOKENS_WITH_IDS)):
        return None
    path = request.path or request.exchange.endpoint
    if request.is_several or path not in (CHATS, COMPLETIONS) or not _is_comparable(body):
        return None
    is_asked = wants_logprobs(body.get("logprobs"))
    if not is_asked and not LOGPROB_FIELDS.isdisjoint(body):
        return None
    fields = b"" if is_asked else COMPLETION_LOGPROBS if path == COMPLETIONS else CHAT_LOGPROBS
    decode_fields = fields if is_sampled or is_asked else RETURN_IDS
    if decode_fields == RETURN_IDS and body.get(RETURN_TOKEN_IDS) is True:
        decode_fields = b""  # the client gets them, too
    return Canary(is_greedy, fields, decode_fields)


def make_test_canary(has_logprobs: bool) -> Canary:
    """Return the canary of a completion with temperature 0. Token ids can only agree; tokens that
    differ need log-probabilities, for which vLLM compiles a kernel at the first such request."""
    fields = COMPLETION_LOGPROBS if has_logprobs else RETURN_IDS
    return Canary(True, fields, fields)


def _is_comparable(body: Json) -> bool:
    if not EXCLUDED.isdisjoint(body) and any(body.get(name) for name in EXCLUDED):
        return False
    shape = body.get("response_format")
    return (
        (not shape or shape == {"type": "text"})
        and body.get("tool_choice") in FREE_TOOL_CHOICES
        and body.get("repetition_penalty") in (None, 1)
    )


class Canary:
    """The canary of one request, with all of its legs.

    `has_agreed`: the decode engine that answers has the prefill engine's first token. `is_unsure`:
    it has another one, and nothing shows how likely that is.
    """

    __slots__ = ("_adds", "_decode_fields", "_expected", "_has_differed", "_is_greedy",
                 "_is_prefilled", "_prefill_fields", "_prefiller", "has_agreed",
                 "is_unsure")  # fmt: skip

    def __init__(self, is_greedy: bool, prefill_fields: bytes, decode_fields: bytes) -> None:
        self._is_greedy = is_greedy
        self._prefill_fields, self._decode_fields = prefill_fields, decode_fields
        self._prefiller: Engine | None = None
        self._expected: FirstToken | None = None
        self._is_prefilled = asyncio.Event()
        # The router added its fields to the decode leg, so it takes them out of the answer.
        self._adds = False
        self._has_differed = self.has_agreed = self.is_unsure = False

    def prefill_body(self, engine: Engine, body: BodyHalves, is_usable: bool) -> BodyHalves:
        """Return the body of a prefill leg. `is_usable`: its token is the answer's first one, and
        the decode engine computes it again."""
        self._prefiller = self._expected = None
        self._is_prefilled.clear()
        peer = engine.capabilities
        if not is_usable or peer.lacks_canary or peer.kv_peer.protocol in WITHOUT_VLLM_FIELDS:
            return body
        self._prefiller = engine
        return _with_fields(body, self._prefill_fields)

    def note_prefilled(self, answer: PrefillAnswer) -> None:
        """Take the first token from a prefill engine's answer."""
        if self._prefiller is not None:
            content = parse_object(answer.raw)
            self._expected = None if content is None else _first_token_in([content])
        self._is_prefilled.set()

    def compares(self, loads_kv: bool) -> bool:
        """Return True if the next decode leg is compared. `loads_kv`: its engine loads the KV that
        the prefill engine computes, or has computed."""
        self.has_agreed = False
        is_known = self._expected is not None or not self._is_prefilled.is_set()
        return self._prefiller is not None and is_known and (loads_kv or self._has_differed)

    def decode_body(self, body: BodyHalves) -> BodyHalves:
        """Return the body of a decode leg that is compared."""
        fields = self._decode_fields
        # Another feature may want the ids as well, and then takes them itself.
        self._adds = bool(fields) and not (fields == RETURN_IDS and body[1].find(RETURN_IDS) >= 0)
        return _with_fields(body, fields if self._adds else b"")

    async def check(self, run: Run, engine: Engine, answer: EngineAnswer, loads_kv: bool) -> None:
        """Compare the beginning of a decode engine's answer, and let the client get no more than it
        asked for. An answer that is no stream must be complete. Raises KvDiffersError."""
        if not self._is_prefilled.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_prefilled.wait(), PREFILL_ANSWER_TIMEOUT_S)
        expected, prefiller, raw = self._expected, self._prefiller, answer.peek()
        assert prefiller is not None
        whole = None if answer.is_event_stream else parse_object(raw)
        found = _first_token_in([content for _, content in json_events(raw)] + [whole or {}])
        worst = None
        if expected is not None and found is not None:
            worst = difference(expected, found, self._is_greedy)
            self.is_unsure = worst is None
        metrics = run.gateway.metrics
        if worst is None:
            metrics.kv_canary.add(("not_comparable",))
        elif worst <= 1:
            metrics.kv_canary.add(("agreed",))
            self.has_agreed = loads_kv
        elif loads_kv:
            metrics.kv_canary.add(("disagreed",))
            self._has_differed = True
            run.request.body = {**run.request.body, "cache_salt": token_hex(16)}
            run.bodies = run.bodies.of(run.request.body)
            note_load_failure(run, engine, LoadFailure(True, prefiller.name, DIFFERS, True))
            # The decode engine has answered, so it has read the KV.
            run.request.record.first_byte = answer.first_body_at
            run.stop_holding(is_read=True)
            raise KvDiffersError(DIFFERS, is_of_pair=True)
        else:
            self._note_unlike(run, prefiller, engine)
        if self._adds:
            self._take_out(answer, whole)

    def _note_unlike(self, run: Run, prefiller: Engine, decoder: Engine) -> None:
        run.gateway.metrics.kv_canary.add(("engines_differ",))
        prefiller.capabilities.lacks_canary = True
        run.gateway.fleet.unreachable_pairs.forget(prefiller.name)
        logger.warning(
            "decode engine %s, which computed a prompt alone, and prefill engine %s do not compute "
            "the same first token, so the router cannot find wrong KV of that prefill engine",
            decoder.name,
            prefiller.name,
        )

    def withdraw(self, run: Run, error: EngineRejectedError) -> bool:
        """Compare nothing of a request that an engine has refused. Return True if the canary's
        fields may be the reason, so that the request is to be sent again without them."""
        run.canary = None
        prefiller = self._prefiller
        if prefiller is None or error.status not in BAD_REQUEST or run.request.exchange.started:
            return False
        return bool(self._prefill_fields)

    def note_refused(self) -> None:
        """The request that an engine had refused was answered without the canary's fields."""
        if self._prefiller is not None:
            self._prefiller.capabilities.lacks_canary = True

    def _take_out(self, answer: EngineAnswer, whole: Json | None) -> None:
        """Remove the fields that the canary asked for from an answer. `whole`: its content, None
        for a stream."""
        has_ids = self._decode_fields == RETURN_IDS
        if whole is not None:
            names = ID_FIELDS if has_ids else LOGPROBS
            for part in (whole, *choices_of(whole)):
                part.update(dict.fromkeys(names & part.keys()))
            raw = dumps(whole)
            answer.replace_body(raw)
            answer.checked = raw if answer.checked else b""
            return
        clear, before = _without_ids if has_ids else _without_logprobs, answer.watch
        answer.watch = clear if before is None else lambda block: clear(before(block))


def _with_fields(body: BodyHalves, fields: bytes) -> BodyHalves:
    return (body[0], b"%b,%b}" % (body[1][:-1], fields)) if fields else body


def _first_token_in(contents: list[Json]) -> FirstToken | None:
    """Return the first token of the first event, or of the whole answer, that has one."""
    for content in contents:
        for choice in choices_of(content):
            found = _logged_token(choice.get("logprobs"))
            if found is None and (ids := ids_in(choice.get("token_ids"))):
                found = FirstToken(f"token_id:{ids[0]}")
            if found is not None:
                return found
    return None


def _logged_token(logprobs: object) -> FirstToken | None:
    """Read the log-probabilities of a choice. They may be anything."""
    if not isinstance(logprobs, dict):
        return None
    try:
        if logprobs.get("content"):
            first = logprobs["content"][0]
            name, value = str(first["token"]), float(first["logprob"])
            listed = [(one["token"], one["logprob"]) for one in first["top_logprobs"] or ()]
        else:
            name, value = str(logprobs["tokens"][0]), float(logprobs["token_logprobs"][0])
            listed = [*(logprobs["top_logprobs"] or [{}])[0].items()]
        others = {str(one): float(p) for one, p in listed if one != name and MASKED < p <= 0}
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        return None
    if PART_OF_CHARACTER in name or not isfinite(value):  # several tokens have such a name
        return None
    # The token itself is listed wherever it ranks; the others are the likeliest ones.
    return FirstToken(name, {**others, name: value}, min(others.values(), default=None))


def _without_ids(block: bytes) -> bytes:
    return block if block.find(MARK) < 0 else FIELDS.sub(b"", block)


def _without_logprobs(block: bytes) -> bytes:
    if block.find(LOGPROBS_KEY) < 0:
        return block
    passes, at = b"", 0
    for event, content in json_events(block, at_end=True):
        for choice in choices_of(content):
            if choice.get("logprobs") is not None:
                choice["logprobs"] = None
        try:
            written = with_data(block[event.start : event.end], dumps(content))
        except orjson.JSONEncodeError:  # it can be read, but not written: nested too deep
            continue
        passes += block[at : event.start] + written
        at = event.end
    return passes + block[at:]
