"""Whether a grammar can be compiled at all, found out by a process that can be killed.

llguidance goes on for ever over some small grammars (twenty patterns that all must fit), and a
thread that is in it cannot be stopped: a few such requests would take every thread of an engine.
Run as a script, which has nothing of the engine to import: a grammar comes by standard input.
"""

import resource
import subprocess
import sys

PATIENCE = 5.0
"""Seconds. An ordinary grammar takes some milliseconds."""


def try_grammar(definition: str, patience: float = PATIENCE) -> None:
    """Raises ValueError for one that is not compiled in time, or ends the process that does it.

    Nothing for one that is wrong: the compiler itself says best why.
    """
    command = [sys.executable, "-P", __file__, str(int(patience) + 1)]
    try:
        ended = subprocess.run(
            command,
            input=definition.encode(),
            timeout=patience,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"it is too complex: not compiled in {patience:g} s") from None
    if ended.returncode != 0:
        raise ValueError("it is too complex to be compiled")


def main(seconds: int) -> None:
    import llguidance

    # Whoever waits for this may be killed first.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), sys.stdin.buffer.read().decode(), log_level=0
    )
    matcher.compute_bitmask()


if __name__ == "__main__":
    main(int(sys.argv[1]))
