"""The two bodies that one request becomes, and what a prefiller's answer says. Pure functions.

Everything that is not named here goes to both engines as the client sent it: both must tokenize
the same prompt.
"""

from __future__ import annotations

from typing import Any

import orjson

from router.flows.prefilled import Params

Body = dict[str, Any]
KV_PARAMS = "kv_transfer_params"
EXTRA_ARGS = "vllm_xargs"

# What a prefiller needs to keep its blocks for a decoder (vLLM's NixlConnector, pull mode).
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Of the last turn's decoder, whose params then say where its blocks are (bidirectional mode).
PULL_TURN = {"do_remote_decode": True, "do_remote_prefill": False}
THRESHOLD = "cache_hit_threshold"
DROPPED_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens", "n")
ONE_TOKEN = {"max_tokens": 1, "stream": False, KV_PARAMS: PREFILL_PARAMS}


def has_params(body: Body) -> bool:
    return KV_PARAMS in body or _has_nested_params(body)


def without_params(body: Body) -> Body:
    """The body without kv_transfer_params, wherever an engine would read them."""
    if not has_params(body):
        return body
    rest = {name: value for name, value in body.items() if name != KV_PARAMS}
    if _has_nested_params(rest):
        extra = rest[EXTRA_ARGS]
        rest[EXTRA_ARGS] = {name: extra[name] for name in extra if name != KV_PARAMS}
    return rest


def _has_nested_params(body: Body) -> bool:
    extra = body.get(EXTRA_ARGS)
    return isinstance(extra, dict) and KV_PARAMS in extra


def prefill_body(body: Body, last_turn: Body | None = None) -> Body:
    """One token, not streamed, once: the prefiller computes the prompt and keeps its blocks.

    `last_turn` are a decoder's params, from which the prefiller pulls what it need not compute.
    """
    leg = {**body, **ONE_TOKEN}
    for name in DROPPED_FOR_PREFILL:
        leg.pop(name, None)
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    if last_turn is not None:
        leg[KV_PARAMS] = {**last_turn, **PULL_TURN}
    return leg


def decode_body(body: Body, params: Params | None) -> Body:
    return body if params is None else {**body, KV_PARAMS: params.fragment}


def whole_body(body: Body) -> Body:
    """The same request without streaming."""
    return {**{name: body[name] for name in body if name != "stream_options"}, "stream": False}


def with_threshold(body: Body, threshold: float) -> Body:
    return {**body, THRESHOLD: threshold}


def message_in(answer: bytes) -> str:
    """What an engine's error object says, as ": text", or nothing."""
    try:
        error = orjson.loads(answer)["error"]
        message = error["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return ""
    return f": {message[:1000]}" if isinstance(message, str) else ""


def why_decode_only(body: Body) -> str | None:
    """Why this request cannot be prefilled elsewhere in pull mode, or None when it can.

    The prefiller frees its blocks when the first reader is done, so only a request that becomes
    exactly one sequence may have its blocks pulled.
    """
    if body.get("n") not in (None, 1):
        return "n"
    if body.get("best_of") not in (None, 1):
        return "best_of"
    if body.get("use_beam_search"):
        return "beam_search"
    if _count(body.get("prompt")) + _count(body.get("prompt_embeds")) > 1:
        return "prompt_list"
    return None


def _count(prompt: object) -> int:
    """How many sequences a prompt field asks for; a list of token ids is one."""
    if prompt is None:
        return 0
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        return len(prompt)
    return 1
