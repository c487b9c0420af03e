"""An engine whose loans have another last key than they should: a plugin of vLLM's, for the servers
of one test."""

from dataclasses import replace
from typing import Any


def register() -> None:
    from engine_ext.common.orders import LoanAnswer
    from engine_ext.scheduler import loans

    def forge(*fields: Any) -> LoanAnswer:
        answer = LoanAnswer(*fields)
        return replace(answer, last_key=bytes(len(answer.last_key)))

    vars(loans)["LoanAnswer"] = forge
