"""A model of the time of an engine's steps, fitted online to the engine's own steps.

A step computes chunks of prompts and one token of each decoding request. Its milliseconds are

    base + token * T + token_context * sum(n * (c + n / 2)) + context * sum(d)

with T the prompt tokens in the step, n the tokens of a chunk, c the tokens before the chunk, and d
the tokens before a decoding request's new one: weights are read once a step, each prompt token is
multiplied with them and attends to the tokens before it, and decoding reads the KV of all contexts.
On H200 operators (aiconfigurator 0.12, Qwen3-32B, 64 to 2,048 prompt tokens beside 32 decodes) a
step with both reads the weights once, and its attention is the sum of the parts.

`StepFit` is a least-squares fit of relative errors, from decayed sums. Steps without prompts, with
few and with many prompt tokens have sums of their own, which only new steps of the same kind decay:
an hour of decoding does not wash out what is known of prompts. A step far from its prediction (a
compilation, a busy machine) pulls no more than one at HUBER of it does (P. J. Huber, Robust
estimation of a location parameter, 1964). Of all subsets of the four terms, the best one without a
negative factor is taken, so the fit is the exact non-negative one.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

MEMORY = 512
"""A step's weight falls to 1/e while this many steps of its kind follow."""
KEPT = 1.0 - 1.0 / MEMORY
HUBER = 0.3
MIN_STEPS = 16
"""The fit relies on a kind of steps after this many of them."""
REFIT_STEPS = 32
MANY_TOKENS = 256
"""A step with fewer prompt tokens may take as long as one without: its time is that of reading the
weights. It does not show what a prompt token costs."""
MIN_SPREAD = 0.02
"""The share of a term's square that `base` must leave unexplained. With less, all steps seen were
alike, and their time cannot be divided between the two."""

PLACES = ((0, 1, 2, 3), (1, 4, 5, 6), (2, 5, 7, 8), (3, 6, 8, 9))
"""The positions of the symmetric matrix's elements in the sums."""

Vector = tuple[float, float, float, float]


class StepWork(NamedTuple):
    """The work of one step."""

    prompt_tokens: int
    prompt_pairs: float
    """Pairs of a prompt token and a token before it: n * (c + n / 2) for each chunk."""
    contexts: int
    """Tokens before those of the decoding requests."""

    @classmethod
    def of(cls, chunks: Sequence[tuple[int, int]], contexts: int) -> "StepWork":
        """Return the work of `chunks`, each with its tokens and the tokens before it."""
        pairs = sum(count * (before + count / 2) for count, before in chunks)
        return cls(sum(count for count, _ in chunks), pairs, contexts)


class StepCosts(NamedTuple):
    """The factors of the four terms, in the units of their names. None is negative."""

    base_ms: float
    token_us: float
    token_context_ns: float
    context_ns: float

    def milliseconds(self, work: StepWork) -> float:
        return (
            self.base_ms
            + self.token_us * 1e-3 * work.prompt_tokens
            + (self.token_context_ns * work.prompt_pairs + self.context_ns * work.contexts) * 1e-6
        )

    def chunk_milliseconds(self, count: int, context: int) -> float:
        """Return what a chunk of `count` tokens behind `context` tokens adds to a step."""
        pairs = count * (context + count / 2)
        return self.token_us * 1e-3 * count + self.token_context_ns * 1e-6 * pairs

    def tokens_within(self, milliseconds: float, context: int) -> float:
        """Return the size of the longest chunk behind `context` tokens that adds at most so much to
        a step: the positive solution of a quadratic equation. Needs a positive `token_us`."""
        pair = self.token_context_ns * 1e-6
        token = self.token_us * 1e-3 + pair * context
        left = max(0.0, milliseconds)
        # This form has no difference of nearly equal numbers, and holds where `pair` is 0.
        return 2.0 * left / (token + math.sqrt(token * token + 2.0 * pair * left))


