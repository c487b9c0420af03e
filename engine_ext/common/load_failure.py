"""The report of a failed KV load in an engine's answer: the remote engine and the reason.

A decode engine that cannot load a prompt's KV computes it or ends the request, as its policy says
(`kv_load_failure_policy`). Either way its answer names the engine on the other side:

    "kv_load_failure": {
        "remote_engine_id": "p-1", "remote_host": "10.0.0.1", "remote_port": 5600,
        "scope": "pair", "reason": "no handshake within 10 s"
    }

in the error object of a request that ends, in the `kv_transfer_params` of an answer that is not
streamed, and of a stream in a comment before one of its first events:

    : kv_load_failure {"remote_engine_id": ...}

`scope` is `pair` if these two engines cannot exchange KV for any request, and `request` if only
this request is affected, for example because its lease had ended. The router pairs such engines
with others and removes the field from the answer that it sends to the client.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from engine_ext.common.latest import keep_latest
from engine_ext.common.types import LoadProblem, PeerAddress

KEY = "kv_load_failure"
PAIR, REQUEST = "pair", "request"
MAX_REASON = 200
"""Characters of a reason. Some of it may be a peer's words."""

UNKNOWN = LoadProblem("the load failed", is_of_pair=False)
MAX_FAILURES = 1024


class LoadFailures:
    """The failed loads that no answer has reported yet, by request: the latest MAX_FAILURES."""

    def __init__(self) -> None:
        self.by_request: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def note(self, request_id: str, address: PeerAddress, problem: LoadProblem) -> None:
        """Record that the KV of this request was not loaded from that engine."""
        failure = {
            "remote_engine_id": address.engine_id,
            "remote_host": address.host,
            "remote_port": address.port,
            "scope": PAIR if problem.is_of_pair else REQUEST,
            "reason": problem.reason[:MAX_REASON],
        }
        keep_latest(self.by_request, request_id, failure, MAX_FAILURES)

    def take(self, request_id: str) -> dict[str, Any] | None:
        """Return the failure in its wire form and forget it. None if the load has not failed, or
        the request ended first."""
        return self.by_request.pop(request_id, None)


def comment(failure: Mapping[str, Any]) -> str:
    """Return the SSE comment that reports a failure, given in its wire form."""
    return f": {KEY} {json.dumps(failure)}\n"
