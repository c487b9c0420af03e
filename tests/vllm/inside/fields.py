"""Runs inside vLLM's environment: what the router refuses for its fields, and what vLLM does.

python -m tests.vllm.inside.fields RESULTS writes one row a body: [is it a chat, the body, the
router's words, vLLM's words], empty for none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from router.openai.request_fields import find_invalid_field

CONTEXT, PROMPT = 100, 5
NUMBERS: list[Any] = [
    "abc", "5", "5.0", "1e1", " 5 ", "inf", "nan", "1_0", "", 0, -1, 1, 5, 5.0, 1.5, True, False,
    [], [5], {}, None, 100, 101, 10**30, 1e300,
]  # fmt: skip
STREAMS: list[Any] = [None, True, False, "yes", "TRUE", "perhaps", 2, 1, 0, 0.0, []]
OPTIONS: list[Any] = [
    None, {}, {"include_usage": True}, {"include_usage": "maybe"}, {"a": 1}, 1, 0, "", [],
]  # fmt: skip


class Config:
    max_model_len = CONTEXT


def bodies() -> Iterator[dict[str, Any]]:
    for number in NUMBERS:
        for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
            yield {name: number}
        yield {"max_tokens": number, "echo": True}
        for other in NUMBERS:
            yield {"max_tokens": number, "min_tokens": other}
            yield {"max_tokens": number, "max_completion_tokens": other}
    for stream in STREAMS:
        for options in OPTIONS:
            yield {"stream": stream, "stream_options": options}


def vllms_words(is_chat: bool, body: dict[str, Any]) -> str:
    """As its server does it, up to where the engine is asked."""
    try:
        request = (ChatCompletionRequest if is_chat else CompletionRequest)(**body)
        request.build_tok_params(Config)
        asked = request.max_tokens
        if is_chat and request.max_completion_tokens is not None:
            asked = request.max_completion_tokens
        most = CONTEXT - PROMPT if asked is None else min(asked, CONTEXT - PROMPT)
        request.to_sampling_params(most, {})
    except Exception as error:
        return str(error) or repr(error)
    return ""


def rows() -> Iterator[tuple[bool, dict[str, Any], str, str]]:
    for is_chat in (True, False):
        content = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
        for fields in bodies():
            wrong = find_invalid_field({**content, **fields}, is_chat, CONTEXT)
            ours = "" if wrong is None else wrong.message
            yield is_chat, fields, ours, vllms_words(is_chat, {**content, **fields})


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(list(rows())))
