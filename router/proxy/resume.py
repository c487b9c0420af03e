"""How an answer that one engine has begun continues on another engine.

There are three cases. A decode engine continues from the first token, which the prefill engine
sampled (hand-over). A decode engine fails in mid-stream, and another one resumes the stream. A
decode engine returns an answer because it lacks KV blocks (preemption return), and another one
continues it.

`ResumeState` decides which tokens of other engines each decode engine gets, and what the engine
reports so that another engine can continue. The tokens of a stream are in the `ResumeBuffer`; of
stock vLLM, which continues nothing, in one that makes another request (`id_resume`,
`replay_buffer`).
"""

from __future__ import annotations

from time import monotonic as now

from msgspec import Struct

from router.fleet.engine import DECODE, PREFILL, Engine, EngineRole
from router.http_client.errors import MigratedError, UnreadableEventError
from router.openai.errors import EngineRejectedError, PreemptedError, RejectedMidStreamError
from router.proxy.first_token import (
    asks_one_token,
    can_hand_over,
    render_differences,
    renders_alike,
)
from router.proxy.gateway import Gateway
from router.proxy.id_resume import IdBuffer, may_continue
from router.proxy.kv_params import KvParams, with_field
from router.proxy.messages import error_text
from router.proxy.replay_buffer import ReplayBuffer, may_replay
from router.proxy.request import AS_SENT, Request
from router.proxy.resume_buffer import ResumeBuffer
from router.proxy.retry import LegError
from router.proxy.token_ids import RETURN_TOKEN_IDS


class DecodeParams(Struct, frozen=True):
    """The KV transfer params of one decode leg, the resume buffer that its stream fills, and
    whether its engine may return the answer instead of preempting it. `fields` replace the params
    where the engine knows no field of vLLM."""

    params: KvParams | None = None
    buffer: ResumeBuffer | None = None
    may_return: bool = False
    fields: bytes | None = None


NO_PARAMS = DecodeParams()


