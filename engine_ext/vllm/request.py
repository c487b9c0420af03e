"""A vLLM request as the core reads it."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.request import Request, RequestStatus

from engine_ext.base.types import FinishStatus

_STATUS = {
    RequestStatus.FINISHED_STOPPED: FinishStatus.STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishStatus.LENGTH_CAPPED,
    RequestStatus.FINISHED_ABORTED: FinishStatus.ABORTED,
}


class RequestView:
    """Reads through: nothing is copied."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def request_id(self) -> str:
        return str(self._request.request_id)

    @property
    def kv_transfer_params(self) -> Any:
        return self._request.kv_transfer_params

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Empty for a prompt of embeddings: nothing can be proven of it, so nothing is loaded."""
        return self._request.prompt_token_ids or ()

    @property
    def token_ids(self) -> Sequence[int]:
        return list(self._request.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return int(self._request.num_prompt_tokens)

    @property
    def num_computed_tokens(self) -> int:
        return int(self._request.num_computed_tokens)

    @property
    def finish_status(self) -> FinishStatus:
        return _STATUS.get(self._request.status, FinishStatus.ERROR)
