"""Reads the streams of chats that one or two engines have answered."""

import json
from typing import Any

import httpx


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a whole stream, which have one id and one time."""
    *given, end, rest = answer.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", ""), answer.text
    found = [json.loads(one.removeprefix("data: ")) for one in given]
    assert len({(one["id"], one["created"]) for one in found}) == 1
    return found


def choices_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [choice for one in chunks_of(answer) for choice in one["choices"]]


def is_broken(answer: httpx.Response) -> bool:
    """Return True for a stream that ends with an error."""
    last = answer.text.strip().split("\n\n")[-1]
    return answer.status_code == 200 and "error" in json.loads(last.removeprefix("data: "))