class ResumeState(Struct, eq=False):
    """The resume state of one request.

    `buffer` holds the tokens of a stream that another engine could continue, None if no engine
    could. `returns_left` is how many preemption returns are still allowed, and `preempted` lists
    the engines that have returned the answer. `is_used` is False until a prefill engine is involved
    that can hand over its token.
    """

    _request: Request
    _gateway: Gateway
    returns_left: int
    buffer: ResumeBuffer | None = None
    preempted: list[Engine] = []
    is_used: bool = False
    keeps_ids: bool = False
    """The token ids in a stream are for the next turn, which takes them out."""
    _may_hand_over: bool = True

    @property
    def continued(self) -> ResumeBuffer | None:
        """The buffer, if the next leg continues what it holds."""
        buffer = self.buffer
        return buffer if buffer is not None and buffer.num_resumes else None

    def close(self) -> None:
        """Release the buffer's memory."""
        if self.buffer is None:
            return
        # The first byte is that of the first leg, if the last leg sent nothing.
        record = self._request.record
        record.first_byte = record.first_byte or self.buffer.first_byte
        self._drop_buffer()

    def _drop_buffer(self) -> None:
        if self.buffer is not None:
            self.buffer.close()
            self.buffer = None

    # Hand-over of the first token.

    def hands_over(self, prefiller: Engine, decoder: Engine | None) -> bool:
        """Return True if the decode engine is to continue from the token that the prefill engine
        samples."""
        self.is_used = True
        gateway, request = self._gateway, self._request
        if decoder is None or gateway.limits.first_token != "auto" or not self._may_hand_over:
            return False
        if (
            self.continued is not None
            or decoder is prefiller
            or not decoder.capabilities.supports_resume
        ):
            return False
        # The text of an answer of one token is sent at once.
        if not can_hand_over(request.body) or asks_one_token(request.body):
            return False
        if not renders_alike(prefiller, decoder.capabilities.render_hashes):
            gateway.metrics.handed_over.add(("rendering_differs",))
            what = render_differences(prefiller, decoder)
            gateway.throttle.warn(
                f"prefill engine {prefiller.name} and this decode engine differ in {what}, so the "
                "first token is computed twice",
                decoder.name,
            )
            return False
        return True

    def stop_handing_over(self, decoder: Engine, error: EngineRejectedError) -> bool:
        """Hand over no token from now on, because a decode engine rejected one with status 400.

        The rejection may be the fault of the token and not of the client. Return False if it is
        the client's, or if no retry is left.
        """
        gateway = self._gateway
        if error.status != 400 or not gateway.budget.take(now()):
            return False
        self._may_hand_over = False
        gateway.metrics.handed_over.add(("refused",))
        gateway.throttle.warn(
            "a decode engine did not continue from a prefill engine's token"
            f"{error_text(error.body)}",
            decoder.name,
        )
        return True

    # The KV transfer params of a decode leg.

    def params_for(
        self, params: KvParams | None, decoder: Engine, prefiller: Engine | None, is_hedged: bool
    ) -> DecodeParams:
        """Return the params of a decode leg, whose engine may return the answer for lack of blocks
        unless the leg is hedged. `params` came from `prefiller`, if there is one."""
        continued = self.continued
        if params is not None and params.has_generated_tokens:
            is_meant = (
                params.continues_tokens
                and prefiller is not None
                and continued is None
                and decoder.capabilities.supports_resume
                and renders_alike(decoder, prefiller.capabilities.render_hashes)
            )
            params = params if is_meant else params.without_generated_tokens()
        request, capabilities = self._request, decoder.capabilities
        reports_begun = capabilities.supports_resume and capabilities.reports_token_ids
        by_request = capabilities.takes_token_ids and not reports_begun
        if by_request if continued is None else continued.by_request:
            return DecodeParams(params, continued or self._stock_buffer(decoder))
        if continued is not None:
            params = with_field(params, b'"begun":' + continued.begun())
        may_move = continued is not None or self._may_move(decoder)
        is_stream = request.body.get("stream") is True and not request.exact_stream
        buffer = continued
        if capabilities.reports_token_ids and may_move and is_stream:
            # A buffer of a failed leg is of no use: this engine may use other token ids.
            buffer = continued or self._new_buffer(decoder)
            buffer.keep_prompt(params)
            params = buffer.asking_for_ids(params)
        if not capabilities.returns_preempted or request.decode_only_reason in AS_SENT:
            return DecodeParams(params, buffer)
        is_kept = not is_stream or (buffer is not None and not buffer.is_full)
        may_return = may_move and is_kept and self.returns_left > 0 and not is_hedged
        params = with_field(params, b'"hand_back":%s' % (b"true" if may_return else b"false"))
        return DecodeParams(params, buffer, may_return)

    def _stock_buffer(self, decoder: Engine) -> ResumeBuffer | None:
        """Return a buffer for a stream of stock vLLM, None if no other engine could continue."""
        request, limits, body = self._request, self._gateway.limits, self._request.body
        if (
            not limits.max_resumes
            or request.decode_only_reason
            or request.exact_stream
            or body.get("stream") is not True
        ):
            return None
        memory = self._gateway.memory.resume_buffers
        if may_continue(body):
            hides_ids = body.get(RETURN_TOKEN_IDS) is not True and not self.keeps_ids
            return IdBuffer(memory, decoder, limits.max_resumes, hides_ids)
        return ReplayBuffer(memory, limits.max_resumes) if may_replay(body) else None

    def take_buffer(self, buffer: ResumeBuffer | None) -> None:
        """Let the leg that begins fill this buffer."""
        if buffer is not self.buffer:
            self._drop_buffer()
            self.buffer = buffer

    def _may_move(self, decoder: Engine) -> bool:
        """Return True if another engine could continue what this decode engine begins."""
        request = self._request
        may_move = self._gateway.limits.max_resumes > 0 and not request.decode_only_reason
        return may_move and decoder.capabilities.supports_resume and can_hand_over(request.body)

    def _new_buffer(self, decoder: Engine) -> ResumeBuffer:
        gateway = self._gateway
        return ResumeBuffer(
            gateway.memory.resume_buffers,
            decoder.capabilities.render_hashes,
            gateway.limits.max_resumes,
        )

    # After a decode engine has failed or returned the answer.

    def can_resume(self, role: EngineRole, error: LegError) -> bool:
        """Return True if another engine can continue the part of the answer that exists.

        A resume that has begun may try another prefill engine however often. Preemption returns
        have a limit of their own.
        """
        if role is PREFILL and self.continued is not None:
            return True
        buffer = self.buffer
        # Every engine would reject the request again. Of an unreadable event, the buffer has tokens
        # that the client has not.
        if buffer is None or isinstance(error, RejectedMidStreamError | UnreadableEventError):
            return False
        if isinstance(error, PreemptedError):
            return buffer.is_complete and self.returns_left > 0
        return buffer.can_resume

    def note_move(self, error: LegError) -> None:
        """Record that another engine continues. A stream's move is counted when it continues."""
        self._request.record.resumes += 1
        started = self._request.exchange.started
        if self.buffer is not None:
            is_free = isinstance(error, PreemptedError | MigratedError)
            self.buffer.note_resume(error.kind if started else "", is_free=is_free)
        if not started:
            self._gateway.metrics.resumes.add((error.kind, "resumed"))

    def take_back(self, error: PreemptedError, engine: Engine) -> None:
        """Keep the tokens of a returned answer of which the client has nothing. An answer that was
        returned without tokens begins anew."""
        error.role = DECODE
        if self._request.exchange.started:
            return
        buffer = self.buffer or self._new_buffer(engine)
        is_known = error.begun is not None and buffer.take_returned(error.begun)
        self.buffer = buffer if is_known else None
        if not is_known:
            buffer.close()

    def restart_answer(self) -> bool:
        """Begin an answer anew that no engine continues and of which the client has nothing.

        Return False if there is no such answer. The new answer may not be returned.
        """
        if self._request.exchange.started or self.continued is None:
            return False
        self._drop_buffer()
        self.returns_left = 0
        return True

    def reason_not_resumed(self) -> str:
        """Return the metric label for a stream that no engine continues."""
        if self.buffer is None:
            return "not_offered"
        if self.buffer.is_full:
            return "no_room"
        return "given_up" if self.buffer.num_resumes or self.buffer.can_resume else "no_token"


def can_continue(engine: Engine, role: EngineRole, buffer: ResumeBuffer) -> bool:
    """Return True if the engine can continue what another engine has generated."""
    capabilities = engine.capabilities
    if isinstance(buffer, IdBuffer):
        return buffer.is_continued_by(engine)
    if buffer.by_request:
        return True
    reports_ids = role is PREFILL or capabilities.reports_token_ids
    return capabilities.supports_resume and reports_ids and renders_alike(engine, buffer.renders)
