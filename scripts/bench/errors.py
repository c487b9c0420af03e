"""What goes wrong while measuring."""


class BenchError(Exception):
    """What was to be measured did not happen; one line."""


class ActorError(BenchError):
    """The other process raised, died or did not answer in time."""


class NotInterleavedError(BenchError):
    """Two sets of runs that did not take turns: the machine's mood is not the same in both."""
