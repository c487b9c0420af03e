"""A model of the time of an engine's steps, fitted online to the engine's own steps.

A step computes chunks of prompts and one token of each decoding request. Its milliseconds are

    base + token * T + token_context * sum(n * (c + n / 2)) + context * sum(d)
    + prompt                                       if T > 0
    + mixing * base + mixed_context * sum(d)       if T > 0 and requests decode (a mixed step)

with T the prompt tokens in the step, n the tokens of a chunk, c the tokens before the chunk, and d
the tokens before a decoding request's new one: weights are read once a step, each prompt token is
multiplied with them and attends to the tokens before it, and decoding reads the KV of all contexts.
`prompt` is negative where the multiplication hides a part of the reading, as on a GPU, and positive
where steps with prompts do without something, such as a CUDA graph. A step with prompts takes no
less than one without.

`mixing` is the mixing penalty: 0 if the weights are read once for prompts and answers, 1 if they
are read twice. The tokens of decoding requests, which cost nothing where a step only reads weights,
cost time beside a chunk: as their number is not known everywhere, `mixed_context` stands for it. On
H200 operators (aiconfigurator 0.12, Qwen3-32B, 64 to 2,048 prompt tokens beside 32 decodes) a step
with both reads the weights once, and its attention is the sum of the parts. Steps without prompts,
steps with prompts alone and mixed steps are all needed to find the penalty, the latter two of
similar sizes, because a line through large steps says little about small ones. Until then, and
where the steps are too noisy, it is unknown, and the fit goes without the terms of mixed steps.

`StepFit` is a least-squares fit of relative errors, from decayed sums. Steps without prompts, with
few and with many prompt tokens, alone and mixed, have sums of their own, which only new steps of
the same kind decay: an hour of decoding does not wash out what is known of prompts. A step far from
its prediction (a compilation, a busy machine) pulls no more than one at HUBER of it does (P. J.
Huber, Robust estimation of a location parameter, 1964). No factor but `prompt` is negative.
"""

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

SIZE_RATIO = 4.0
"""A step with prompts alone is compared with mixed steps of up to so many times its prompt tokens,
or so many times fewer."""
MAX_ERROR = 0.1
"""A mixing penalty with a larger standard error is unknown."""

