"""An answer that begins in the middle, or moves: what each decoder is told of what another engine
has made, what it is asked to tell so that another can go on, and what is left when nobody does.

Who is asked next is for `run`; what the client has of a stream is written down in the
`resume_buffer`.
"""

from __future__ import annotations

from router.fleet.engine import Engine
from router.fleet.engine_spec import DECODE, PREFILL, EngineRole
from router.http_client.deadlines import now
from router.openai.errors import EngineRejectedError, PreemptedError, RejectedMidStreamError
from router.proxy.first_token import asks_one_token, difference, may_be_handed, read_alike
from router.proxy.gateway import Gateway
from router.proxy.leg_bodies import message_in
from router.proxy.legs import LegError
from router.proxy.prefill_answer import Params, with_field
from router.proxy.request import AS_SENT, Request
from router.proxy.resume_buffer import ResumeBuffer


class Moves:
    """Those of one request. `left`: how often a decoder may hand it back for want of room, before
    one is to find room; `preempted`: which ones have."""

    __slots__ = ("_gateway", "_hands_nothing", "_request", "left", "preempted")

    def __init__(self, request: Request, gateway: Gateway) -> None:
        self._request = request
        self._gateway = gateway
        self._hands_nothing = False
        self.left = gateway.limits.max_resumes
        self.preempted: list[Engine] = []

    @property
    def going_on(self) -> ResumeBuffer | None:
        """Where another engine is to go on with what was said."""
        buffer = self._request.resume_buffer
        return buffer if buffer is not None and buffer.num_resumes else None

    # The first token.

    def hands_over(self, prefiller: Engine, decoder: Engine) -> bool:
        """Whether this decoder is to go on from the token that this prefiller samples."""
        gateway, request = self._gateway, self._request
        if gateway.limits.first_token != "auto" or self.going_on or self._hands_nothing:
            return False
        if (
            decoder is prefiller
            or not decoder.capabilities.supports_resume
            or not may_be_handed(request.body)
        ):
            return False
        if asks_one_token(request.body):  # whose text is not to be held back
            return False
        if not read_alike(prefiller, decoder.capabilities.render_hashes):
            gateway.metrics.handed_over.add(("differ",))
            what = difference(prefiller, decoder)
            gateway.throttle.warn(
                f"prefiller {prefiller.name} and this decoder differ in {what}: it computes "
                "the first token again",
                decoder.name,
            )
            return False
        return True

    def hands_nothing(self, decoder: Engine, error: EngineRejectedError) -> bool:
        """From here on, since a decoder would not go on from a token: perhaps that was its fault,
        or the prefiller's, and not the client's."""
        gateway = self._gateway
        if error.status != 400 or not gateway.budget.take(now()):
            return False
        self._hands_nothing = True
        gateway.metrics.handed_over.add(("refused",))
        gateway.throttle.warn(
            f"a decoder did not go on from a prefiller's token{message_in(error.body)}",
            decoder.name,
        )
        return True

    # What a decoder is told, and asked to tell.

    def told(
        self, params: Params | None, decoder: Engine, mate: Engine | None, is_chance: bool = False
    ) -> tuple[Params | None, bool]:
        """And whether it was asked to hand back what it has no room for. `mate`: the prefiller
        whose params those are; `is_chance`: nothing is to come back."""
        buffer = self.going_on
        if params is not None and params.tells_tokens:
            params = params if self._is_meant(params, decoder, mate) else params.not_beginning()
        if buffer is not None:
            params = with_field(params, b'"begun":' + buffer.begun())
        return self._asked_to_tell(params, decoder, is_chance)

    def _is_meant(self, params: Params, decoder: Engine, mate: Engine | None) -> bool:
        """Whether the decoder is to begin with what these tell. Perhaps nobody has asked for it."""
        if not params.begins or mate is None or self.going_on is not None:
            return False
        return decoder.capabilities.supports_resume and read_alike(
            decoder, mate.capabilities.render_hashes
        )

    def _asked_to_tell(
        self, params: Params | None, decoder: Engine, is_chance: bool
    ) -> tuple[Params | None, bool]:
        request, capabilities, buffer = self._request, decoder.capabilities, self.going_on
        may_move = buffer is not None or self._may_move(decoder)
        is_stream = request.body.get("stream") is True and not request.exact
        if capabilities.reports_token_ids and may_move and is_stream:
            params = self._buffer(decoder, params).asking_for_ids(params)
        elif buffer is None and request.resume_buffer is not None:
            request.resume_buffer.close()
            request.resume_buffer = None
        if not capabilities.returns_preempted or request.alone in AS_SENT:
            return params, False
        is_kept = not is_stream or (
            request.resume_buffer is not None and not request.resume_buffer.is_full
        )
        may_come_back = may_move and is_kept and self.left > 0 and not is_chance
        asked = b"true" if may_come_back else b"false"
        return with_field(params, b'"hand_back":' + asked), may_come_back

    def _may_move(self, decoder: Engine) -> bool:
        """Whether another may go on with what this decoder has begun."""
        request = self._request
        may_move = self._gateway.limits.max_resumes > 0 and not request.alone
        return may_move and decoder.capabilities.supports_resume and may_be_handed(request.body)

    def _buffer(self, decoder: Engine, params: Params | None) -> ResumeBuffer:
        request = self._request
        if request.resume_buffer is not None and self.going_on is None:
            # Of a leg that failed before the client had anything: this one may read ids otherwise.
            request.resume_buffer.close()
            request.resume_buffer = None
        if request.resume_buffer is None:
            request.resume_buffer = self._new_buffer(decoder)
        request.resume_buffer.keep_prompt(params)
        return request.resume_buffer

    def _new_buffer(self, decoder: Engine) -> ResumeBuffer:
        gateway = self._gateway
        return ResumeBuffer(
            gateway.resume_memory, decoder.capabilities.render_hashes, gateway.limits.max_resumes
        )

    # When a decoder could not go on.

    def may_go_on(self, role: EngineRole, error: LegError) -> bool:
        """With an answer of which the client has some. A move that is under way may take another
        prefiller, or none, however often it may move; and so may one for want of room, which is
        asked for so often and no more."""
        buffer = self._request.resume_buffer
        if role is PREFILL and self.going_on is not None:
            return True
        if buffer is None or isinstance(error, RejectedMidStreamError):  # refused again
            return False
        if isinstance(error, PreemptedError):
            return buffer.is_complete and self.left > 0
        return buffer.can_resume

    def note(self, error: LegError) -> None:
        """It moves. A stream's move is counted where it goes on."""
        buffer, started = self._request.resume_buffer, self._request.exchange.started
        if buffer is not None:
            buffer.note_resume(
                error.kind if started else "", is_free=isinstance(error, PreemptedError)
            )
        if not started:
            self._gateway.metrics.resumes.add((error.kind, "gone_on"))

    def take_back(self, error: PreemptedError, engine: Engine) -> None:
        """What has been said of an answer that nobody has seen. Without it, it begins anew."""
        request = self._request
        error.role = DECODE
        if request.exchange.started:
            return
        buffer = request.resume_buffer or self._new_buffer(engine)
        is_known = error.begun is not None and buffer.take_returned(error.begun)
        request.resume_buffer = buffer if is_known else None
        if not is_known:
            buffer.close()

    def starts_over(self) -> bool:
        """Where nobody goes on with an answer that nobody has seen, it begins anew, and stays."""
        request = self._request
        if request.exchange.started or self.going_on is None or request.resume_buffer is None:
            return False
        request.resume_buffer.close()
        request.resume_buffer, self.left = None, 0
        return True

    def why_not(self) -> str:
        """For the books, of a stream with which nobody goes on."""
        buffer = self._request.resume_buffer
        if buffer is None:
            return "not_offered"
        if buffer.is_full:
            return "no_room"
        return "given_up" if buffer.num_resumes or buffer.can_resume else "not_told"


def can_go_on(engine: Engine, role: EngineRole, buffer: ResumeBuffer) -> bool:
    """With what another has begun to say."""
    capabilities = engine.capabilities
    tells = role is PREFILL or capabilities.reports_token_ids
    return capabilities.supports_resume and tells and read_alike(engine, buffer.renders)
