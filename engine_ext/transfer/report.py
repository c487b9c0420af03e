"""One line in the log for each transfer that ended well; what failed has a warning of its own."""

import logging
from typing import Literal

logger = logging.getLogger(__name__)


def log_transfer(
    what: Literal["READ", "WRITE"],
    request_id: str,
    engine_id: str,
    *,
    num_blocks: int,
    num_bytes: int,
    seconds: float,
    num_proven: int,
) -> None:
    """`num_proven`: leading tokens of the prompt that are known to be the same on both sides, 0
    where the peer proves nothing."""
    logger.info(
        "request %s: %s peer=%s blocks=%d bytes=%d ms=%.1f proven_tokens=%d",
        request_id,
        what,
        engine_id,
        num_blocks,
        num_bytes,
        seconds * 1000,
        num_proven,
    )