BASE, TOKEN, TOKEN_CONTEXT, CONTEXT, PROMPT, MIXING, MIXED_CONTEXT = TERMS = range(7)
PAIRS = [(i, j) for i in TERMS for j in TERMS[i:]]
"""The elements of the symmetric matrix in the sums."""
MAX_PIVOTS = 40


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
    """The factors of the terms, in the units of their names. Only `prompt_ms` may be negative."""

    base_ms: float
    token_us: float
    token_context_ns: float
    context_ns: float
    prompt_ms: float = 0.0
    mixing: float | None = None
    """The mixing penalty in units of `base_ms`. None if unknown."""
    mixed_context_ns: float = 0.0

    def milliseconds(self, work: StepWork) -> float:
        decoding = self.base_ms + self.context_ns * 1e-6 * work.contexts
        if not work.prompt_tokens:
            return decoding
        tokens = self.token_us * 1e-3 * work.prompt_tokens
        pairs = self.token_context_ns * 1e-6 * work.prompt_pairs
        return max(decoding, self.milliseconds_beside(work.contexts) + tokens + pairs)

    def milliseconds_beside(self, contexts: int) -> float:
        """Return the time of a step with prompts, less those of its chunks."""
        milliseconds = self.base_ms + self.prompt_ms
        if contexts:
            each = self.context_ns + self.mixed_context_ns
            milliseconds += (self.mixing or 0.0) * self.base_ms + each * 1e-6 * contexts
        return milliseconds

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
        self._decodes = _Sums()
        self._prompts = [[_Sums(), _Sums()], [_Sums(), _Sums()]]
        """The steps with prompts: first alone or mixed, then with few or many prompt tokens."""
        self._num_steps = 0
        self._mixed_size = 0.0
        """The mean logarithm of the prompt tokens in mixed steps."""
        self._num_comparable = 0
        """Steps with prompts alone of about the size of the mixed ones."""
        self.costs: StepCosts | None = None
        """The fitted factors; None until enough different steps of all kinds were measured."""
        self._draft: StepCosts | None = None
        """The factors fitted to the steps that were measured so far."""

    def add(self, work: StepWork, milliseconds: float) -> None:
        """Take a step that was measured."""
        if milliseconds <= 0.0:
            return
        tokens, is_mixed = work.prompt_tokens, bool(work.prompt_tokens and work.contexts)
        kind = self._prompts[is_mixed][tokens >= self._many] if tokens else self._decodes
        scale = 1.0 / milliseconds
        if self._draft is not None and kind.num_steps >= MIN_STEPS:
            expected = max(self._draft.milliseconds(work), milliseconds / 1000)
            scale = 1.0 / expected
            error = abs(milliseconds / expected - 1.0)
            if error > HUBER:
                scale *= math.sqrt(HUBER / error)
        contexts = work.contexts * 1e-6 * scale
        terms = (
            scale,
            tokens * 1e-3 * scale,
            work.prompt_pairs * 1e-6 * scale,
            contexts,
            scale if tokens else 0.0,
            scale if is_mixed else 0.0,
            contexts if is_mixed else 0.0,
        )
        kind.add(terms, milliseconds * scale)
        self._num_steps += 1
        if tokens:
            self._compare(math.log(tokens), is_mixed)
        if kind.num_steps == MIN_STEPS or self._num_steps % REFIT_STEPS == 0:
            self._refit()

    def to_wire(self) -> dict[str, float] | None:
        """Return `step_model` of the identity page; None until fitted."""
        costs = self.costs
        if costs is None:
            return None
        found = costs._asdict()
        found["prompt_base_ms"] = costs.base_ms + found.pop("prompt_ms")
        if costs.mixing is None:
            del found["mixing"], found["mixed_context_ns"]
        rounded = {name: float(f"{value:.4g}") for name, value in found.items()}
        return {**rounded, "steps": self._num_steps}

    def _compare(self, size: float, is_mixed: bool) -> None:
        num_mixed = sum(kind.num_steps for kind in self._prompts[True])
        if is_mixed:
            self._mixed_size += (size - self._mixed_size) / min(num_mixed, MEMORY)
        elif num_mixed >= MIN_STEPS:
            self._num_comparable += abs(size - self._mixed_size) <= math.log(SIZE_RATIO)

    def _refit(self) -> None:
        kinds = (self._decodes, *self._prompts[False], *self._prompts[True])
        sums = [sum(each) for each in zip(*(kind.sums for kind in kinds), strict=True)]
        matrix = [[0.0] * len(TERMS) for _ in TERMS]
        for (i, j), value in zip(PAIRS, sums, strict=False):
            matrix[i][j] = matrix[j][i] = value
        moment, total = sums[len(PAIRS) : -1], sums[-1]
        present = [term for term in (BASE, TOKEN, TOKEN_CONTEXT, CONTEXT) if matrix[term][term]]
        if _spread(matrix, TOKEN, PROMPT) >= MIN_SPREAD:
            present.append(PROMPT)
        found = _non_negative_solution(matrix, moment, present)
        is_alike = _spread(matrix, TOKEN_CONTEXT, TOKEN) < MIN_SPREAD
        if TOKEN in present and not found[TOKEN] and is_alike:
            # Prompts of about one length do not show which of the two takes the time.
            present.remove(TOKEN_CONTEXT)
            found = _non_negative_solution(matrix, moment, present)
        self._draft = draft = _costs_of(found)
        decodes = self._decodes.num_steps
        is_known = (
            decodes >= MIN_STEPS
            and sum(few_and_many[1].num_steps for few_and_many in self._prompts) >= MIN_STEPS
            and all(_spread(matrix, term, BASE) >= MIN_SPREAD for term in (TOKEN, CONTEXT))
        )
        if self._num_comparable >= MIN_STEPS and decodes >= MIN_STEPS:
            present += (MIXING, MIXED_CONTEXT)
            found = _non_negative_solution(matrix, moment, present)
            error = _mixing_error(matrix, moment, total, found)
            if 0.0 < error <= MAX_ERROR * found[BASE]:
                self._draft = draft = _costs_of(found, is_mixing_known=True)
        if is_known and draft.base_ms > 0.0 and draft.token_us > 0.0:
            self.costs = draft


