"""How long prompts delay the next token of running answers.

    python scripts/bench.py step-budget URL [URL]...

At each URL, an engine or a router, answers stream while prompts come, one after another. Prints the
gaps between the answers' tokens, the prompt tokens per second and how many answers differ from
those of the first URL. Two tokens that are equally likely, up to float noise, are no difference.
Start one engine per budget, and give the one that has none first:

    vllm serve MODEL --port 8000
    vllm serve MODEL --port 8001 --max-num-batched-tokens 512
    vllm serve MODEL --port 8002 --scheduler-cls ... (docs/engine-configuration.md, target_itl_ms)
    python scripts/bench.py step-budget http://localhost:800{0,1,2}

An engine with a target first measures its steps: `--warm-up` prompts of different lengths come
before those that are measured.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from scripts.benchmarks.common import Sample, bench_parser, positive, report_progress
from tests.integration.oracle import NOISE, body_of, tokens_of
from tests.integration.processes import wait_for

TIMEOUT_S = 600.0
CHAT_PROMPT_TOKENS = 40

Generated = list[tuple[int, float]]
"""The token ids of an answer, as far as it got, and their log-probabilities."""


@dataclass
class Chats:
    """Streamed answers, and the seconds between the tokens of each."""

    url: str
    number: int
    max_tokens: int
    model: str = "tiny"
    gaps: list[float] = field(default_factory=list)
    answers: dict[int, Generated] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator[None]:
        over = threading.Event()
        threads = [threading.Thread(target=self._chat, args=(n, over)) for n in range(self.number)]
        for thread in threads:
            thread.start()
        try:
            wait_for(self._all_stream, "the answers stream", 120)
            self.gaps.clear()
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _all_stream(self) -> bool:
        return all(len(self.answers.get(number, ())) >= 10 for number in range(self.number))

    def _chat(self, number: int, over: threading.Event) -> None:
        # If a router is there, the prefill engine computes these prompts: they are not judged.
        fields = {"model": self.model, "stream": True, "max_tokens": self.max_tokens}
        prompt = tokens_of(CHAT_PROMPT_TOKENS, 700 + number)
        body = body_of(prompt, {**fields, "cache_hit_threshold": 0})
        tokens: Generated = []
        self.answers[number] = tokens
        url = f"{self.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as answer:
            before = 0.0
            for line in answer.iter_lines():
                if over.is_set():
                    return
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                if before:
                    self.gaps.append(now - before)
                before = now
                tokens += generated_in(json.loads(line[6:])["choices"][0])


@dataclass(frozen=True)
class Measured:
    gaps: Sample
    """Seconds between two tokens of an answer."""
    tokens_per_s: float
    """Tokens of prompts that were computed in a second."""
    answers: dict[int, Generated]
    firsts: list[Generated]
    """The tokens that follow each prompt."""

    def __str__(self) -> str:
        p50, p99, worst = (self.gaps.percentile(p) * 1e3 for p in (50, 99, 100))
        times = f"gaps p50 {p50:.0f}, p99 {p99:.0f}, worst {worst:.0f} ms"
        return f"{times}; prompts {self.tokens_per_s:.0f} tokens/s"

    def num_different(self, other: "Measured") -> int:
        """Return how many answers differ, as far as both got."""
        pairs = [*zip(self.firsts, other.firsts, strict=True)]
        pairs += [(tokens, other.answers[number]) for number, tokens in self.answers.items()]
        return sum(differ(*pair) for pair in pairs)


def generated_in(choice: Mapping[str, Any]) -> Generated:
    """Return what a choice, or an event of a stream, adds to an answer."""
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
    return list(zip(choice.get("token_ids") or (), logprobs, strict=True))


def differ(one: Generated, other: Generated) -> bool:
    """Return True if the first tokens that differ are not equally likely up to float noise. What
    follows other tokens cannot be compared."""
    for (token, logprob), (other_token, other_logprob) in zip(one, other, strict=False):
        if token != other_token:
            return abs(logprob - other_logprob) > NOISE
    return False


def measure(
    url: str, lengths: Sequence[int], chats: int, max_tokens: int, model: str = "tiny"
) -> Measured:
    """Send prompts of these lengths one after another while `chats` answers of up to `max_tokens`
    stream."""
    running = Chats(url, chats, max_tokens, model)
    firsts = []
    with running.running(), httpx.Client(timeout=TIMEOUT_S) as client:
        began = time.monotonic()
        for number, length in enumerate(lengths):
            prompt = tokens_of(length, 1000 + number)
            body = body_of(prompt, {"model": model, "max_tokens": 2})
            answer = client.post(f"{url}/v1/completions", json=body)
            answer.raise_for_status()
            firsts.append(generated_in(answer.json()["choices"][0]))
        seconds = time.monotonic() - began
        gaps = Sample(list(running.gaps))
    return Measured(gaps, sum(lengths) / seconds, running.answers, firsts)


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser("step-budget", __doc__)
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--chats", type=positive, default=8, help="answers that stream (8)")
    parser.add_argument("--prompts", type=positive, default=12, help="measured prompts (12)")
    parser.add_argument("--tokens", type=positive, default=8000, help="of a measured prompt (8000)")
    parser.add_argument("--warm-up", type=positive, default=40, help="prompts before these (40)")
    parser.add_argument("--max-tokens", type=positive, default=20_000, help="of an answer (20000)")
    options = parser.parse_args(arguments)
    first: Measured | None = None
    for url in options.urls:
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        report_progress(f"{url}: {options.warm_up} prompts to warm up")
        lengths = [options.tokens * (1 + n % 8) // 8 for n in range(options.warm_up)]
        measure(url, lengths, options.chats, options.max_tokens, model)
        lengths = [options.tokens] * options.prompts
        found = measure(url, lengths, options.chats, options.max_tokens, model)
        first = first or found
        print(f"{url}: {found}, {found.num_different(first)} answers differ", flush=True)
    return 0
