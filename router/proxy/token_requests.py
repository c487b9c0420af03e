"""Requests of token ids, `/inference/v1/generate` of vLLM: ids in, ids (or text) out.

They take the same way through two engines as completions do. Only their fields are elsewhere: the
prompt is `token_ids`, and all about the answer's length is in `sampling_params`.
"""

from __future__ import annotations

from router.common.exact_json import dumps
from router.openai.errors import BadRequestError
from router.openai.request_fields import MIN_TOKENS
from router.proxy.first_token import wants_logprobs
from router.proxy.gateway import Gateway
from router.proxy.messages import LegBodies
from router.proxy.request import CLIENT_PARAMS, SEVERAL, Body, Request, read_request

GENERATE = "/inference/v1/generate"
SAMPLING = "sampling_params"


async def read_tokens(request: Request, gateway: Gateway) -> None:
    """Read the body of a request of token ids. Raises BadRequestError, NoModelError,
    UnsupportedTypeError."""
    read_request(request, gateway.limits, None, gateway.aliases)
    request.threshold = 0.0
    ids, sampling = request.body.get("token_ids"), request.body.get(SAMPLING)
    if not isinstance(ids, list) or not ids:
        raise BadRequestError("token_ids must be a list of token ids", "token_ids")
    if not isinstance(sampling, dict):
        raise BadRequestError("sampling_params must be an object", SAMPLING)
    gateway.tasks.abortable.add(request)
    if request.decode_only_reason == CLIENT_PARAMS:
        return
    if sampling.get("n") not in (None, 1):
        request.decode_only_reason = SEVERAL
    elif wants_logprobs(sampling.get("prompt_logprobs")):
        request.decode_only_reason = "prompt_logprobs"


class TokenBodies(LegBodies):
    """The bodies of the legs of one such request."""

    __slots__ = ()

    def __init__(self, body: Body) -> None:
        super().__init__({name: body[name] for name in body if name != SAMPLING})
        self._own[SAMPLING] = body[SAMPLING]

    def _one_token(self, least: int = 0) -> list[bytes]:
        sampling = {**self._own[SAMPLING], "max_tokens": 1}
        sampling.pop(MIN_TOKENS, None)
        if least:
            sampling[MIN_TOKENS] = least
        return [b'"stream":false,"%s":%s' % (SAMPLING.encode(), dumps(sampling))]
