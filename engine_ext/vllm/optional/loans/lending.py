"""Loans (`lending`): our scheduler class lends out of vLLM's prefix cache, and borrows into it.

A pin is a reference in vLLM's block pool, as that of a request. vLLM knows no request behind it and
does not step for it: a wake-up lets an idle engine take one step. Nor does a pause wait for it.
vLLM resets its cache then, and raises if a block is referenced, so the reset sees no pins. It
forgets what the blocks hold, and takes none of them; the loans are revoked, and their readers may
finish.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreOutputs

from engine_ext.vllm import describe
from engine_ext.vllm.compat import support
from engine_ext.vllm.compat.patching import Host
from engine_ext.vllm.connector_calls import find_our_connector
from engine_ext.vllm.optional.loans.cached_blocks import CachedBlocks
from engine_ext.vllm.optional.without_patch import FAILURE_POLICY

logger = logging.getLogger(__name__)


class LendingPart(Host):
    """Before `IdleRestPart`, whose wake-ups it turns into steps."""

    woken: threading.Event
    disagg_is_leaving: bool
    on_outputs: list[Callable[[dict[int, EngineCoreOutputs]], None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lent: CachedBlocks | None = None
        self._is_called = False
        """A worker has sent the last wake-up, or may have sent one that was lost."""
        ours = find_our_connector(self.connector)
        if ours is None:
            return
        configs = self.vllm_config, self.kv_cache_config
        problem = describe.why_not_lent(*configs)
        if problem is not None:
            logger.info("this engine lends no prefixes: %s", problem)
        if describe.why_no_loans(*configs) is not None:
            return
        cache = CachedBlocks(self)
        if support.is_on(FAILURE_POLICY):
            ours.borrow_with(cache)
        if problem is None:
            self._lent = cache
            ours.lend_from(cache)
            self.on_outputs.append(lambda outputs: ours.answer_fenced())

    def _on_wakeup(self, is_overdue: bool) -> None:
        self._is_called = not is_overdue or (self._lent is not None and self._lent.has_pins)
        super()._on_wakeup(is_overdue)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        ours = find_our_connector(self.connector)
        if self._lent is None or ours is None:
            return bool(super().reset_prefix_cache(*args, **kwargs))
        ours.revoke_loans()
        with self._lent.let_go():
            return bool(super().reset_prefix_cache(*args, **kwargs))

    def has_requests(self) -> bool:
        """A step fetches requests for loans, and reports of loans that have ended. An engine that
        leaves waits for the readers."""
        if self._lent is not None:
            if self._is_called and self.woken.is_set():
                return True
            if self.disagg_is_leaving and self._lent.has_pins:
                return True
        return bool(super().has_requests())
