"""What the connector logs goes where vLLM's own lines go, at vLLM's level."""

import logging


def speak_as_vllm() -> None:
    """Idempotent. Who has configured our logger, with VLLM_LOGGING_CONFIG_PATH, is left alone."""
    ours, theirs = logging.getLogger("engine_ext"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate
