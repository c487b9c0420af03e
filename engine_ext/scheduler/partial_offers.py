"""P in push mode: reports how much of a prompt's KV is in its blocks, while the rest is computed.

A partial offer holds as long as the request keeps these blocks. If the request loses them (it is
preempted), an empty offer reports that, and later offers belong to another attempt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from engine_ext.common.orders import PartialOffer
from engine_ext.common.prefix_hashes import digest
from engine_ext.common.types import BlockIds, EngineRequest
from engine_ext.scheduler.orders import Orders


@dataclass(slots=True)
class _OfferedPrompt:
    request: EngineRequest
    num_tokens: int
    """Tokens of the request on arrival."""
    transfer_id: str | None
    attempt: int = 0
    last: PartialOffer | None = None

    @property
    def num_offered(self) -> int:
        """Tokens that were offered in this attempt."""
        return self.last.num_tokens if self.last else 0


class PartialOffers:
    """One per engine. It writes the offers for the worker half into `orders`."""

    def __init__(self, orders: Orders, block_sizes: Sequence[int]) -> None:
        """`block_sizes`: tokens per block, by KV-cache group."""
        self._orders = orders
        self._block_sizes = block_sizes
        self._step = lcm(*block_sizes)
        self._prompts: dict[str, _OfferedPrompt] = {}

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._prompts

    def expect(self, request: EngineRequest, transfer_id: str | None) -> None:
        prompt = _OfferedPrompt(request, len(request.token_ids), transfer_id)
        self._prompts[request.request_id] = prompt

    def computed(self, request_id: str, block_ids: BlockIds, num_tokens: int) -> None:
        """Note that the KV of the request's first `num_tokens` tokens is in its blocks."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return
        offered = min(num_tokens, prompt.num_tokens) // self._step * self._step
        if offered <= prompt.num_offered:
            return
        content = prompt.last.digest if prompt.last else self._digest(prompt)
        if content is None:
            del self._prompts[request_id]
            return
        sizes = zip(block_ids, self._block_sizes, strict=True)
        blocks = tuple(group[: offered // size] for group, size in sizes)
        self._offer(prompt, blocks, offered, content)

    def lost(self, request_id: str) -> None:
        """Note that the request has lost its blocks, or has other ones."""
        prompt = self._prompts.get(request_id)
        if prompt is not None and prompt.last is not None and prompt.num_offered:
            prompt.attempt += 1
            self._offer(prompt, (), 0, prompt.last.digest)

    def attempt_of(self, request_id: str) -> int:
        prompt = self._prompts.get(request_id)
        return prompt.attempt if prompt else 0

    def forget(self, request_id: str) -> bool:
        """Forget a request that has ended. Return True if an offer was made, so that its blocks may
        be read."""
        prompt = self._prompts.pop(request_id, None)
        return prompt is not None and prompt.last is not None

    @staticmethod
    def _digest(prompt: _OfferedPrompt) -> bytes | None:
        keys = prompt.request.content_keys
        if keys is None:
            return None
        return digest(prompt.request.token_ids, keys, prompt.num_tokens)

    def _offer(
        self, prompt: _OfferedPrompt, blocks: BlockIds, num_tokens: int, content: bytes
    ) -> None:
        prompt.last = PartialOffer(
            prompt.request.request_id,
            blocks,
            num_tokens,
            content,
            prompt.transfer_id,
            prompt.attempt,
        )
        self._orders.append(prompt.last)
