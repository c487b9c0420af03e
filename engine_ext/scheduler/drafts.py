"""P in push mode: how far a prompt's KV stands in its blocks, told while the rest is computed.

It counts while the request keeps these blocks. When it has lost them, an empty draft says so, and
what comes then is another attempt's.
"""

from dataclasses import dataclass

from engine_ext.common.prefix_hashes import digest
from engine_ext.common.types import BlockIds, EngineRequest, PushOffer
from engine_ext.scheduler.orders import Orders


@dataclass(slots=True)
class _DraftedPrompt:
    request: EngineRequest
    num_tokens: int
    """Of the request as it came."""
    transfer_id: str | None
    attempt: int = 0
    last: PushOffer | None = None
    """What was told of it."""

    @property
    def num_told(self) -> int:
        """Tokens, in this attempt."""
        return self.last.num_tokens if self.last else 0


class Drafts:
    """One per engine. Writes into `orders` what the worker half is to know."""

    def __init__(self, orders: Orders, block_size: int) -> None:
        self._orders = orders
        self._block_size = block_size
        self._prompts: dict[str, _DraftedPrompt] = {}

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._prompts

    def expect(self, request: EngineRequest, transfer_id: str | None) -> None:
        prompt = _DraftedPrompt(request, len(request.token_ids), transfer_id)
        self._prompts[request.request_id] = prompt

    def computed(self, request_id: str, block_ids: BlockIds, num_tokens: int) -> None:
        """The KV of the request's first `num_tokens` tokens stands in its blocks."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return
        num_blocks = min(num_tokens, prompt.num_tokens) // self._block_size
        if num_blocks * self._block_size <= prompt.num_told:
            return
        content = prompt.last.digest if prompt.last else self._digest(prompt)
        if content is None:
            del self._prompts[request_id]
            return
        blocks = tuple(group[:num_blocks] for group in block_ids)
        self._tell(prompt, blocks, num_blocks * self._block_size, content)

    def lost(self, request_id: str) -> None:
        """The request has no blocks any more, or others."""
        prompt = self._prompts.get(request_id)
        if prompt is not None and prompt.last is not None and prompt.num_told:
            prompt.attempt += 1
            self._tell(prompt, (), 0, prompt.last.digest)

    def attempt_of(self, request_id: str) -> int:
        prompt = self._prompts.get(request_id)
        return prompt.attempt if prompt else 0

    def forget(self, request_id: str) -> bool:
        """The request has ended. True: something was told of it, and may be read from its
        blocks."""
        prompt = self._prompts.pop(request_id, None)
        return prompt is not None and prompt.last is not None

    @staticmethod
    def _digest(prompt: _DraftedPrompt) -> bytes | None:
        keys = prompt.request.content_keys
        if keys is None:
            return None
        return digest(prompt.request.token_ids, keys, prompt.num_tokens)

    def _tell(
        self, prompt: _DraftedPrompt, blocks: BlockIds, num_tokens: int, content: bytes
    ) -> None:
        prompt.last = PushOffer(
            prompt.request.request_id,
            blocks,
            num_tokens,
            content,
            prompt.transfer_id,
            prompt.attempt,
        )
        self._orders.drafts.append(prompt.last)
