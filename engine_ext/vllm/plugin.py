"""vLLM calls `register` in every process before anything is built (`vllm.general_plugins`).

It installs the patches of those features that are on: what vLLM's HTTP server cannot do by itself
(the request field `cache_hit_threshold`, the finish reason `cache_threshold`, `kv_transfer_params`
in streams, resumed answers, the pages `/disagg/identity`, `/disagg/release` and `/disagg/leases`).
The connector itself installs what the engine's process needs: `patch_weights` and
`patch_engine_loop`.
"""

import logging

from engine_ext.vllm.compat import support
from engine_ext.vllm.compat.vllm_symbols import REQUIRED

logger = logging.getLogger(__name__)


def register() -> None:
    """Idempotent. If the connector itself does not fit, nothing is changed, and the log says so."""
    support.log_where_vllm_logs()
    try:
        support.require(*REQUIRED)
    except RuntimeError as error:
        logger.warning("%s: the plugin changes nothing in vLLM", error)
        return
    support.log_what_is_off()
    for feature in support.OPTIONAL:
        if feature.patches and support.is_on(feature):
            support.install(feature)
