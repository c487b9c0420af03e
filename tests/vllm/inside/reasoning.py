"""Runs inside vLLM's environment: what its chat templates get of reasoning in a history, from the
chat endpoint, from /tokenize, and from /tokenize as the router asks it.

python -m tests.vllm.inside.reasoning RESULTS writes rows of [an answer, the three].
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest

from router.proxy.turn_tokens import tokenize_body

try:
    from vllm.renderers.chat_utils import parse_chat_messages
except ImportError:  # 0.31
    from vllm.entrypoints.chat_utils import parse_chat_messages

ABSENT = object()
VALUES = (ABSENT, None, "", "hm", "other")
CONFIG: Any = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)


def templates_messages(kind: Any, body: dict[str, Any]) -> Any:
    messages = kind(**json.loads(json.dumps(body))).messages
    return parse_chat_messages(messages, CONFIG, "string")[0]


def rows() -> list[Any]:
    found = []
    for reasoning in VALUES:
        for other in VALUES:
            given = {"reasoning": reasoning, "reasoning_content": other}
            said = {name: value for name, value in given.items() if value is not ABSENT}
            answer = {"role": "assistant", "content": "\nYes", **said}
            body = {"model": "m", "messages": [{"role": "user", "content": "?"}, answer]}
            asked = tokenize_body(body)
            assert asked is not None
            chat = templates_messages(ChatCompletionRequest, body)
            plain = templates_messages(TokenizeChatRequest, body)
            found.append([answer, chat, plain, templates_messages(TokenizeChatRequest, asked)])
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(rows()))
