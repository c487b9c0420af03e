"""Loans of latent vectors inside vLLM, with the prefix cache that its CPU build switches off for
MLA: see tests/vllm/mended_latents.py. The decode engine has none: it borrows and does not lend."""

from functools import partial
from typing import Any

import pytest

from tests.integration.legs import decode, holders, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric, wait_for
from tests.vllm import mended_latents
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left
from tests.vllm.mla_model import BACKEND, write_mla_model
from tests.vllm.servers import SCHEDULER, TRUSTING, Fleet, Kind

SYSTEM = 1200
"""Tokens of a system prompt, in whole blocks of 16."""
ENDS = (1, 5, 16, 40, 300)
"""Tokens of the prompts behind one, each behind another one."""


@pytest.mark.nightly
def test_answers_from_borrowed_latents_are_those_of_one_vllm_alone(
    fleet: Fleet,
) -> None:
    prompts = [[*tokens_of(SYSTEM, end), *tokens_of(end, 1000 + end)] for end in ENDS]
    with fleet.server(Kind("mla-alone", None, BACKEND, write_mla_model)) as alone:
        right = [complete(alone, prompt) for prompt in prompts]
    options = (*SCHEDULER, *BACKEND)
    cached: dict[str, Any] = {"model": write_mla_model, "plugins": (mended_latents,)}
    kinds = (
        Kind("mla-holder", TRUSTING, options, **cached),
        Kind("mla-prefill", TRUSTING, options, **cached),
        Kind("mla-decode", TRUSTING, options, write_mla_model),
    )
    with fleet.servers(*kinds) as (holder, prefiller, decoder):
        (rank,) = decoder.get("/disagg/identity").json()["ranks"]
        assert (rank["lends"], rank["borrows"]) == (False, True)
        assert rank["loan_problem"].startswith("prefix caching is off")
        assert f"lends no prefixes: {rank['loan_problem']}" in decoder.log.read_text()
        for end, prompt in zip(ENDS, prompts, strict=True):
            complete(holder, [*prompt[:SYSTEM], *tokens_of(20, 2000 + end)], 1)
        named = holders(holder, SYSTEM)
        with nothing_left(holder, prefiller, decoder):
            for prompt, expected in zip(prompts, right, strict=True):
                computed, fetched = metric(prefiller, COMPUTED), metric(prefiller, FETCHED)
                answer = prefill(prefiller, prompt, named)
                assert answer["borrowed_tokens"] == SYSTEM
                counts = partial(_has_computed, prefiller, computed + len(prompt) - SYSTEM)
                wait_for(counts, "the rest is computed, and counted")
                assert metric(prefiller, FETCHED) - fetched == SYSTEM
                turns = [decode(decoder, prompt, named), decode(holder, prompt, answer)]
                assert turns[0].params == {"borrowed_tokens": SYSTEM, "lender": 0}
                assert differences([expected] * 2, [turn.answer for turn in turns]) == []


def _has_computed(server: Server, num_tokens: float) -> bool:
    return metric(server, COMPUTED) == num_tokens
