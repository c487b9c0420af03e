"""Requests, each with the one right answer to it."""

import itertools
import json
import random

from scripts.chaos_bench.answers import Ask
from scripts.chaos_bench.load import Asks
from scripts.chaos_bench.mock_engine import text_of
from scripts.chaos_bench.scenarios import Mode

CHAT = "/v1/chat/completions"
FILLER = 1000
"""Characters of a prompt: more than a probe has, see sockets.py."""


def mock_asks(name: str, mode: Mode, chunks: int, interval: float, seed: int) -> Asks:
    """Each with a nonce of its own, which engines say again."""
    numbers = itertools.count()
    rng = random.Random(f"{seed} {name} {mode}")

    def ask() -> Ask:
        nonce = f"{name}-{mode}-{next(numbers)}-{rng.randrange(10**9)}"
        content = f"{nonce} " + "".join(rng.choices("abcdefgh ", k=FILLER))
        is_streamed = mode is Mode.STREAMED
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": chunks,
            "seed": int(interval * 1e6),
            "stream": is_streamed,
        }
        return Ask(CHAT, json.dumps(body).encode(), is_streamed, "".join(text_of(nonce, chunks)))

    return ask
