"""`cache_threshold` as a finish reason that vLLM can carry.

vLLM's FinishReason is an enum with a fixed set of members, sent as a number between its processes.
Ours takes the next free number, in every process, before the first message is decoded: that is what
a general plugin is called for.
"""

from typing import Any

import vllm.v1.engine as engine

from engine_ext.scheduler.admission import FINISH_REASON

MEMBER = "CACHE_THRESHOLD"


def install() -> None:
    """Idempotent."""
    reasons: Any = engine.FinishReason
    if is_installed():
        return
    number = len(engine.FINISH_REASON_STRINGS)
    member = int.__new__(reasons, number)
    member._name_, member._value_ = MEMBER, number
    reasons._member_map_[MEMBER] = member
    reasons._value2member_map_[number] = member
    reasons._member_names_.append(MEMBER)
    type.__setattr__(reasons, MEMBER, member)
    engine.FINISH_REASON_STRINGS = (*engine.FINISH_REASON_STRINGS, FINISH_REASON)


def is_installed() -> bool:
    """In this process."""
    return MEMBER in engine.FinishReason.__members__


def cache_threshold_reason() -> Any:
    """The member; `install` must have run in this process."""
    return engine.FinishReason.__members__[MEMBER]
