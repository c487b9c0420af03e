"""Resume: an answer goes on from tokens that another engine has generated.

vLLM's scheduler computes what a request has generated again after a preemption. We put the
payload's output tokens on the request before the scheduler sees it, so all its code treats it as
one that was preempted: blocks, `max_tokens`, stop conditions, prefix cache. Three things are ours:

* The grammar of guided decoding is advanced past these tokens when it has been compiled. If it does
  not allow them, the request ends as one whose grammar cannot be compiled.
* vLLM asserts that what is at hand when a request is first scheduled is prompt. Here it may be
  more, so the request carries statistics that look empty to vLLM, and are filled in here.
* The other parts are the HTTP server's (`patch_requests`, `patch_replay`) and the worker's
  (`patch_worker`).

If vLLM treats a preempted request's output in another way, the answer repeats tokens or has wrong
ones; tests/vllm/test_resumed_answers.py compares answers with those of one engine.
"""

import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request, RequestStatus

from engine_ext.vllm.compat.patching import Host
from engine_ext.vllm.optional.answers.resumed_request import token_ids_in

logger = logging.getLogger(__name__)


class ResumePart(Host):
    on_scheduled: list[Callable[[SchedulerOutput], None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_scheduled.append(self._fill_in_stats)

    def add_request(self, request: Request) -> None:
        self._resume(request)
        super().add_request(request)

    def _resume(self, request: Request) -> None:
        token_ids = token_ids_in(request.sampling_params)
        if not token_ids or request.resumable or request.num_output_tokens:
            return
        may_go_on = len(token_ids) < request.max_tokens
        in_context = request.num_tokens + len(token_ids) < self.max_model_len
        if not (may_go_on and in_context) and not request.abort_immediately:
            # Our HTTP server does not let this through: it has ended the answer.
            logger.warning(
                "request %s: the resume payload is longer than the answer may be",
                request.request_id,
            )
            return
        request.append_output_token_ids(token_ids)
        request.prefill_stats = ResumedPrefillStats()

    def _fill_in_stats(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            stats = self.requests[new.req_id].prefill_stats
            if isinstance(stats, ResumedPrefillStats):
                stats.fill_in(self.requests[new.req_id].num_prompt_tokens, new.num_computed_tokens)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        waited_for = request.status
        if not super()._handle_blocked_waiting_request(request):
            return False
        had_no_grammar = waited_for is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        if had_no_grammar and not self._advance_grammar(request):
            self._end_for_its_grammar(request)
            return False
        return True

    def _advance_grammar(self, request: Request) -> bool:
        """Return False if the grammar does not allow the tokens, and the request must end."""
        token_ids = list(request.output_token_ids)
        try:
            if self.structured_output_manager.accept_tokens(request, token_ids):
                return True
        except Exception:
            logger.exception("request %s: its grammar", request.request_id)
        logger.error(
            "request %s: its grammar rejects the tokens that it resumes", request.request_id
        )
        return False

    def _end_for_its_grammar(self, request: Request) -> None:
        """With an error, at the end of this step, as vLLM ends those whose grammar cannot be
        compiled. 0.32 has a set of them; 0.33 a dict with the clients' messages, which may be
        None."""
        refused = self.grammar_compile_error_reqs
        if isinstance(refused, set):
            refused.add(request.request_id)
        else:
            refused[request.request_id] = None


class ResumedPrefillStats(PrefillStats):
    num_loading = 0

    def __bool__(self) -> bool:
        """vLLM fills in what is true."""
        return False

    def note_loading(self, num_tokens: int) -> None:
        """These come from a remote. The connector calls this, where it finds the method."""
        self.num_loading = num_tokens

    def fill_in(self, num_prompt_tokens: int, num_computed_tokens: int) -> None:
        at_hand = min(num_computed_tokens, num_prompt_tokens)
        loaded = min(self.num_loading, at_hand)
        self.set(num_prompt_tokens, at_hand - loaded, loaded)
