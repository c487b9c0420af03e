"""Engines' errors about long prompts in Anthropic's words."""

import pytest

from router.openai.context_errors import as_anthropic_states

CONTEXT = "This model's maximum context length is 4096 tokens"


@pytest.mark.parametrize(
    ("message", "prompt", "maximum"),
    [
        (
            f"{CONTEXT}. However, your prompt contains 5000 input tokens, which exceeds this limit "
            "even without any output tokens. Please reduce the length of the input prompt.",
            5000,
            4096,
        ),
        (
            f"{CONTEXT}. However, your prompt contains at least 4097 input tokens, which exceeds "
            "this limit even without any output tokens.",
            4097,
            4096,
        ),
        (
            f"{CONTEXT}. However, your prompt contains 90000 characters (more than 81920 "
            "characters, which is the upper bound for 4096 input tokens).",
            4500,
            4096,
        ),
        (
            f"{CONTEXT}. However, you requested 7 output tokens and your prompt contains 90000 "
            "characters (more than 0 characters, which is the upper bound for 0 input tokens).",
            4097,
            4096,
        ),
        (f"{CONTEXT}. However, you requested 5100 tokens (5000 in the messages, 100 in the "
         "completion). Please reduce the length of the messages or completion.", 5000, 4096),
        (f"{CONTEXT}. However, your request has 4096 input tokens", 4096, 4095),
        (f"{CONTEXT} and your request has 5000 input tokens", 5000, 4096),
        (f"{CONTEXT}. However, your messages resulted in 5000 tokens. Please reduce", 5000, 4096),
        ("Input length (5000) exceeds model's maximum context length (4096).", 5000, 4096),
        ("The prompt (total length 5000) is too long to fit into the model (context length 4096).",
         5000, 4096),
        ("The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
         5000, 4096),
        ("The input (5000 tokens) is longer than the model's context length (4096 tokens).",
         5000, 4096),
        ("Requested token count exceeds the model's maximum context length of 4096 tokens. You "
         "requested a total of 5001 tokens: 5000 tokens from the input messages and 1 tokens for "
         "the completion.", 5000, 4096),
    ],
)  # fmt: skip
def test_a_prompt_is_too_long(message: str, prompt: int, maximum: int) -> None:
    expected = f"prompt is too long: {prompt} tokens > {maximum} maximum"
    assert as_anthropic_states(message) == expected


@pytest.mark.parametrize(
    "message",
    [
        f"{CONTEXT}. However, you requested 400 output tokens and your prompt contains at least "
        "4000 input tokens, for a total of at least 4400 tokens.",
        f"{CONTEXT}. However, you requested 4400 tokens (4000 in the messages, 400 in the "
        "completion).",
        "'max_tokens' or 'max_completion_tokens' is too large: 400. This model's maximum context "
        "length is 4096 tokens and your request has 4000 input tokens (400 > 4096 - 4000).",
        "Requested token count exceeds the model's maximum context length of 4096 tokens. You "
        "requested a total of 4400 tokens: 4000 tokens from the input messages and 400 tokens for "
        "the completion.",
    ],
)
def test_prompt_and_answer_together_are_too_long(message: str) -> None:
    assert as_anthropic_states(message) == (
        "input length and `max_tokens` exceed context limit: 4000 + 400 > 4096, decrease input "
        "length or `max_tokens` and try again"
    )


@pytest.mark.parametrize("message", ["", "no", CONTEXT, f"{CONTEXT}. However, " * 10**5])
def test_other_messages_are_unchanged(message: str) -> None:
    assert as_anthropic_states(message) == message
