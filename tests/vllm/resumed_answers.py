"""Answers that begin in the middle, as a router asks for them, and what was said."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine_ext.common.resume_payload import KEY, ResumePayload, read_resume_payload
from tests.integration.oracle import NOISE
from tests.integration.processes import Server

PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False, "hand_over": True}
TOP = 3


@dataclass(frozen=True)
class Said:
    """By one answer, streamed or not."""

    text: str
    tokens: tuple[int, ...]
    scores: tuple[Any, ...]
    """A token's name, its log-probability, and those of the likeliest by name."""
    finish_reason: str | None
    stop_reason: Any
    usage: dict[str, int]
    roles: int = 0
    """How often it was said who speaks."""

    def behind(self, other: "Said") -> "Said":
        """What is left to say when `other` was said."""
        assert self.text.startswith(other.text)
        return Said(
            self.text[len(other.text) :],
            self.tokens[len(other.tokens) :],
            self.scores[len(other.scores) :],
            self.finish_reason,
            self.stop_reason,
            self.usage,
        )


def body_of(kind: str, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    if kind == "chat":
        text = prompt if isinstance(prompt, str) else bytes(prompt).decode("latin1")
        body |= {"messages": [{"role": "user", "content": text}]}
        return {**body, "logprobs": True, "top_logprobs": TOP, **fields}
    return {**body, "prompt": prompt, "logprobs": TOP, **fields}


def ask(server: Server, kind: str, body: dict[str, Any]) -> Said:
    response = server.post(PATHS[kind], body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return _said(response.json()["choices"], response.json()["usage"])
    *events, end, rest = response.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", ""), response.text
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert not [chunk for chunk in chunks if "error" in chunk], response.text
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return _said(choices, usage)


def streamed(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def begin(body: dict[str, Any], begun: ResumePayload, params: Any = None) -> dict[str, Any]:
    return {**body, "kv_transfer_params": {**(params or {}), KEY: begun.to_wire()}}


def prompt_ids(server: Server, kind: str, body: dict[str, Any]) -> tuple[int, ...]:
    """As an engine renders it."""
    whole = {key: value for key, value in body.items() if not key.startswith("stream")}
    answer = server.post(PATHS[kind], {**whole, "max_tokens": 1}).json()
    holder = answer if kind == "chat" else answer["choices"][0]
    return tuple(holder["prompt_token_ids"])


def hand_over(server: Server, kind: str, body: dict[str, Any]) -> tuple[dict[str, Any], Said]:
    """The P leg, asked for what it has sampled: its params, and what it said."""
    whole = {key: value for key, value in body.items() if not key.startswith("stream")}
    asked = {**whole, "max_tokens": 1, "kv_transfer_params": HAND_OVER}
    response = server.post(PATHS[kind], asked)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["kv_transfer_params"], _said(answer["choices"], answer["usage"])


def taken_over(params: dict[str, Any], said: Said, spoken: int = 0) -> dict[str, Any]:
    """What a router makes of P's answer for D: the log-probabilities that P said."""
    begun = read_resume_payload(params)
    assert begun is not None
    assert begun.output_token_ids == said.tokens
    given = ResumePayload(
        begun.prompt_token_ids,
        begun.output_token_ids,
        spoken,
        tuple(pairs(score) for score in said.scores[spoken:]),
    )
    return {**params, KEY: given.to_wire(), "retain": False}


def pairs(score: Any) -> tuple[tuple[int, float], ...]:
    name, value, top = score
    own = (_token(name), value)
    return (own, *((_token(each), chance) for each, chance in top.items()))


def differ(one: Said, other: Said) -> list[str]:
    """What of them differs."""
    found = [
        f"{name}: {getattr(one, name)!r} {getattr(other, name)!r}"
        for name in ("text", "tokens", "finish_reason", "stop_reason", "usage")
        if getattr(one, name) != getattr(other, name)
    ]
    scores = zip(one.scores, other.scores, strict=False)
    far = [pair for pair in scores if not _alike(*pair)]
    if len(one.scores) != len(other.scores) or far:
        found.append(f"log-probabilities: {len(one.scores)} {len(other.scores)} {far}")
    return found


def _alike(one: Any, other: Any) -> bool:
    if one[0] != other[0] or one[2].keys() != other[2].keys():
        return False
    chances = [(one[1], other[1]), *((one[2][name], other[2][name]) for name in one[2])]
    return all(abs(a - b) <= NOISE for a, b in chances)


def _said(choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> Said:
    scores = [score for choice in choices for score in _scores(choice.get("logprobs"))]
    ends = [choice for choice in choices if choice.get("finish_reason")]
    assert len(ends) == 1, choices
    return Said(
        "".join(_text(choice) for choice in choices),
        tuple(token for choice in choices for token in choice.get("token_ids") or ()),
        tuple(scores),
        ends[0]["finish_reason"],
        ends[0].get("stop_reason"),
        {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        sum("role" in choice.get("delta", ()) for choice in choices),
    )


def _text(choice: dict[str, Any]) -> str:
    said = choice.get("message") or choice.get("delta")
    return choice["text"] if said is None else said.get("content") or ""


def _scores(logprobs: Any) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return [
            (one["token"], one["logprob"], {t["token"]: t["logprob"] for t in one["top_logprobs"]})
            for one in logprobs["content"] or ()
        ]
    parts = ("tokens", "token_logprobs", "top_logprobs")
    return list(zip(*(logprobs[part] for part in parts), strict=True))


def _token(name: str) -> int:
    return int(name.removeprefix("token_id:"))
