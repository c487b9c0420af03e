"""Only what a decode engine would reject is rejected before a prefill engine works."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.openai.request_fields import find_invalid_field, restate_message, restate_prompt_limit
from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.harness import Router, eventually

CONTEXT = 100
LOOKED_AT = ("max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options",
             "prompt", "echo")  # fmt: skip
INTEGER = "Input should be a valid integer"
OPTIONS_ALONE = "Stream options can only be defined when `stream=True`."
TOO_MANY = "cannot be greater than max_model_len=100. Please request fewer output tokens."
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": "abc"}, "max_tokens", f"{INTEGER}, unable to parse string as an integer"),
    ({"max_tokens": [5]}, "max_tokens", INTEGER),
    ({"max_tokens": {}}, "max_tokens", INTEGER),
    ({"max_tokens": 1.5}, "max_tokens", f"{INTEGER}, got a number with a fractional part"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0."),
    ({"max_tokens": -3}, "max_tokens", "max_tokens must be at least 1, got -3."),
    ({"max_tokens": 101}, "max_tokens", f"max_tokens=101 {TOO_MANY}"),
    ({"max_tokens": 10**30}, "max_tokens", f"max_tokens={10**30} {TOO_MANY}"),
    ({"min_tokens": "x"}, "min_tokens", f"{INTEGER}, unable to parse string as an integer"),
    ({"min_tokens": None}, "min_tokens", INTEGER),
    (
        {"min_tokens": -1},
        "min_tokens",
        "min_tokens must be greater than or equal to 0, got -1.",
    ),
    (
        {"max_tokens": 4, "min_tokens": 5},
        "min_tokens",
        "min_tokens must be less than or equal to max_tokens=4, got 5.",
    ),
    (
        {"min_tokens": 101},
        "min_tokens",
        "min_tokens must be less than or equal to max_tokens=100, got 101.",
    ),
    ({"stream_options": {"include_usage": True}}, "stream_options", OPTIONS_ALONE),
    ({"stream": False, "stream_options": {"a": 1}}, "stream_options", OPTIONS_ALONE),
    ({"stream": True, "stream_options": 1}, "stream_options", "valid dictionary"),
    (
        {"stream": True, "stream_options": {"include_usage": "maybe"}},
        "stream_options",
        "stream_options.include_usage: Input should be a valid boolean",
    ),
    ({"stream": "perhaps"}, "stream", "valid boolean"),
    ({"stream": 2}, "stream", "valid boolean"),
    ({"stream": []}, "stream", "valid boolean"),
]
WRONG_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"max_completion_tokens": "abc"}, "max_completion_tokens", INTEGER),
    ({"max_completion_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0."),
    (
        {"max_completion_tokens": 101, "max_tokens": 5},
        "max_completion_tokens",
        f"max_completion_tokens=101 {TOO_MANY}",
    ),
    ({"max_completion_tokens": 5, "max_tokens": "abc"}, "max_tokens", INTEGER),
    ({"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens", "max_tokens=5, got 6."),
    ({"max_tokens": 0, "echo": True}, "max_tokens", "max_tokens must be at least 1, got 0."),
]
# What vLLM takes, and perhaps cuts to what fits.
RIGHT: list[dict[str, Any]] = [
    {},
    {"max_tokens": None, "stream": None, "stream_options": None},
    {"max_tokens": "5"},
    {"max_tokens": "5.0"},
    {"max_tokens": 5.0},
    {"max_tokens": True},
    {"max_tokens": 100},
    {"max_tokens": 1, "min_tokens": 1},
    {"min_tokens": 70},
    {"stream": "yes"},
    {"stream": 1, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": None, "unknown": []}},
    {"stream_options": {}},
]


def body_with(is_chat: bool, fields: dict[str, Any]) -> dict[str, Any]:
    content = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
    return {"model": "m", **content, **fields}


@pytest.mark.parametrize(
    ("is_chat", "fields", "param", "words"),
    [
        *((False, *case) for case in WRONG),
        *((True, *case) for case in (*WRONG, *WRONG_CHAT)),
    ],
)
def test_what_is_wrong_is_named_in_the_engines_words(
    is_chat: bool, fields: dict[str, Any], param: str, words: str
) -> None:
    found = find_invalid_field(body_with(is_chat, fields), is_chat, CONTEXT)
    assert found is not None
    assert found.field == param
    assert words in found.message


@pytest.mark.parametrize("fields", RIGHT, ids=str)
@pytest.mark.parametrize("is_chat", [False, True])
def test_what_an_engine_takes_or_cuts_is_left_to_it(is_chat: bool, fields: dict[str, Any]) -> None:
    assert find_invalid_field(body_with(is_chat, fields), is_chat, CONTEXT) is None


def test_a_completion_of_nothing_says_its_prompt_back() -> None:
    assert (
        find_invalid_field({"prompt": "hi", "echo": True, "max_tokens": 0}, False, CONTEXT) is None
    )
    assert find_invalid_field({"prompt": "hi", "max_completion_tokens": 0}, False, CONTEXT) is None


@pytest.mark.parametrize("prompt", [[1] * 90, [[1] * 90]], ids=["plain", "nested"])
def test_what_a_prompt_of_token_ids_leaves_is_known(prompt: list[Any]) -> None:
    body = {"prompt": prompt, "max_tokens": 50, "min_tokens": 11}
    found = find_invalid_field(body, False, CONTEXT)
    words = "min_tokens must be less than or equal to max_tokens=10, got 11."
    assert found == ("min_tokens", words)
    assert find_invalid_field(body | {"min_tokens": 10}, False, CONTEXT) is None
    assert find_invalid_field(body | {"truncate_prompt_tokens": 5}, False, CONTEXT) is None


def test_without_a_known_context_nothing_is_too_long() -> None:
    body = {"prompt": [1] * 1000, "max_tokens": 10**9}
    assert find_invalid_field(body, False, None) is None
    assert find_invalid_field({"prompt": "hi", "min_tokens": 10**9}, False, None) is None


@pytest.mark.parametrize("prompt", [[1] * 101, [[1] * 101]], ids=["plain", "nested"])
def test_a_prompt_of_token_ids_that_is_too_long_is_told_so(prompt: list[Any]) -> None:
    found = find_invalid_field({"prompt": prompt, "max_tokens": 5}, False, CONTEXT)
    assert found == (
        "input_tokens",
        "This model's maximum context length is 100 tokens. However, your prompt contains 101 "
        "input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt.",
    )


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 100},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ["a"] * 101},
        {"prompt": [1] * 101, "truncate_prompt_tokens": 50},
    ],
)
def test_other_prompts_are_not_measured(body: dict[str, Any]) -> None:
    assert find_invalid_field(body, False, CONTEXT) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.integers() | st.text(max_size=4)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(LOOKED_AT), JSON), st.booleans())
def test_any_json_is_judged(body: dict[str, Any], is_chat: bool) -> None:
    for context in (None, 1):
        find_invalid_field(body, is_chat, context)


async def test_what_is_refused_reaches_no_engine(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    for fields, param in (
        ({"max_tokens": "abc"}, "max_tokens"),
        ({"min_tokens": 8}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ):
        answer = await router.complete(**fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (
            400,
            "BadRequestError",
            param,
        )
    assert not p.requests
    assert not d.requests
    labels = {"flow": "none", "status": "400", "outcome": "refused"}
    assert router.metric("requests_total", endpoint="/v1/completions", **labels) == 3


async def test_the_longest_context_of_the_decoders_counts(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.contexts, d.contexts = {"m": 4}, {"m": 50, "other": 60}
    router = await start_router()
    known = router.gateway.fleet
    await eventually(lambda: known.snapshot.context_lengths == {"m": 50, "other": 60})
    refused = await router.complete(max_tokens=51)
    assert refused.status_code == 400
    assert "max_model_len=50" in refused.json()["error"]["message"]
    assert (await router.complete(prompt=[1] * 51)).json()["error"]["param"] == "input_tokens"
    assert not p.requests
    assert (await router.complete(max_tokens=50)).status_code == 200
    assert (await router.complete(model="other", max_tokens=51)).status_code == 200


async def test_what_one_engine_sees_whole_is_its_own_to_refuse(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    assert (await router.complete(n=2, max_tokens="abc")).status_code == 200
    assert (len(p.requests), d.last.json["max_tokens"]) == (0, "abc")


# What a prefiller says of the one token that it was asked for.

CHAT_WORDS = (
    "This model's maximum context length is 512 tokens. However, you requested 513 tokens "
    "(512 in the messages, {} in the completion). Please reduce the length of the messages."
)
TOO_LARGE = (
    "'max_tokens' or 'max_completion_tokens' is too large: {0}. This model's maximum context "
    "length is 512 tokens and your request has 512 input tokens ({0} > 512 - 512). None"
)
TOTAL = (
    "Requested token count exceeds the model's maximum context length of 512 tokens. You requested "
    "a total of {} tokens: 512 tokens from the input messages and {} tokens for the completion."
)


@pytest.mark.parametrize(
    ("said", "most", "told"),
    [
        (CHAT_WORDS.format(1), 7, CHAT_WORDS.format(7).replace("513", "519")),
        (
            CHAT_WORDS.format(1),
            None,
            "This model's maximum context length is 512 tokens. However, your request has 512 "
            "input tokens. Please reduce the length of the messages.",
        ),
        (TOO_LARGE.format(1), 7, TOO_LARGE.format(7)),
        (
            TOO_LARGE.format(1),
            None,
            "This model's maximum context length is 512 tokens and your request has 512 input "
            "tokens. None",
        ),
        (TOTAL.format(513, 1), 7, TOTAL.format(519, 7)),
        ("something else, 1 in the completion", 7, "something else, 1 in the completion"),
    ],
)
def test_what_is_said_of_one_token_is_said_of_those_asked_for(
    said: str, most: int | None, told: str
) -> None:
    assert restate_message(said, most) == told


@pytest.mark.parametrize("body", [b"", b"[]", b'{"error": 1}', b'{"error": {"message": 1}}'])
def test_an_answer_that_is_no_error_object_stays_as_it_is(body: bytes) -> None:
    assert restate_prompt_limit(body, {"max_tokens": 7}) is body


async def test_a_clients_own_number_stands_in_what_a_prefiller_refuses(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    async def too_long(_: Received, peer: Peer) -> None:
        error = {"message": CHAT_WORDS.format(1), "type": "BadRequestError", "code": 400}
        await peer.answer({"error": error}, 400)

    p.scripts = [too_long]
    answer = await router.complete(max_tokens=7)
    assert answer.status_code == 400
    assert "(512 in the messages, 7 in the completion)" in answer.json()["error"]["message"]
    assert not d.requests
