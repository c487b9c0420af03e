"""How a step's prefill tokens are shared among the prompts that are being computed."""

from collections.abc import Sequence

_OLDEST = 4
"""The oldest prompt has this part of the tokens to itself."""


def shares(remaining: Sequence[int], budget: int, num_new: int) -> list[int]:
    """Tokens of each prompt in this step; `remaining` in order of admission.

    Those with the least to do go first: they end soonest, and hold up the others least. So that
    long ones come to their end too, whatever follows them, the oldest has its part before that.
    The last `num_new` have a token each at least: their blocks are made ready in this step.
    """
    granted = [0] * len(remaining)

    def give(index: int, most: int) -> int:
        given = min(most, remaining[index] - granted[index])
        granted[index] += given
        return given

    left = budget
    for index in range(len(remaining) - num_new, len(remaining)):
        left -= give(index, min(1, left))
    if remaining:
        left -= give(0, min(-(-budget // _OLDEST), left))
    for index in sorted(range(len(remaining)), key=remaining.__getitem__):
        left -= give(index, left)
    return granted
