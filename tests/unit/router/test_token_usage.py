"""How many tokens an answer reports."""

import pytest

from router.telemetry.record import UNKNOWN, Tokens
from router.telemetry.request_metrics import tokens_in, usage_in


@pytest.mark.parametrize(
    ("told", "tokens"),
    [
        (b'"usage":{"prompt_tokens":3,"completion_tokens":4},"x":{}}', Tokens(3, 4, None)),
        (b'"usage": {"prompt_tokens" : 3}', Tokens(3, None, None)),
        (
            b'{"prompt_tokens":9,"completion_tokens":7,"prompt_tokens_details":null}',
            Tokens(9, 7, None),
        ),
        (
            b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":5}},"k":{"a":{}}}',
            Tokens(9, None, 5),
        ),
        (
            b'{"prompt_tokens_details":{"cached_tokens":5},"completion_tokens_details":'
            b'{"reasoning":{"a":1}},"prompt_tokens":9,"completion_tokens":7},"kv":{"a":{}}}',
            Tokens(9, 7, 5),
        ),
        (b'{"prompt_tokens":"many","completion_tokens":7}', Tokens(None, 7, None)),
        (b'{"prompt_tokens":-1}', UNKNOWN),
        (b'{"prompt_tokens":1' + b"0" * 30 + b"}", UNKNOWN),
        (b'{"prompt_tokens":1.5}', UNKNOWN),
        (b'{"prompt_tokens":1', UNKNOWN),
        (b'{"a":{"b":{"c":{', UNKNOWN),
        (b'{"prompt_tokens":3,"a":"\xff"}', Tokens(3, None, None)),
        (b"}", UNKNOWN),
        (b"", UNKNOWN),
    ],
)
def test_what_is_told_is_read_and_nothing_else(told: bytes, tokens: Tokens) -> None:
    assert tokens_in(usage_in(b'{"usage":' + told)) == tokens


def test_a_text_that_speaks_of_usage_is_none() -> None:
    answer = b'{"usage":{"prompt_tokens":3},"text":"\\"usage\\":{\\"prompt_tokens\\":9}"}'
    assert tokens_in(usage_in(answer)) == Tokens(3, None, None)
