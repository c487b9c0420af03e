"""What vLLM's HTTP server says of given tokens: its own output processor, without an engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from engine_ext.common.resume_payload import KEY, ResumePayload
from engine_ext.vllm.optional.answers import patch_outputs, patch_replay, resumed_request
from engine_ext.vllm.optional.streams.patch_streams import ReplayedOutput, StreamResults

OTHER = 1
Part = tuple[str, bool, str | None]


@dataclass
class Asked:
    """A request of which `text` is given, a token a byte, and who takes its results."""

    processor: OutputProcessor
    request: EngineCoreRequest
    queue: RequestOutputCollector

    def step(self, text: str, **output: Any) -> None:
        """The engine's."""
        for token in text.encode():
            state = self.processor.request_states["r"]
            scores = patch_replay.logprobs_lists(state, [(token, -0.5), (OTHER, -0.1)])
            self.processor.process_outputs(
                [EngineCoreOutput("r", [token], new_logprobs=scores, **output)]
            )

    def parts(self, one_by_one: bool = False) -> list[Part]:
        told: Any = self.queue.output
        assert isinstance(told, ReplayedOutput)
        found = [(part.outputs[0], silent) for part, silent in told.unrolled(one_by_one)]
        return [(output.text, silent, output.finish_reason) for output, silent in found]


def ask(
    model: Path, text: str, spoken: int = 0, stream: bool = True, interval: int = 1, **params: Any
) -> Asked:
    patch_replay.install()
    patch_outputs.install()
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    tokens = tuple(text.encode())
    entries = tuple(((token, -0.5), (OTHER, -0.1)) for token in tokens[spoken:])
    carried = resumed_request.carried(ResumePayload((1, 2, 3), tokens, spoken, entries))
    params = {"max_tokens": 20, "ignore_eos": True, "logprobs": 1, **params}
    sampling = SamplingParams(
        output_kind=kind, extra_args={resumed_request.FIELD: carried}, **params
    )
    sampling.update_from_generation_config({}, 1)
    whom = {"lora_request": None, "cache_salt": None, "data_parallel_rank": None}
    request = EngineCoreRequest(
        "r", [1, 2, 3], None, sampling, None, time.time(), **whom, external_req_id="x"
    )
    tokenizer = get_tokenizer(str(model))
    processor = OutputProcessor(tokenizer, log_stats=False, stream_interval=interval)
    queue = RequestOutputCollector(kind, "r")
    processor.add_request(request, None, None, 0, queue)
    return Asked(processor, request, queue)


def given_tokens_are_told_before_what_the_engine_adds(model: Path) -> None:
    asked = ask(model, "hello", spoken=2)
    asked.step("!")
    assert asked.parts() == [("he", True, None), ("llo", False, None), ("!", False, None)]
    assert not asked.request.abort_immediately


def parsers_get_given_tokens_one_by_one(model: Path) -> None:
    parts = ask(model, "hello", spoken=2).parts(one_by_one=True)
    assert [text for text, *_ in parts] == list("hello")
    assert [silent for _, silent, _ in parts] == [True, True, False, False, False]


def an_end_in_what_was_spoken_is_still_said(model: Path) -> None:
    asked = ask(model, "abcd", spoken=4, stop=["cd"])
    assert asked.parts() == [("ab", True, None), ("", False, "stop")]
    assert asked.request.abort_immediately


def what_a_stop_string_takes_back_was_not_spoken(model: Path) -> None:
    asked = ask(model, "abcd", spoken=1, stop=["bc"])
    assert asked.parts() == [("", True, None), ("a", False, "stop")]
    assert asked.request.abort_immediately


def what_may_not_end_an_answer_yet_does_not(model: Path) -> None:
    early = ask(model, "abcbd", stop_token_ids=[*b"b"], min_tokens=3)
    assert early.parts() == [("abc", False, "stop")]
    capped = ask(model, "abab", stop_token_ids=[*b"b"], min_tokens=4, max_tokens=4)
    assert capped.parts() == [("abab", False, "length")]


def given_tokens_are_told_whatever_the_interval(model: Path) -> None:
    asked = ask(model, "abcd", spoken=1, interval=5)
    assert asked.parts() == [("a", True, None), ("bcd", False, None)]
    asked.queue.output = None
    asked.step("efghij")
    assert asked.queue.output is not None
    assert asked.queue.output.outputs[0].text == "efghi"


def what_is_not_streamed_ends_whole(model: Path) -> None:
    asked = ask(model, "abcd", stream=False, max_tokens=3)
    output: Any = asked.queue.output
    assert not isinstance(output, ReplayedOutput)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abc", "length")
    assert len(output.outputs[0].logprobs) == 3
    assert asked.request.abort_immediately


def a_hand_over_tells_log_probabilities_and_holds_text_back(model: Path) -> None:
    asked = ask(model, "ab", spoken=1, stream=False, max_tokens=3, stop=["czz"])
    told = {KEY: {"prompt_token_ids": "", "output_token_ids": ""}}
    asked.step("c", finish_reason=FinishReason.LENGTH, kv_transfer_params=told)
    result: Any = asked.queue.output
    assert (result.outputs[0].text, result.outputs[0].token_ids) == ("a", [*b"bc"])
    begun = result.kv_transfer_params[KEY]
    assert begun["spoken"] == 1
    assert begun["logprobs"] == [[[token, -0.5], [OTHER, -0.1]] for token in b"bc"]
    assert told == {KEY: {"prompt_token_ids": "", "output_token_ids": ""}}


def nothing_is_said_while_what_was_spoken_passes_but_errors(model: Path) -> None:
    asked = ask(model, "hello", spoken=2)

    async def results() -> AsyncIterator[Any]:
        yield asked.queue.output

    async def watched() -> list[tuple[bool, bool]]:
        seen = StreamResults()
        found = [
            (seen.keeps_back("data: {"), seen.keeps_back('data: {"error": 1}'))
            async for _ in seen.watch(results())
        ]
        assert not seen.keeps_back("data: {")
        return found

    assert asyncio.run(watched()) == [(True, False), (False, False)]


def log_probabilities_name_a_token_once(model: Path) -> None:
    asked = ask(model, "ab")
    state = asked.processor.request_states["r"]
    rows = patch_replay.logprobs_lists(state, [(5, -2.0), (7, -1.0), (5, -2.0), (8, -3.0)])
    assert isinstance(rows, LogprobsLists)
    assert rows.logprob_token_ids.tolist() == [[5, 7, 8]]
    assert rows.sampled_token_ranks.tolist() == [2]


def cases() -> Iterator[tuple[str, Any]]:
    for case in (
        given_tokens_are_told_before_what_the_engine_adds,
        parsers_get_given_tokens_one_by_one,
        an_end_in_what_was_spoken_is_still_said,
        what_a_stop_string_takes_back_was_not_spoken,
        what_may_not_end_an_answer_yet_does_not,
        given_tokens_are_told_whatever_the_interval,
        what_is_not_streamed_ends_whole,
        a_hand_over_tells_log_probabilities_and_holds_text_back,
        nothing_is_said_while_what_was_spoken_passes_but_errors,
        log_probabilities_name_a_token_once,
    ):
        yield case.__name__, case
