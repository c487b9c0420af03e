"""vLLM calls `register` in every process before anything is built (`vllm.general_plugins`).

It adds what the HTTP server of vLLM 0.32 cannot say by itself: the request field
`cache_hit_threshold`, the finish reason `cache_threshold`, `kv_transfer_params` in streams, in a
chunk of their own before `[DONE]`, answers that begin in the middle, and the pages
`/disagg/identity`, `/disagg/release` and `/disagg/leases`.
"""

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Idempotent. On a vLLM that was not tested nothing is changed, and the log says so."""
    from engine_ext.vllm.versions import require_supported_version

    try:
        require_supported_version()
    except RuntimeError as error:
        logger.warning("%s: no streamed kv_transfer_params, no cache_hit_threshold", error)
        return
    from engine_ext.vllm import log, pages
    from engine_ext.vllm.compat import finish_reason, request_field, streams

    log.speak_as_vllm()
    finish_reason.install()
    request_field.install()
    streams.install()
    _install_begun()
    pages.install()


def _install_begun() -> None:
    """All of it or, as far as anybody is told, nothing: what is last says that it is there."""
    from engine_ext.vllm.compat import begun_answer, begun_hand_over, begun_prompt, begun_worker

    try:
        for seam in (begun_worker, begun_hand_over, begun_prompt, begun_answer):
            seam.install()
    except Exception:
        logger.exception("answers do not begin in the middle")
