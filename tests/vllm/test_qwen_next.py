"""Gated delta nets beside attention, and a mixture of experts: a tiny Qwen3-Next, in bfloat16, for
vLLM's kernels for CPUs take no other.

So an answer is compared where one engine alone, too, computes the prompt's last token in a step of
its own, behind whole chunks: there not one bit differs. Elsewhere a chunk's kernel and a decode
step's round otherwise, and log-probabilities differ by up to 0.9.
"""

from pathlib import Path

import pytest

from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm.measures import FETCHED, nothing_left
from tests.vllm.qwen_next_model import write_qwen_next
from tests.vllm.servers import CHUNK, OURS, PUSH, Fleet, chunking_pair
from tests.vllm.test_push import both_legs
from tests.vllm.test_state import prompts_are_right, pulled

HAS_BFLOAT16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not HAS_BFLOAT16, reason="vLLM's delta nets want AVX-512 BF16 of a CPU"),
]
IN_BFLOAT16 = ("--dtype", "bfloat16")
LENGTHS = tuple(CHUNK * chunks + 1 for chunks in range(7))


PAIR = chunking_pair("qwen-next", OURS, write_qwen_next, *IN_BFLOAT16)
PUSHING = chunking_pair("qwen-next-push", PUSH, write_qwen_next, *IN_BFLOAT16)


def first_tokens_are_seen(prefiller: Server, seed: int) -> None:
    """In the answers to the prompts of `prompts_are_right`."""
    for length in LENGTHS:
        prompt = tokens_of(length, seed + length)
        right = complete(prefiller, prompt)
        other = complete(prefiller, [prompt[0] ^ 1, *prompt[1:]])
        assert differences([right], [other]) != []


def test_prompts_are_those_of_one_engine_alone(pair: list[Server]) -> None:
    prompts_are_right(pair, pulled, 9000, LENGTHS)
    first_tokens_are_seen(pair[0], 9000)


def test_routed_answers_are_those_of_one_engine_alone(fleet: Fleet, pair: list[Server]) -> None:
    """A conversation, each turn of which is computed as if it were a first."""
    prefiller, decoder = pair
    prompt = tokens_of(2 * CHUNK + 1, 9200)
    with (
        fleet.router([prefiller], [decoder], "--decode-first-turns", "0") as router,
        nothing_left(*pair),
    ):
        fetched = metric(decoder, FETCHED)
        for turn in range(3):
            answer = complete(router, prompt, conversation_id="delta nets")
            assert differences([complete(prefiller, prompt)], [answer]) == []
            new = tokens_of(CHUNK - len(answer.tokens), 9201 + turn)
            fetched += len(prompt) - 1
            assert metric(decoder, FETCHED) == fetched
            prompt = [*prompt, *answer.tokens, *new]


def test_pushed_prompts_are_those_of_one_engine_alone(pushing: list[Server]) -> None:
    prompts_are_right(pushing, both_legs, 9400, LENGTHS)
    first_tokens_are_seen(pushing[0], 9400)
