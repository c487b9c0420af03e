"""A stock prefill and decode engine that retain KV. They tokenize as vLLM does, and match KV by
position; `StockPair` compares the tokens in their place."""

import itertools
import json
import zlib
from typing import Any

from jinja2 import Environment

from scripts.mock_engine import DONE, Peer, Received
from tests.moving_templates import TEMPLATES
from tests.unit.router.mock_engine import PARAMS

BLOCK = 16
Ids = list[int]


class StockPair:
    """`wrong` lists the reads of KV of other tokens; `read` and `held` count tokens."""

    def __init__(self, template: str) -> None:
        environment = Environment()
        clock = itertools.count()  # another date each time, as at midnight
        environment.globals["strftime_now"] = lambda form: str(next(clock))
        self._template = environment.from_string(TEMPLATES[template])
        self._retained: dict[str, Ids] = {}
        self.answers = ["fine", "a reply of many words " * 12 + "and an end"]
        self.says_ids = self.takes_ids = self.retains = self.streams_params = True
        self.untold: Ids = []  # tokens of answers whose ids are not reported
        self.changes: Ids = []  # before the prompts of chats, if they are rendered anew
        self.tokenize_status, self.tokenizes_wrongly = 200, False
        self.tokenized: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.read = self.held = 0
        self.prompts: list[Ids] = []

    async def prefill(self, request: Received, peer: Peer) -> None:
        body = request.json
        if request.path == "/tokenize":
            self.tokenized.append(body)
            ids = self.render(body)
            ids = ids[:-1] if self.tokenizes_wrongly else ids
            await peer.answer({"count": len(ids), "tokens": ids}, self.tokenize_status)
            return
        ids, params = self._prompt(body), body["kv_transfer_params"]
        if params.get("remote_block_ids"):
            kept = self._retained.pop(params["remote_request_id"])
            count = params["remote_num_tokens"]
            self.read += count
            self.held += len(kept) - 1
            if kept[:count] != ids[:count] or count >= len(ids):
                self.wrong.append(json.dumps(body.get("messages"))[:200])
        message = {"role": "assistant", "content": "x"}
        choice = {"index": 0, "message": message, "text": "x", "finish_reason": "length"}
        said = {"prompt_token_ids": ids} if body.get("return_token_ids") else {}
        usage = {"prompt_tokens": len(ids)}
        answer = {"id": "1", "choices": [choice], "usage": usage, "kv_transfer_params": PARAMS}
        await peer.answer({**answer, **said})

    async def decode(self, request: Received, peer: Peer) -> None:
        body = request.json
        ids = self._prompt(body)
        self.prompts.append(ids)
        said: dict[str, Any] = {"role": "assistant", "content": self.answers[len(ids) % 2]}
        if body.get("tools") and body["messages"][-1]["role"] == "user":
            call = {"name": "look", "arguments": "{}"}
            said["content"] = None
            said["tool_calls"] = [{"id": "c", "type": "function", "function": call}]
        output = tokens(f"{said['content'] or '<call> look'} <end>")
        if not self.retains or (body.get("stream") and not self.streams_params):
            params = {}
        else:
            params = {"kv_transfer_params": self._retain([*ids, *output, *self.untold])}
        returns = self.says_ids and body.get("return_token_ids")
        head: dict[str, Any] = {"id": "1", "created": 5, "model": "m"}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(output)}
        if not body.get("stream"):
            choice = {"index": 0, "message": said, "text": "fine", "finish_reason": "stop"}
            answer = {**head, "object": "chat.completion", "usage": usage, **params}
            if returns:
                choice["token_ids"], answer["prompt_token_ids"] = output, ids
            await peer.answer({**answer, "choices": [choice]})
            return
        head["object"] = "chat.completion.chunk"
        events = [
            _chunk(head, {"role": "assistant"}, None, {"prompt_token_ids": ids} if returns else {})
        ]
        calls = {"tool_calls": [{"index": 0, **call} for call in said.get("tool_calls", ())]}
        delta = calls if said["content"] is None else {"content": said["content"]}
        own = {"token_ids": output[:-1]} if returns else {}
        events.append(_chunk(head, delta, None, {}, own))
        own = {"token_ids": output[-1:]} if returns else {}
        events.append(_chunk(head, {}, "stop", params, own))
        await peer.stream(*events, DONE)

    def _retain(self, ids: Ids) -> dict[str, Any]:
        name = f"chatcmpl-{len(self._retained)}-{len(ids)}"
        self._retained[name] = ids
        held = len(ids) - 1
        return {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": "decoder-1",
            "remote_block_ids": [list(range(-(-held // BLOCK)))], "remote_request_id": name,
            "remote_host": "10.1.1.1", "remote_port": 5601, "tp_size": 1,
            "remote_num_tokens": held,
        }  # fmt: skip

    def _prompt(self, body: dict[str, Any]) -> Ids:
        if "prompt" in body:
            count: int = body.get("truncate_prompt_tokens", 0)
            return list(body["prompt"][-count:])
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        return given if given and self.takes_ids else [*self.changes, *self.render(body)]

    def render(self, body: dict[str, Any]) -> Ids:
        asked = {"add_generation_prompt": True, **body.get("chat_template_kwargs", {})}
        return tokens(self._template.render(body, **asked))


def tokens(text: str) -> Ids:
    return [zlib.crc32(word.encode()) % 100_000 for word in text.split()]


def _chunk(
    head: dict[str, Any],
    delta: dict[str, Any],
    finish: str | None,
    rest: dict[str, Any],
    own: dict[str, Any] | None = None,
) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **(own or {})}
    return b"data: " + json.dumps({**head, "choices": [choice], **rest}).encode() + b"\n\n"
