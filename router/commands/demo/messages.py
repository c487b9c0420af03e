"""What the demo says to a person."""

from __future__ import annotations

import json
from collections.abc import Sequence

from router.commands.demo.model import Model
from router.commands.demo.options import Options
from router.common.child_processes import Child

JSON = "-H 'Content-Type: application/json'"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
NEXT_QUESTION = "Which river flows through it?"
PATH = "/v1/chat/completions"


def beginning(options: Options, model: Model, threads: int) -> str:
    lines = []
    if model.why_random:
        lines.append(f"No chat model: {model.why_random}")
    if model.is_random:
        lines.append("The model is random: it shows the path of a request and talks gibberish.")
    kind = "vLLM" if options.vllm else "reference"
    cores = f"{threads} thread{'s' * (threads > 1)} each" if options.device == "cpu" else "CUDA"
    lines.append(
        f"Starting {options.prefillers} prefill and {options.decoders} decode engines "
        f"({kind}, {cores}) with {model.name}."
    )
    return "\n".join(lines)


def invitation(url: str, model: Model, children: Sequence[Child]) -> str:
    """`children` are the engines and the router."""
    width = max(len(child.name) for child in children)
    places = "\n".join(f"  {child.name:<{width}}  {child.url}" for child in children)
    first = _curl(url, "-N", _chat(_said("user", QUESTION), stream=True))
    if model.is_random:
        then, second = "Another one, whole:", _curl(url, "-s", _chat(_said("user", "Hello")))
    else:
        history = (_said("user", QUESTION), _said("assistant", ANSWER))
        then = "Its next turn, which computes only what is new:"
        second = _curl(url, "-s", _chat(*history, _said("user", NEXT_QUESTION)))
    return (
        f"\n{places}\n\nReady. Watch it, and chat: {url}/ui\n\n"
        f"Or in another terminal:\n\n{first}\n\n{then}\n\n{second}\n\n"
        f"{url}/ lists the rest. One line for each request follows here. "
        "Ctrl-C stops everything.\n"
    )


def _chat(*messages: dict[str, str], stream: bool = False) -> dict[str, object]:
    body: dict[str, object] = {
        "messages": list(messages),
        "max_tokens": 64,
        "temperature": 0,
        "conversation_id": "mine",
    }
    return {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _curl(url: str, option: str, body: dict[str, object]) -> str:
    return f"  curl {option} {url}{PATH} {JSON} -d '{json.dumps(body)}'"
