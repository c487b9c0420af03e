"""vLLM calls `register` in every process before anything is built (`vllm.general_plugins`).

It adds what vLLM's HTTP server cannot say by itself: the request field `cache_hit_threshold`, the
finish reason `cache_threshold`, `kv_transfer_params` in streams, answers that begin in the middle,
and the pages `/disagg/identity`, `/disagg/release` and `/disagg/leases`; each where it fits.
"""

import importlib
import logging
from collections.abc import Iterable

from engine_ext.vllm.compat import features, support
from engine_ext.vllm.compat.features import Feature
from engine_ext.vllm.log import speak_as_vllm

logger = logging.getLogger(__name__)


def register() -> None:
    """Idempotent. Where our connector cannot be, nothing is changed, and the log says so."""
    speak_as_vllm()
    try:
        support.require(*features.REQUIRED)
    except RuntimeError as error:
        logger.warning("%s: it is left as it is", error)
        return
    support.say()
    says = ("compat.streams", "compat.finish_reason", "compat.request_field")
    begun = ("begun_worker", "begun_hand_over", "begun_prompt", "begun_answer")
    for feature, seams in (
        (features.SEVERAL, ("compat.by_name",)),
        (features.STREAMS, ("compat.streams",)),
        (features.THRESHOLD, says),
        # What is last says that all of it is there.
        (features.BEGUN, (*says, *(f"compat.{each}" for each in begun))),
        (features.LOAD_FAILURES, ("compat.streams", "compat.load_failures")),
        (features.PAGES, ("pages",)),
    ):
        if support.is_on(feature):
            _install(feature, seams)


def _install(feature: Feature, seams: Iterable[str]) -> None:
    try:
        for seam in seams:
            importlib.import_module(f"engine_ext.vllm.{seam}").install()
    except Exception as error:
        logger.exception(feature.name)
        support.lose(feature, f"it could not be installed: {error!r}")
