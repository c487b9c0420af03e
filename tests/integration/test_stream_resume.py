"""Answers that begin in the middle: a prefiller's own first token, and decoders that die, freeze or
leave while clients read. The oracle is one engine that nobody disturbed."""

import json
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.integration.oracle import (
    TOLERANCE,
    Answer,
    all_streamed,
    complete,
    differences,
    streamed,
    text_of,
)
from tests.integration.processes import (
    BOTH_WAYS,
    Launcher,
    Server,
    described,
    freed,
    metric,
    wait_for,
)

LONG = 120
PROMPTS = [text_of(length, 7000 + length) for length in (40, 64, 200, 333, 700, 41, 90, 128)]
CHAT = [{"role": "user", "content": "Say something long and strange, é ü 漢字."}]
SOON = ("--health-interval", "0.5", "--health-timeout", "2", "--prefill-timeout", "20")


CONTINUED = r'disagg_router_handed_over_total\{outcome="continued"\}'


PREFILLER = described("prefill", extra=BOTH_WAYS)


@pytest.fixture(scope="module")
def right(alone: Server) -> list[Answer]:
    return [complete(alone, prompt, LONG) for prompt in PROMPTS]


def running(server: Server) -> float:
    return metric(server, "disagg_engine_requests_running")


def resumed(router: Server) -> float:
    return metric(router, r'disagg_router_resumes_total\{.*outcome="resumed".*\}')


def test_the_first_token_is_the_prefillers(
    launcher: Launcher, prefiller: Server, decoder: Server, right: list[Answer]
) -> None:
    computed = "disagg_engine_prompt_tokens_computed_total"
    with launcher.router([prefiller], [decoder]) as router:
        before = metric(decoder, computed)
        assert differences(right, [complete(router, one, LONG) for one in PROMPTS]) == []
        assert differences(right, [streamed(router, one, LONG) for one in PROMPTS]) == []
        assert metric(decoder, computed) == before
        assert metric(router, CONTINUED) == 2 * len(PROMPTS)
        wait_for(lambda: freed(prefiller), "P's blocks are freed")
        assert metric(prefiller, "disagg_engine_kv_leases_expired_total") == 0


