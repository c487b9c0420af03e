"""The report of borrowed tokens is taken out of an answer, and nothing else is."""

import json

import pytest

from router.proxy.loans import take_borrowed_tokens

OTHER = {"remote_host": "h", "text": 'a "borrowed_tokens": 7 in a text'}
PLACES: list[dict[str, object]] = [
    {"borrowed_tokens": 4096},
    {"borrowed_tokens": 4096, "lender": 3},
    {"borrowed_tokens": 4096, "lender": 3, **OTHER},
    {**OTHER, "borrowed_tokens": 4096, "lender": 3},
    {"borrowed_tokens": 4096, **OTHER},
    {**OTHER, "borrowed_tokens": 4096},
    {"remote_port": 1, "borrowed_tokens": 4096, **OTHER},
]


@pytest.mark.parametrize("params", PLACES)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_what_is_left_is_the_answer_without_the_report(
    params: dict[str, object], separators: tuple[str, str]
) -> None:
    content = {"id": "x", "kv_transfer_params": params, "usage": None}
    report, rest = take_borrowed_tokens(json.dumps(content, separators=separators).encode())
    assert report == (4096, params.get("lender"))
    left = {name: params[name] for name in params if name not in ("borrowed_tokens", "lender")}
    assert json.loads(rest) == content | {"kv_transfer_params": left}


@pytest.mark.parametrize(
    "params",
    [OTHER, *({"borrowed_tokens": value} for value in (None, "9", -1, 1.5, 1e30, 10**9, [9]))],
)
def test_an_answer_without_a_number_of_borrowed_tokens_stays_as_it_is(
    params: dict[str, object],
) -> None:
    raw = json.dumps({"kv_transfer_params": params}).encode()
    assert take_borrowed_tokens(raw) == (None, raw)