class StepFit:
    """`max_step_tokens`: the engine's budget. Not for several threads, except `to_wire`."""

    def __init__(self, max_step_tokens: int) -> None:
        self._many = max(2, min(MANY_TOKENS, max_step_tokens // 4))
        self._kinds = [_Sums(), _Sums(), _Sums()]
        self._num_steps = 0
        self.costs: StepCosts | None = None
        """The fitted factors; None until enough different steps of all kinds were measured."""
        self._draft: StepCosts | None = None
        """The factors fitted to the steps that were measured so far."""

    def add(self, work: StepWork, milliseconds: float) -> None:
        """Take a step that was measured."""
        if milliseconds <= 0.0:
            return
        kind = self._kinds[bool(work.prompt_tokens) + (work.prompt_tokens >= self._many)]
        scale = 1.0 / milliseconds
        if self._draft is not None and kind.num_steps >= MIN_STEPS:
            expected = max(self._draft.milliseconds(work), milliseconds / 1000)
            scale = 1.0 / expected
            error = abs(milliseconds / expected - 1.0)
            if error > HUBER:
                scale *= math.sqrt(HUBER / error)
        terms = (
            scale,
            work.prompt_tokens * 1e-3 * scale,
            work.prompt_pairs * 1e-6 * scale,
            work.contexts * 1e-6 * scale,
        )
        kind.add(terms, milliseconds * scale)
        self._num_steps += 1
        if kind.num_steps == MIN_STEPS or self._num_steps % REFIT_STEPS == 0:
            self._refit()

    def to_wire(self) -> dict[str, float] | None:
        """Return `step_model` of the identity page; None until fitted."""
        costs = self.costs
        if costs is None:
            return None
        rounded = {name: float(f"{value:.4g}") for name, value in costs._asdict().items()}
        return {**rounded, "steps": self._num_steps}

    def _refit(self) -> None:
        sums = [sum(each) for each in zip(*(kind.sums for kind in self._kinds), strict=True)]
        matrix, moment = [[sums[place] for place in row] for row in PLACES], sums[10:]
        self._draft = StepCosts(*_non_negative_solution(matrix, moment))
        decodes, _, prompts = self._kinds
        is_known = (
            decodes.num_steps >= MIN_STEPS
            and prompts.num_steps >= MIN_STEPS
            and all(_spread(matrix, term) >= MIN_SPREAD for term in (1, 3))
        )
        if is_known and self._draft.base_ms > 0.0 and self._draft.token_us > 0.0:
            self.costs = self._draft


class _Sums:
    """Decayed sums of products of the terms, and of the terms with the target."""

    def __init__(self) -> None:
        self.sums = [0.0] * 14
        """The upper half of the matrix, then the products with the target."""
        self.num_steps = 0

    def add(self, terms: Vector, target: float) -> None:
        a, b, c, d = terms
        products = (
            *(a * a, a * b, a * c, a * d, b * b, b * c, b * d, c * c, c * d, d * d),
            *(a * target, b * target, c * target, d * target),
        )
        self.sums = [KEPT * s + p for s, p in zip(self.sums, products, strict=True)]
        self.num_steps += 1


def _spread(matrix: list[list[float]], term: int) -> float:
    """Return 1 minus the squared cosine of a term and `base` over all steps."""
    product = matrix[0][0] * matrix[term][term]
    return 1.0 - matrix[0][term] ** 2 / product if product > 0.0 else 0.0


def _non_negative_solution(matrix: list[list[float]], moment: list[float]) -> Vector:
    """Return the factors without a negative one that minimize the squared error."""
    best, gain = (0.0, 0.0, 0.0, 0.0), 0.0
    present = [term for term in range(4) if matrix[term][term] > 0.0]
    for size in range(len(present), 0, -1):
        for subset in itertools.combinations(present, size):
            found = _solve(matrix, moment, subset)
            won = sum(map(math.prod, zip(moment, found, strict=True)))
            if min(found) >= 0.0 and won > gain:
                best, gain = found, won
        if size == len(present) and gain:
            break  # the solution without the condition is one with it
    return best


def _solve(matrix: list[list[float]], moment: list[float], subset: tuple[int, ...]) -> Vector:
    """Solve the normal equations of some terms by Gaussian elimination; the others are 0. The
    matrix is positive definite but for terms that are alike: a little more on its diagonal divides
    their factor between them."""
    rows = [[*(matrix[i][j] * (1.0 + 1e-6 * (i == j)) for j in subset), moment[i]] for i in subset]
    for pivot, row in enumerate(rows):
        for below in rows[pivot + 1 :]:
            ratio = below[pivot] / row[pivot]
            for column in range(pivot, len(row)):
                below[column] -= ratio * row[column]
    found = [0.0] * 4
    for pivot in reversed(range(len(rows))):
        row, known = rows[pivot], rows[pivot + 1 :]
        rest = sum(row[pivot + 1 + i] * found[subset[pivot + 1 + i]] for i in range(len(known)))
        found[subset[pivot]] = (row[-1] - rest) / row[pivot]
    return found[0], found[1], found[2], found[3]