LIST = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 30}
TOOL = {"type": "object", "properties": {"list": LIST}, "required": ["list"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": TOOL}} for name in "fg"]


def named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


# That an answer is held to, from its first token on.
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": named(LIST), "logprobs": True, "top_logprobs": 2},
    {"response_format": named({"type": "string", "pattern": "^([a-z]{4}-[0-9]{4} ){12}$"})},
    {"tools": TOOLS[:1], "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
]
FIELDS: list[dict[str, Any]] = [
    {"stop": ["e"]},
    {"stop": ["a", "b", "c", "d"]},
    {"logprobs": True, "top_logprobs": 3},
    {"seed": 5, "temperature": 1.0},
    {"seed": 6, "temperature": 0.7, "top_p": 0.9, "logprobs": True},
    {"max_tokens": 1},
    {"max_tokens": 1, "logprobs": True, "top_logprobs": 1},
    {"max_completion_tokens": 2, "min_tokens": 2},
    {"return_token_ids": True},
    *({**form, "max_tokens": 40} for form in FORMS),
]


@pytest.mark.parametrize("stream", [False, True])
def test_every_kind_of_chat_is_answered_as_by_one_engine(
    launcher: Launcher, prefiller: Server, decoder: Server, alone: Server, stream: bool
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    with launcher.router([prefiller], [decoder]) as router:
        for fields in FIELDS:
            body = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 30}
            body |= fields | options
            got, expected = (
                server.post("/v1/chat/completions", body).text for server in (router, alone)
            )
            assert _comparable(got) == _comparable(expected), fields


class Likely(float):
    """A log-probability, equal to others up to the noise of other batches."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < TOLERANCE

    __hash__ = None  # type: ignore[assignment] # equality is not transitive


def _comparable(text: str) -> object:
    """Without what differs from request to request, and however a stream was cut into events."""
    if not text.startswith("data: "):
        answer = json.loads(text)
        return [_said(choice["message"], choice) for choice in answer["choices"]], _used(answer)
    *events, end = text.strip().split("\n\n")
    assert end == "data: [DONE]"
    chunks = [json.loads(one.removeprefix("data: ")) for one in events]
    said: dict[int, list[Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said.setdefault(choice["index"], []).append(_said(choice["delta"], choice))
    together = [
        [_together(parts) for parts in zip(*said[index], strict=True)] for index in sorted(said)
    ]
    return together, _used(chunks[-1])


def _said(message: dict[str, Any], choice: dict[str, Any]) -> tuple[Any, ...]:
    logprobs = (choice["logprobs"] or {}).get("content") or []
    likely = [[(top["token"], Likely(top["logprob"])) for top in _all(one)] for one in logprobs]
    return (
        message.get("role") or "",
        message.get("content") or "",
        _calls(message),
        likely,
        choice.get("token_ids") or [],
        choice["finish_reason"] or "",
        str(choice.get("stop_reason") or ""),
    )


def _calls(message: dict[str, Any]) -> str:
    """Names and arguments: how a stream cuts them is its own affair, and ids are random."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return "".join((one.get("name") or "") + (one.get("arguments") or "") for one in functions)


def _all(entry: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry, *entry["top_logprobs"]]


def _together(parts: tuple[Any, ...]) -> Any:
    return "".join(parts) if isinstance(parts[0], str) else [one for part in parts for one in part]


def _used(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def test_what_is_sampled_without_a_seed_has_the_same_distribution(
    launcher: Launcher, prefiller: Server, decoder: Server, alone: Server
) -> None:
    """Of three tokens, each one of two: the first is drawn by the prefiller, the others by the
    decoder. Pearson's statistic of two samples with eight cells; above 40 once in a million."""
    with launcher.router([prefiller], [decoder]) as router:
        ours, theirs = _drawn(router, 400), _drawn(alone, 400)
        assert metric(router, CONTINUED) == 400
    cells = ours.keys() | theirs.keys()
    assert len(cells) == 8
    assert sum((ours[one] - theirs[one]) ** 2 / (ours[one] + theirs[one]) for one in cells) < 40


def _drawn(server: Server, times: int) -> Counter[str]:
    numbers = {"enum": [111, 112, 121, 122, 211, 212, 221, 222]}
    fields = {"temperature": 2.0, "response_format": named(numbers)}
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda _: complete(server, PROMPTS[0], 3, **fields), range(times))
        return Counter(answer.text for answer in answers)


@pytest.mark.parametrize("how", ["killed", "frozen", "stopped"])
def test_streams_go_on_elsewhere(
    launcher: Launcher, prefiller: Server, decoder: Server, right: list[Answer], how: str
) -> None:
    with ExitStack() as stack:
        options = ("--shutdown-timeout", "0")
        victim = stack.enter_context(launcher.engine("victim", *options, extra=BOTH_WAYS))
        router = stack.enter_context(
            launcher.router([prefiller], [decoder, victim], *SOON, "--decode-policy", "round_robin")
        )

        def disturb() -> None:
            wait_for(lambda: running(victim) > 2, "some are at the victim")
            if how == "killed":
                victim.kill()
            elif how == "frozen":
                stack.enter_context(victim.frozen())
            else:
                victim.process.send_signal(signal.SIGTERM)

        assert differences(right, all_streamed(router, PROMPTS, LONG, disturb)) == []
        assert resumed(router) > 0
        wait_for(lambda: metric(decoder, "disagg_engine_requests_running") == 0, "all is over")


CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
# What an event of another dialect says, and the one that tells of the end.
DELTAS = {MESSAGES: "content_block_delta", RESPONSES: "response.output_text.delta"}
ENDS = {MESSAGES: "message_delta", RESPONSES: "response.completed"}
OTHERS = [(MESSAGES, {}), (RESPONSES, {}), *((CHATS, form) for form in FORMS)]


def test_streams_in_other_dialects_and_forms_go_on_elsewhere(
    launcher: Launcher, prefiller: Server, decoder: Server
) -> None:
    with ExitStack() as stack:
        victim = stack.enter_context(launcher.engine("victim", extra=BOTH_WAYS))
        router = stack.enter_context(
            launcher.router([prefiller], [decoder, victim], *SOON, "--decode-policy", "round_robin")
        )
        asked = [(*other, number) for other in OTHERS for number in (1, 2)]
        right = [_told(router, *one) for one in asked]
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = [pool.submit(_told, router, *one) for one in asked]
            wait_for(lambda: running(victim) > 3, "some are at the victim")
            victim.kill()
            assert [answer.result(timeout=100) for answer in answers] == right
        assert resumed(router) > 3
        # And of those that were prefilled afresh, for the victim had said nothing of them.
        assert metric(router, CONTINUED) >= 2 * len(asked)


def _told(router: Server, path: str, fields: dict[str, Any], number: int) -> object:
    """What the events of one stream say together, which must be one story."""
    said = f"Say something long and strange, number {number}: é ü 漢字."
    body: dict[str, Any] = {"model": "tiny", "stream": True, "temperature": 0, **fields}
    if path == RESPONSES:
        body |= {"input": said, "max_output_tokens": 300}
    else:
        body |= {"messages": [{"role": "user", "content": said}], "max_tokens": 300}
    if path == CHATS:
        body |= {"stream_options": {"include_usage": True}}
    answer = router.post(path, body)
    assert answer.status_code == 200, answer.text
    if path == CHATS:
        return _comparable(answer.text)
    lines = [line for line in answer.text.split("\n") if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    text = "".join(_delta(event) for event in events if event["type"] == DELTAS[path])
    (end,) = [event for event in events if event["type"] == ENDS[path]]
    usage = end["usage"] if path == MESSAGES else end["response"]["usage"]
    return text, usage["output_tokens"]


def _delta(event: dict[str, Any]) -> str:
    delta = event["delta"]
    return delta if isinstance(delta, str) else str(delta["text"])
