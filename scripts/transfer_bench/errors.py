"""What goes wrong while measuring."""


class BenchError(Exception):
    """What was to be measured did not happen; one line."""


class ActorError(BenchError):
    """The other process raised, died or did not answer in time."""
