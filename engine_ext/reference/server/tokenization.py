"""`/tokenize` and `/detokenize`, as vLLM has them."""

from typing import Any

from engine_ext.reference.server import conversation
from engine_ext.reference.server.body import json_object
from engine_ext.reference.server.prompts import check_token_ids
from engine_ext.reference.server.requests import (
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
    parse,
)
from engine_ext.reference.server.served_model import ServedModel


def tokenize(model: ServedModel, body: bytes) -> dict[str, Any]:
    """Of a `prompt`, or of `messages` as a chat would send them to the model."""
    fields = json_object(body)
    request: TokenizeTextBody | TokenizeChatBody
    if "messages" in fields:
        request = parse(TokenizeChatBody, fields)
        text = conversation.render(request, model.chat_template)
    else:
        request = parse(TokenizeTextBody, fields)
        text = request.prompt
    model.check_name(request.model)
    ids = model.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
    names = [model.tokenizer.token_string(token) for token in ids]
    return {
        "count": len(ids),
        "max_model_len": model.max_model_len,
        "tokens": ids,
        "token_strs": names if request.return_token_strs else None,
    }


def detokenize(model: ServedModel, body: bytes) -> dict[str, Any]:
    request = parse(DetokenizeBody, json_object(body))
    model.check_name(request.model)
    check_token_ids(request.tokens, model, "tokens")
    return {"prompt": model.tokenizer.decode(request.tokens)}
