"""TensorRT-LLM's disaggregated serving, context first (read in its sources of November 2026).

The context server computes the prompt and the first token, and answers with disaggregated_params,
which name its KV. The generation server gets these, and continues after that token. Both servers
refuse fields that they do not know. Ids from 2^42 on are global; each attempt has a new one.
"""

from __future__ import annotations

from random import randrange
from typing import Any

import msgspec

from router.common.exact_json import dumps
from router.fleet.engine import Engine, Place
from router.fleet.kv_protocol import TRTLLM
from router.http_client.errors import BrokenAnswerError
from router.proxy.answer_check import PrefillAnswer
from router.proxy.kv_protocols.protocol import LegPair, TransferProtocol
from router.proxy.messages import CLIENTS
from router.proxy.ranks import header_line
from router.proxy.request import Request

MIN_GLOBAL_ID, MAX_ID = 1 << 42, 1 << 63
PARAMS = "disaggregated_params"
CHAT = "chat.completion"
# The finish reasons of an answer that the generation server continues.
UNFINISHED = ("length", "not_finished")


class _ContextChoice(msgspec.Struct):
    finish_reason: str | None = None
    disaggregated_params: dict[str, Any] | None = None


class _ContextAnswer(msgspec.Struct):
    object: str
    choices: list[_ContextChoice]
    prompt_token_ids: list[int] | None = None


_decode_answer = msgspec.json.Decoder(_ContextAnswer).decode


class TensorRTLLM(TransferProtocol):
    name = TRTLLM
    runs_together = False

    def pair(self, request: Request, place: Place, decoder: Engine) -> LegPair | None:
        number = randrange(MIN_GLOBAL_ID, MAX_ID)
        params = {"request_type": "context_only", "disagg_request_id": number}
        return LegPair(
            place,
            pinned=header_line(request, place),
            prefill_fields=b'"%s":%s' % (PARAMS.encode(), dumps(params)),
            lengths=CLIENTS,
        )

    def continue_with(self, pair: LegPair, prefilled: PrefillAnswer) -> LegPair | None:
        try:
            answer = _decode_answer(prefilled.raw)
            (choice,) = answer.choices
        except (msgspec.DecodeError, ValueError) as error:
            raise BrokenAnswerError("a context server's answer without its one choice") from error
        if choice.finish_reason not in (None, *UNFINISHED):
            return None
        if choice.disaggregated_params is None:
            raise BrokenAnswerError("a context server's answer without disaggregated_params")
        params = {**choice.disaggregated_params, "request_type": "generation_only"}
        fields: dict[str, Any] = {PARAMS: params}
        if answer.prompt_token_ids is not None and answer.object == CHAT:
            # A chat template may render another prompt a moment later.
            fields["prompt_token_ids"] = answer.prompt_token_ids
        return pair._replace(decode_fields=dumps(fields)[1:-1])
