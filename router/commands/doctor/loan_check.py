"""The check of a loan: an engine reads a prompt's KV from another engine's prefix cache.

The doctor sends a prompt to one engine, and then to the other one with the first as a holder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from time import monotonic as now
from typing import Any, NamedTuple

from router.commands.doctor.checks import Check, Findings, cure_of, failure_text, timeout_text
from router.commands.router_client import error_message
from router.fleet.engine import PREFILL, Engine, Health
from router.fleet.engine_probe import MAX_ANSWER_BYTES
from router.http_client.errors import UpstreamError
from router.openai.answers import parse_object
from router.openai.errors import EngineError
from router.proxy.loans import holder_entry, loan_endpoint
from router.proxy.messages import encode_body, leg_message
from router.proxy.request import COMPLETIONS
from router.proxy.warmup import PROMPT_TOKEN_IDS

NAME = "prefix borrowed"
# Several blocks, and far more than an engine would rather compute.
LOAN_PROMPT_TOKENS = 512
# The first handshake may take longer than an engine waits for a loan.
MAX_TRIES = 3


class CheckedLoan(NamedTuple):
    lender: Engine
    borrower: Engine

    def __str__(self) -> str:
        return f"{self.lender.name} -> {self.borrower.name}"

    @property
    def models(self) -> frozenset[str]:
        """The models that both engines serve."""
        return (self.lender.models or frozenset()) & (self.borrower.models or frozenset())


def choose_loan(engines: Sequence[Engine]) -> CheckedLoan | None:
    """Return two engines between which a loan is possible; prefill engines come first."""
    healthy = [engine for engine in engines if engine.health is Health.HEALTHY]
    lenders = [one for one in healthy if one.capabilities.lends and loan_endpoint(one)]
    possible = [
        loan
        for borrower in healthy
        if borrower.capabilities.borrows
        for lender in lenders
        if lender is not borrower and lender.group == borrower.group
        if lender.capabilities.names_blocks_as(borrower.capabilities)
        if (loan := CheckedLoan(lender, borrower)).models
    ]
    possible.sort(key=lambda loan: [not one.role.plays(PREFILL) for one in reversed(loan)])
    return possible[0] if possible else None


async def check_loan(engines: Sequence[Engine], timeout_s: float) -> list[Check]:
    """Check that an engine can borrow from another one, if two engines can do that."""
    loan = choose_loan(engines)
    found = Findings("fleet" if loan is None else str(loan))
    if loan is None:
        lends = any(one.capabilities.lends for one in engines)
        text = "no engine lends its prefix cache"
        if lends:
            schemes = sorted({one.capabilities.loan_scheme for one in engines} - {""})
            text = "no engine of the same group borrows from the engines that lend"
            if len(schemes) > 1:
                text += f", or they name blocks differently: {'; '.join(schemes)}"
        found.skip(NAME, text)
        return found.checks
    cure = f"look at the log of {loan.borrower.name}: can it reach the side channel and UCX port "
    cure += f"of {loan.lender.name}? Else requests compute what they could borrow"
    try:
        async with asyncio.timeout(timeout_s):
            tokens = await _borrow(loan)
    except TimeoutError:
        found.fail(NAME, timeout_text(loan, timeout_s), cure)
    except (UpstreamError, EngineError) as error:
        found.fail(NAME, f"no: {failure_text(loan, error, timeout_s)}", cure_of(error, cure))
    else:
        if tokens:
            found.ok(NAME, f"yes, {tokens} of {LOAN_PROMPT_TOKENS} tokens")
        else:
            found.fail(NAME, f"no: {loan.borrower.name} has computed the prompt itself", cure)
    return found.checks


async def _borrow(loan: CheckedLoan) -> int:
    """Return how many tokens were borrowed. Raises UpstreamError or EngineError."""
    for _ in range(MAX_TRIES):
        prompt = Random().choices(PROMPT_TOKEN_IDS, k=LOAN_PROMPT_TOKENS)
        body = {"model": min(loan.models), "prompt": prompt, "max_tokens": 1, "stream": False}
        await _send(loan.lender, body)
        holders = {"holders": [holder_entry(loan.lender, LOAN_PROMPT_TOKENS)]}
        answer = await _send(loan.borrower, {**body, "kv_transfer_params": holders})
        params = answer.get("kv_transfer_params")
        tokens = params.get("borrowed_tokens") if isinstance(params, dict) else None
        if isinstance(tokens, int) and tokens > 0:
            return tokens
    return 0


async def _send(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's answer. Raises UpstreamError or EngineError."""
    line = f"authorization: {engine.credential}\r\n" if engine.credential else ""
    name, content = f"doctor-{Random().getrandbits(64):016x}", encode_body(body)
    message = leg_message(COMPLETIONS, engine.name, name, line.encode("latin-1"), (content, b""))
    # The caller limits the time.
    answer = await engine.pool.fetch(message, now() + 3600, MAX_ANSWER_BYTES)
    parsed = parse_object(answer.body) or {}
    if answer.status != 200:
        raise EngineError(f"{engine.name} answers {answer.status}: {error_message(parsed)}")
    return parsed
