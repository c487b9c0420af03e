"""The only oracle that catches wrong KV: tokens and log-probabilities against one engine alone."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tests.integration.processes import Server, metric, wait_for

BLOCK = 32
TOLERANCE = 1e-3
"""Between log-probabilities of the same tokens: far above the float noise of other batch shapes."""
NOISE = 2e-4
"""That was 9e-5 at most in 170,000 tokens of the tiny model, each computed in two ways. One block's
KV that is wrong in one layer changes tokens nearly always; one position's in one layer may not."""


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str

    @classmethod
    def in_body(cls, body: dict[str, Any]) -> "Answer":
        """Of a completion that was asked for token ids and log-probabilities."""
        choice = body["choices"][0]
        logprobs = choice["logprobs"]["token_logprobs"]
        return cls(tuple(choice["token_ids"]), tuple(logprobs), choice["text"])

    @classmethod
    def in_events(cls, text: str) -> "Answer":
        """Of a whole stream. Raises ValueError where it does not end as it should, or tells of a
        failure."""
        *events, end, rest = text.split("\n\n")
        if (end, rest) != ("data: [DONE]", ""):
            raise ValueError(f"a stream that was cut: {text[-300:]}")
        chunks = [json.loads(one.removeprefix("data: ")) for one in events if one[:1] != ":"]
        if failed := [chunk for chunk in chunks if "error" in chunk]:
            raise ValueError(f"an error event: {failed[0]}")
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return cls(
            tuple(token for choice in choices for token in choice.get("token_ids") or ()),
            tuple(p for c in choices if c.get("logprobs") for p in c["logprobs"]["token_logprobs"]),
            "".join(choice["text"] for choice in choices),
        )


def text_of(length: int, seed: int) -> str:
    """As many bytes as tokens: the tiny model's tokenizer is byte-level."""
    letters = random.Random(seed)
    return "".join(letters.choice("abcdefghij klmnop") for _ in range(length))


def tokens_of(length: int, seed: int) -> list[int]:
    """Ids of single bytes: answers can be appended as the tokens they were."""
    return [random.Random(seed * 100_003 + i).randrange(256) for i in range(length)]


def thirty_six_prompts() -> list[str]:
    """Short, around one block, several blocks, 1,500 tokens, and families that share a prefix."""
    lengths = (1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 200, 255, 256, 257, 500, 1000, 1500, 1501)
    alone = [text_of(length, seed) for seed, length in enumerate(lengths)]
    system = text_of(320, 1000)
    shared = [system + text_of(length, 2000 + length) for length in (1, 31, 32, 33, 64, 90)]
    shared += [text_of(1500, 16)[:cut] + "!" + text_of(40, cut) for cut in (500, 512, 1024, 1400)]
    again = [alone[4], alone[16], shared[0], shared[4], alone[9], alone[0], shared[8], alone[14]]
    return alone + shared + again


Prompt = str | list[int]
"""Text, or token ids."""


def body_of(prompt: Prompt, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What an answer is asked for with, so that it can be compared with the oracle's."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def complete(server: Server, prompt: Prompt, max_tokens: int = 12, **body: Any) -> Answer:
    response = server.post("/v1/completions", body_of(prompt, {"max_tokens": max_tokens, **body}))
    assert response.status_code == 200, response.text
    return Answer.in_body(response.json())


def streamed(server: Server, prompt: Prompt, max_tokens: int, **body: Any) -> Answer:
    fields = {"max_tokens": max_tokens, "stream": True, **body}
    answer = server.post("/v1/completions", body_of(prompt, fields))
    assert answer.status_code == 200, answer.text
    assert "token_ids " not in answer.text
    return Answer.in_events(answer.text)


def all_streamed(
    server: Server,
    prompts: Sequence[Prompt],
    max_tokens: int,
    while_they_run: Callable[[], None],
    seconds: float = 100,
) -> list[Answer]:
    """All at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(streamed, server, prompt, max_tokens) for prompt in prompts]
        while_they_run()
        return [answer.result(timeout=seconds) for answer in answers]


def all_decoded_together(
    router: Server, decoders: Sequence[Server], asks: Sequence[Callable[[], Answer]]
) -> list[Answer]:
    """The decode engines stand still until all decode legs have arrived: then all run together,
    whatever the speed of the machine. The router's probes must wait longer (--health-timeout)."""
    legs = r'disagg_router_engine_requests_in_flight\{.*role="decode".*\}'
    with ThreadPoolExecutor(len(asks)) as pool, ExitStack() as frozen:
        for server in decoders:
            frozen.enter_context(server.frozen())
        answers = [pool.submit(ask) for ask in asks]
        wait_for(lambda: metric(router, legs) == len(asks), "all are prefilled", 60)
        frozen.close()
        return [answer.result() for answer in answers]


def complete_all(
    server: Server, prompts: Sequence[Prompt], at_once: int = 8, **body: Any
) -> list[Answer]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: complete(server, prompt, **body), prompts))


def differences(expected: list[Answer], got: list[Answer]) -> list[str]:
    """One line per answer that differs; empty when every token and log-probability agrees."""
    found = []
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        gaps = [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
        if one.tokens != other.tokens or max(gaps, default=0.0) > TOLERANCE:
            where = next((at for at, gap in enumerate(gaps) if gap > NOISE), len(gaps))
            found.append(
                f"prompt {index}: {one.tokens} {other.tokens}, log-probabilities by "
                f"{max(gaps, default=0.0)}, beyond noise from token {where} of {len(gaps)} on"
            )
    return found
