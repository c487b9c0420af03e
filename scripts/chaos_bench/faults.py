"""What can be wrong with an engine."""

from enum import StrEnum


class Fault(StrEnum):
    """Of an engine that runs, answers GET /health, and does this with requests."""

    NONE = "none"
    ERROR = "error"
    """Answers 500."""
    BUSY = "busy"
    """Answers 503 with Retry-After."""
    SILENT = "silent"
    """Takes the request and never answers."""
    RUBBISH = "rubbish"
    """Answers what is not HTTP, not JSON, or ends too early."""
    RESET = "reset"
    """Resets the connection."""
    SLOW = "slow"
    """Answers a second later: nothing is wrong with it."""


class Blow(StrEnum):
    """What is done to a process from outside."""

    KILL = "kill"
    RESTART = "restart"
    """Killed, and started again at once, before anyone has looked."""
    STOP = "stop"
    """Asked to end, and started again when it has: what it still answers, it cuts off."""
    FREEZE = "freeze"
    HANDOVER = "handover"
    """The router's: a second one takes over, the first is asked to end."""


Harm = Fault | Blow
