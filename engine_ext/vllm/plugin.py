"""vLLM calls `register` in every process before anything is built (`vllm.general_plugins`).

It adds what vLLM's HTTP server cannot say by itself: the request field `cache_hit_threshold`, the
finish reason `cache_threshold`, `kv_transfer_params` in streams, answers that begin in the middle,
and the pages `/disagg/identity`, `/disagg/release` and `/disagg/leases`; each where it fits.
"""

import importlib
import logging

logger = logging.getLogger(__name__)

COMPAT = "engine_ext.vllm.compat."


def register() -> None:
    """Idempotent. Where our connector cannot be, nothing is changed, and the log says so."""
    from engine_ext.vllm import log
    from engine_ext.vllm.compat import features, support

    log.speak_as_vllm()
    try:
        support.require(*features.REQUIRED)
    except RuntimeError as error:
        logger.warning("%s: it is left as it is", error)
        return
    support.say()
    says = (f"{COMPAT}finish_reason", f"{COMPAT}request_field")
    begun = ("begun_worker", "begun_hand_over", "begun_prompt", "begun_answer")
    for feature, seams in (
        (features.THRESHOLD, says),
        (features.STREAMS, (f"{COMPAT}streams",)),
        # What is last says that all of it is there.
        (features.BEGUN, (*says, *(COMPAT + each for each in begun))),
        (features.PAGES, ("engine_ext.vllm.pages",)),
    ):
        if not support.is_on(feature):
            continue
        try:
            for seam in seams:
                importlib.import_module(seam).install()
        except Exception as error:
            logger.exception(feature.name)
            support.lose(feature, f"it could not be installed: {error!r}")
