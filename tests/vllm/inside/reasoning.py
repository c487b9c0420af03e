"""Runs inside vLLM's environment: of the reasoning in a history, a chat template gets as much from
/tokenize, as the router asks it, as from the chat endpoint."""

import json
from itertools import product
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.renderers.chat_utils import parse_chat_messages

from router.proxy.turn_tokens import tokenize_body

CONFIG: Any = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)


def templates_messages(kind: Any, body: Any) -> Any:
    messages = kind(**json.loads(json.dumps(body))).messages  # vLLM changes what it is given
    return parse_chat_messages(messages, CONFIG, "string")[0]


if __name__ == "__main__":
    for values in product(("absent", None, "", "hm", "other"), repeat=2):
        names = zip(("reasoning", "reasoning_content"), values, strict=True)
        given = {name: value for name, value in names if value != "absent"}
        answer = {"role": "assistant", "content": "\nYes", **given}
        body = {"model": "m", "messages": [{"role": "user", "content": "?"}, answer]}
        read = templates_messages(ChatCompletionRequest, body)
        assert templates_messages(TokenizeChatRequest, tokenize_body(body)) == read, given
        is_ignored = values[0] in ("absent", None) and values[1] not in ("absent", None)
        assert (templates_messages(TokenizeChatRequest, body) != read) is is_ignored, given
