"""A turn of a conversation: the prefiller pulls what the last turn left on its decoder.

Turn N leaves its decoder's kv_transfer_params. Turn N+1 takes them, which only one request can,
hands them to a prefiller, and goes back to the same decoder. Both is done only as far as it is
safe: see router.conversations.guard, and docs/conversations.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.conversations.conversations import Conversations, Found, Turn
from router.fleet.engine import Engine, Role
from router.flows import legs
from router.flows.decode_first import Attempt, decode_first
from router.flows.errors import EngineError
from router.flows.gateway import Gateway
from router.flows.kept import Keeper
from router.flows.options import Options
from router.flows.prefilled import RETAIN, Params, Prefilled
from router.flows.pull import note_no_params
from router.flows.release import give_up, give_up_turn
from router.flows.request import Request, write_body
from router.flows.reuse import Reuse, find_reuse
from router.flows.steps import decode, prefill
from router.policies.affinity import by_session, first
from router.upstream.errors import UpstreamError


async def take_turn(
    request: Request, gateway: Gateway, conversations: Conversations, turn: Turn, options: Options
) -> None:
    gateway.require(Role.PREFILL, Role.DECODE)
    await conversations.recall(turn)
    reuse = find_reuse(turn, gateway.fleet, gateway.load_bound)
    flow = TurnFlow(request, gateway, turn, reuse, options)
    try:
        if not await flow.decoder_alone():
            await flow.both_legs()
    finally:
        flow.give_up_unread()


class TurnFlow:
    """One turn, from what the last one left to its own answer."""

    def __init__(
        self, request: Request, gateway: Gateway, turn: Turn, reuse: Reuse, options: Options
    ) -> None:
        self._request = request
        self._gateway = gateway
        self._turn = turn
        self._reuse = reuse
        self._unread = turn.entry
        self._threshold = options.threshold
        self._exact = options.exact and bool(request.body.get("stream"))
        self._decoders = self._decoder_order()

    async def decoder_alone(self) -> bool:
        """Lets the decoder answer by itself, if that is asked for or if it holds most of it."""
        threshold = self._threshold or self._own_threshold()
        if not threshold:
            return False
        deliver = Keeper(self._turn, None, self._exact).deliver
        attempt = Attempt(threshold, self._decode_body(None), self._decoders, deliver)
        answered = await decode_first(self._request, self._gateway, attempt)
        if answered:
            self._reuse.outcome, self._reuse.reason = "decoder_alone", ""
            self._count()
        return answered

    async def both_legs(self) -> None:
        prefilled = await self._prefill()
        params, prompt_tokens = prefilled.params, prefilled.prompt_tokens
        if self._reuse.offered is not None:
            self._unread = None
        self.give_up_unread()
        self._count()
        if params is None:
            note_no_params(self._request, self._gateway)
        deliver = Keeper(self._turn, prompt_tokens, self._exact).deliver
        try:
            content = self._content(params)
            await decode(self._request, self._gateway, content, self._decoders, deliver)
        except BaseException as cause:
            give_up(self._request, self._gateway, params, cause)
            raise

    async def _prefill(self) -> Prefilled:
        """Asks again without the last turn's KV when that was of no use: it is used up now."""
        gateway = self._gateway
        candidates = gateway.fleet.candidates(Role.PREFILL)
        order = by_session(candidates, self._turn.conversation.session, gateway.load_bound)
        try:
            return await prefill(self._request, gateway, order, self._offer)
        except (UpstreamError, EngineError):
            if self._reuse.offered is None:
                raise
            self._reuse.fail()
            self._request.attempt += 1
            return await prefill(self._request, gateway, order)

    def give_up_unread(self) -> None:
        """What the last turn left, if no prefiller has read it."""
        entry, self._unread = self._unread, None
        if entry is not None:
            give_up_turn(self._request, self._gateway, entry)

    def _offer(self, prefiller: Engine) -> legs.Body | None:
        unproven = self._gateway.limits.conversation_unproven
        return self._reuse.offer(self._turn, prefiller, unproven)

    def _decoder_order(self) -> Sequence[Engine]:
        if self._reuse.decoder is None:
            return self._gateway.in_turn(Role.DECODE)
        return first(self._gateway.fleet.candidates(Role.DECODE), self._reuse.decoder)

    def _own_threshold(self) -> float:
        """0 unless the decoder is known to hold most of the prompt, and may be asked."""
        share = self._gateway.limits.decode_first_turns
        decoder = self._reuse.decoder
        if not share or decoder is None or legs.THRESHOLD in self._request.body:
            return 0
        decoder.learned.wanted = True
        holds_it = self._reuse.held_share(self._turn) >= share
        return share if holds_it and decoder.learned.knows_threshold else 0

    def _content(self, params: Params | None) -> bytes:
        """What the decoder is sent after the prefill."""
        if self._exact:
            return write_body(self._decode_body(params))
        return self._request.content_with(self._asking(params))

    def _decode_body(self, params: Params | None) -> legs.Body:
        body = self._request.body
        return legs.decode_body(
            legs.whole_body(body) if self._exact else body, self._asking(params)
        )

    def _asking(self, params: Params | None) -> Params | None:
        """Asks the decoder to keep this turn's KV, unless it could not be found again."""
        keeps = self._turn.found is not Found.STORE_FAILED
        if params is None:
            return RETAIN if keeps else None
        return params.retaining() if keeps else params.not_retaining()

    def _count(self) -> None:
        reuse, metrics = self._reuse, self._gateway.metrics
        self._request.record.conversation = reuse.outcome
        metrics.conversation_turns.add((reuse.outcome, reuse.reason))
        metrics.conversation_tokens.inc(reuse.offered_tokens)