class _Sums:
    """Decayed sums of products of the terms, of the terms with the target, and of its square."""

    def __init__(self) -> None:
        self.sums = [0.0] * (len(PAIRS) + len(TERMS) + 1)
        self.num_steps = 0

    def add(self, terms: Sequence[float], target: float) -> None:
        products = [terms[i] * terms[j] for i, j in PAIRS]
        products += [*(term * target for term in terms), target * target]
        self.sums = [KEPT * s + p for s, p in zip(self.sums, products, strict=True)]
        self.num_steps += 1


def _costs_of(found: Sequence[float], is_mixing_known: bool = False) -> StepCosts:
    base, token, token_context, context, prompt, mixing, mixed_context = found
    known = mixing / base if is_mixing_known else None
    return StepCosts(base, token, token_context, context, max(prompt, -base), known, mixed_context)


def _spread(matrix: list[list[float]], term: int, other: int) -> float:
    """Return 1 minus the squared cosine of two terms over all steps."""
    product = matrix[other][other] * matrix[term][term]
    return 1.0 - matrix[other][term] ** 2 / product if product > 0.0 else 0.0


def _non_negative_solution(
    matrix: list[list[float]], moment: list[float], present: Sequence[int]
) -> list[float]:
    """Return the factors of the terms in `present` that minimize the squared error, none of them
    negative but that of PROMPT. The method is principal pivoting with the rule of the least index
    (K. G. Murty, Note on a Bard-type scheme for solving the complementarity problem, 1974)."""
    active = set(present)
    for _ in range(MAX_PIVOTS):
        found = _solve(matrix, moment, sorted(active))
        for term in present:
            if term == PROMPT:
                continue
            left = moment[term] - sum(map(math.prod, zip(matrix[term], found, strict=True)))
            if found[term] < 0.0 or (term not in active and left > 1e-6 * moment[term]):
                active ^= {term}
                break
        else:
            return found
    return [max(0.0, factor) for factor in found]


def _mixing_error(
    matrix: list[list[float]], moment: list[float], total: float, found: Sequence[float]
) -> float:
    """Return the standard error of MIXING's factor. `total` is the sum of the targets' squares,
    which are about 1: so it is also the number of steps."""
    squares = total - sum(map(math.prod, zip(moment, found, strict=True)))
    subset = sorted({MIXING, *(term for term in TERMS if found[term])})
    inverse = _solve(matrix, [float(term == MIXING) for term in TERMS], subset)
    return math.sqrt(max(0.0, squares / total * inverse[MIXING]))


def _solve(matrix: list[list[float]], moment: list[float], subset: Sequence[int]) -> list[float]:
    """Solve the normal equations of some terms by Gaussian elimination; the others are 0. The
    matrix is positive definite but for terms that are alike: a little more on its diagonal divides
    their factor between them."""
    rows = [[*(matrix[i][j] * (1.0 + 1e-6 * (i == j)) for j in subset), moment[i]] for i in subset]
    for pivot, row in enumerate(rows):
        for below in rows[pivot + 1 :]:
            ratio = below[pivot] / row[pivot]
            for column in range(pivot, len(row)):
                below[column] -= ratio * row[column]
    found = [0.0] * len(TERMS)
    for pivot in reversed(range(len(rows))):
        row, known = rows[pivot], rows[pivot + 1 :]
        rest = sum(row[pivot + 1 + i] * found[subset[pivot + 1 + i]] for i in range(len(known)))
        found[subset[pivot]] = (row[-1] - rest) / row[pivot]
    return found
