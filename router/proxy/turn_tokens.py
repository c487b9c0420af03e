"""The token ids of prompts, which prove how much of a stock engine's retained KV a turn may use.

A stock prefill engine reads retained KV by position. So the router offers it only the blocks whose
tokens are those of the new prompt (`TurnReuse.offer`), and needs the ids of both turns:

* Those of the last turn come with its answer (`return_token_ids`). The router keeps digests of them
  and hides the ids from a client that has not asked for them.
* Those of the prompt come from `POST /tokenize`, before the prefill leg. The ids then *are* the
  prompt of a chat's legs (`kv_transfer_params.prompt_token_ids`, vLLM 0.31 and newer), so that no
  engine renders the messages anew, maybe with another date.

`/tokenize` does not render every prompt as the chat endpoint does: it lacks some fields, and some
models have a renderer of their own there. So its ids count only if they were equal to those of a
chat that the engine has answered. Chats are alike, for this, if they have the same fields besides
messages and sampling, and messages of the same kinds (`_shape_of`). The first chat of a shape is
tokenized beside its answer and compared; until that has ended well, no KV is offered.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import orjson

from router.common.exact_json import dumps
from router.conversations.entry import RENDERING_FIELDS
from router.fleet.engine import Engine
from router.fleet.token_proofs import TokenProof
from router.http_client.errors import UpstreamError
from router.openai.answers import ids_in, parse_object
from router.openai.errors import BadRequestError
from router.proxy.answer_check import PrefillAnswer
from router.proxy.request import Body, Request
from router.proxy.run import Run
from router.proxy.side_requests import send_side_request
from router.proxy.token_ids import MARK, prompt_ids_in

TOKENIZE = "/tokenize"
TOKENS = "tokens"
# The ids of two million tokens.
MAX_TOKENS_BYTES = 16 * 1024 * 1024
# What /tokenize reads of a chat's body, and of a completion's.
CHAT_FIELDS = ("model", "messages", "tools", *RENDERING_FIELDS)
TEXT_FIELDS = ("model", "prompt", "add_special_tokens")
# Fields that change the prompt and that /tokenize does not know.
NOT_TOKENIZED = (
    "documents", "echo", "mm_processor_kwargs", "prompt_embeds", "truncate_prompt_tokens",
    "truncation_side",
)  # fmt: skip
# Fields that do not change the prompt.
# fmt: off
NOT_IN_PROMPT = frozenset((
    "messages", "prompt", "stream", "stream_options", "conversation_id", "conversation_stream",
    "max_tokens", "max_completion_tokens", "min_tokens", "n", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "prompt_logprobs",
    "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "user", "metadata", "store", "service_tier", "priority",
    "request_id", "session_id", "prompt_cache_key", "safety_identifier", "cache_salt",
    "cache_hit_threshold", "return_token_ids", "include_reasoning", "parallel_tool_calls",
    "stream_interval", "vllm_xargs", "allowed_token_ids", "bad_words", "length_penalty",
    "thinking_token_budget",
))
# fmt: on
PLAIN_ROLES = frozenset(("system", "developer", "user", "assistant"))
PLAIN_KEYS = frozenset(("role", "content"))


def wants_token_ids(run: Run) -> bool:
    """Return True if engines are to report the token ids of this turn: its decode engine may retain
    KV that nothing else proves."""
    reuse, request = run.plan.reuse, run.request
    if reuse is None or reuse.unproven != TOKENS or not run.route.decoders:
        return False
    known = run.route.decoders[0].capabilities
    verify = all(one.capabilities.has_turns for one in run.route.prefillers[:1])
    is_stream = request.body.get("stream") is True and not request.exact_stream
    retains = known.streams_kv_params if is_stream else known.retains_turns
    return (
        not ((known.has_turns and verify) or known.lacks_turns or retains is False)
        and (run.retains_turn or reuse.entry is not None)
        and not reuse.turn.prompt.has_media
    )


async def find_prompt_ids(run: Run, prefiller: Engine) -> None:
    """Find out the ids of the prompt if they decide what the prefill engine may read, and make them
    the prompt of both legs. Leaves `run.prompt_ids` at None if they cannot be proven."""
    reuse = run.plan.reuse
    if run.prompt_ids is not None or reuse is None or run.is_turn_spent:
        return
    if run.resume.continued is not None:  # the prompt has a part of the answer
        return
    if not reuse.needs_tokens(prefiller):
        return
    body = run.request.body
    if _is_changed_by_engines(body):
        return
    if reuse.turn.prompt.kind == TOKENS and isinstance(reuse.turn.prompt.content, list):
        run.take_prompt_ids(reuse.turn.prompt.content)
        return
    proof = run.gateway.token_proofs.find(prefiller.group, _shape_of(body))
    if proof is None:
        return
    if proof.task is not None:
        await asyncio.shield(proof.task)
    if proof.is_equal:
        ids = await _tokenize(run.request, proof.engine)
        run.take_prompt_ids(ids)
        if ids is not None and "messages" in body:
            run.bodies.prompt_ids = orjson.dumps(ids)


def check_prompt_ids(run: Run, prefiller: Engine, prefilled: PrefillAnswer) -> bool:
    """Compare the ids that a prefill engine reports for its prompt with those from /tokenize.

    Return False unless they are equal, if KV was offered by them: the engine has read KV of other
    tokens. The first prompt of a shape is tokenized now, beside its decode leg.
    """
    if not run.bodies.asks_prefiller_for_ids:
        return True
    content = parse_object(prefilled.raw) if prefilled.raw.find(MARK) >= 0 else None
    run.prefilled_ids = ids = None if content is None else prompt_ids_in(content)
    proofs, body = run.gateway.token_proofs, run.request.body
    if run.prompt_ids is not None and run.offer.params is not None:
        if ids == run.prompt_ids:
            return True
        run.gateway.throttle.warn(
            "a prefill engine computed another prompt than /tokenize reported, so turns of this "
            "kind reuse no KV",
            prefiller.name,
        )
        proof = TokenProof(prefiller, prefiller.capabilities)
        proofs.add(prefiller.group, _shape_of(body), proof)
        return False
    if ids is None or run.resume.continued is not None:
        return True
    shape = _shape_of(body)
    if proofs.find(prefiller.group, shape) is not None:
        return True
    proof = TokenProof(prefiller, prefiller.capabilities)
    proof.task = run.gateway.tasks.spawn(_prove(run.request, proof, ids))
    proofs.add(prefiller.group, shape, proof)
    return True


async def _prove(request: Request, proof: TokenProof, ids: Sequence[int]) -> None:
    """Compare what /tokenize reports for a prompt with the `ids` that its engine has computed."""
    tokenized = await _tokenize(request, proof.engine)
    proof.is_equal, proof.is_known = tokenized == ids, tokenized is not None
    proof.task = None


async def _tokenize(request: Request, engine: Engine) -> list[int] | None:
    """Return the ids of a prompt, None if the engine does not report them."""
    body = tokenize_body(request.body)
    if body is None:
        return None
    try:
        answer = await send_side_request(request, engine, TOKENIZE, body, TOKENS, MAX_TOKENS_BYTES)
    except (UpstreamError, BadRequestError):
        return None
    content = parse_object(answer.body) if answer.status == 200 else None
    return None if content is None else ids_in(content.get(TOKENS))


def _is_changed_by_engines(body: Body) -> bool:
    """Return True if engines compute other tokens than those that are sent or tokenized."""
    return any(body.get(name) not in (None, False) for name in NOT_TOKENIZED)


def tokenize_body(body: Body) -> Body | None:
    """Return the body for /tokenize, None for a prompt that it would render in another way."""
    if _is_changed_by_engines(body):
        return None
    names = CHAT_FIELDS if "messages" in body else TEXT_FIELDS
    asked = {name: body[name] for name in names if body.get(name) is not None}
    if isinstance(messages := asked.get("messages"), list):
        asked["messages"] = [*map(_with_one_reasoning, messages)]
    effort = body.get("reasoning_effort")
    if effort is not None and "messages" in body:
        # What vLLM's chat endpoint hands to the template.
        given = asked.get("chat_template_kwargs")
        given = given if isinstance(given, dict) else {}
        thinks = {"enable_thinking": effort != "none"}
        asked["chat_template_kwargs"] = {**thinks, **given, "reasoning_effort": effort}
    return asked


def _with_one_reasoning(message: object) -> object:
    """Return a message as vLLM's chat endpoint reads it. /tokenize ignores `reasoning_content`."""
    if not isinstance(message, dict) or "reasoning_content" not in message:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    if rest.get("reasoning") is None:
        rest["reasoning"] = message["reasoning_content"]
    return rest


def _shape_of(body: Body) -> str:
    """Return a digest of what makes two prompts different in kind, besides their texts."""
    fields = {name: value for name, value in body.items() if name not in NOT_IN_PROMPT}
    messages = body.get("messages")
    kinds = set(map(_kind_of, messages)) if isinstance(messages, list) else {"text"}
    written = dumps([fields, sorted(kinds)], orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(written, digest_size=16).hexdigest()


def _kind_of(message: object) -> str:
    if not isinstance(message, dict):
        return "?"
    keys, content = message.keys(), message.get("content")
    if keys <= PLAIN_KEYS and isinstance(content, str) and message.get("role") in PLAIN_ROLES:
        return ""
    present = sorted(name for name in keys if message[name] not in (None, "", [], {}))
    return f"{message.get('role')} {type(content).__name__} {' '.join(map(str, present))}"
