import re
from itertools import accumulate, chain
from typing import Any

import pytest

from tests.unit.reference.server.fake_engine import FakeEngine, RunningServer, events_of

PATH = "/v1/completions"
PARAMS = {"do_remote_decode": True, "unknown": [[1, None], {"é": 0.5}]}


async def test_a_whole_answer_has_the_members_that_clients_read(server: RunningServer) -> None:
    response = await server.post(PATH, prompt="hi", model="tiny", logprobs=1)
    answer = response.json()
    assert response.status_code == 200
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", answer.pop("id"))
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "Héllo",
                "logprobs": {
                    "text_offset": [0, 1, 2, 3, 4, 5],
                    "token_logprobs": [-0.5] * 6,
                    "tokens": ["H", "\ufffd", "\ufffd", "l", "l", "o"],
                    "top_logprobs": [{t: -0.5} for t in ("H", "\ufffd", "\ufffd", "l", "l", "o")],
                },
                "finish_reason": "stop",
                "stop_reason": None,
                "prompt_token_ids": None,
                "token_ids": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 6,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
        "kv_transfer_params": None,
    }


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hé", [(104, 195, 169)]),
        ([1, 2, 258], [(1, 2, 258)]),
        ("<|im_start|>\x00", [(257, 0)]),
    ],
)
async def test_every_form_of_prompt_reaches_the_engine_as_token_ids(
    prompt: Any, expected: list[tuple[int, ...]], server: RunningServer
) -> None:
    answer = (await server.post(PATH, prompt=prompt)).json()
    assert [request.prompt_token_ids for request in server.engine.requests] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_a_stream_says_what_the_whole_answer_says(server: RunningServer) -> None:
    body = {"prompt": "hi", "logprobs": 2, "return_token_ids": True, "kv_transfer_params": PARAMS}
    whole = (await server.post(PATH, **body)).json()
    streamed = await server.post(PATH, **body, stream=True, stream_options={"include_usage": True})
    *chunks, last = events_of(streamed)
    choices = [chunk["choices"][0] for chunk in chunks]
    expected = whole["choices"][0]
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    assert [*chain.from_iterable(choice["token_ids"] for choice in choices)] == expected[
        "token_ids"
    ]
    for name, values in expected["logprobs"].items():
        assert [*chain.from_iterable(choice["logprobs"][name] for choice in choices)] == values
    assert [c["finish_reason"] for c in choices] == [None, None, "stop"]
    assert [c["prompt_token_ids"] for c in choices] == [[104, 105], None, None]
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["kv_transfer_params"] == whole["kv_transfer_params"] == {"answer_to": PARAMS}
    assert all(chunk["usage"] is None for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events_of(await server.post(PATH, **body, stream=True, stream_options=options))
    tokens = [len(chunk["choices"][0]["token_ids"] or ()) for chunk in chunks]
    assert [c["usage"]["completion_tokens"] for c in chunks] == [*accumulate(tokens)]
    assert last["usage"] == whole["usage"]


async def test_without_usage_the_finishing_chunk_carries_the_kv_parameters(
    server: RunningServer,
) -> None:
    chunks = events_of(await server.post(PATH, prompt="hi", stream=True, kv_transfer_params=PARAMS))
    assert [chunk.get("kv_transfer_params") for chunk in chunks] == [
        None,
        None,
        {"answer_to": PARAMS},
    ]
    assert "usage" not in chunks[-1]


@pytest.mark.parametrize(
    ("header", "expected"),
    [("abc", "abc"), ("a:b,c/d e", "a-b-c-d-e"), ("x" * 500, "x" * 128)],
)
async def test_ids_that_would_break_a_notification_are_made_safe(
    header: str, expected: str, server: RunningServer
) -> None:
    response = await server.client.post(
        PATH, json={"prompt": "a"}, headers={"X-Request-Id": header}
    )
    assert response.json()["id"] == f"cmpl-{expected}"
    assert re.fullmatch(f"cmpl-{expected}-[0-9a-f]{{8}}", server.engine.requests[0].request_id)


async def test_the_same_request_id_twice_is_two_requests(server: RunningServer) -> None:
    for _ in range(2):
        await server.client.post(PATH, json={"prompt": "a"}, headers={"X-Request-Id": "same"})
    first, second = server.engine.requests
    assert first.request_id != second.request_id


async def test_sampling_parameters_arrive_unchanged(server: RunningServer) -> None:
    await server.post(
        PATH,
        prompt="a",
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        seed=-5,
        max_tokens=9,
        min_tokens=2,
        stop=["x", "yz"],
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=0,
        user="somebody",
        metadata={"unknown": "field"},
    )
    sampling = server.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 7)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (-5, 9, 2)
    assert sampling.stop == ("x", "yz")
    assert sampling.ignore_eos
    assert not sampling.skip_special_tokens
    assert sampling.logprobs == 0


async def test_what_a_request_leaves_open_or_null_comes_from_the_defaults(
    server: RunningServer,
) -> None:
    nothing = dict.fromkeys(("temperature", "top_p", "n", "stop", "stream", "max_tokens", "seed"))
    await server.post(PATH, prompt="a", **nothing)
    sampling = server.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert (sampling.max_tokens, sampling.stop, sampling.seed) == (16, (), None)


async def test_a_log_probability_of_minus_infinity_is_still_json(server: RunningServer) -> None:
    answer = (await server.post(PATH, prompt="a", logprobs=3)).json()
    assert answer["choices"][0]["logprobs"]["top_logprobs"][0]["\ufffd"] == -9999.0


async def test_tokens_can_be_named_by_their_ids(server: RunningServer) -> None:
    answer = (
        await server.post(PATH, prompt="a", logprobs=3, return_tokens_as_token_ids=True)
    ).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"][:2] == ["token_id:72", "token_id:195"]
    assert list(logprobs["top_logprobs"][0]) == ["token_id:72", "token_id:120", "token_id:195"]


@pytest.mark.parametrize("asked", [56, 57, 256])
async def test_max_tokens_are_granted_as_far_as_they_fit(
    asked: int, server: RunningServer, engine: FakeEngine
) -> None:
    response = await server.post(PATH, prompt=[5] * 200, max_tokens=asked)
    assert response.status_code == 200
    assert engine.requests[0].sampling.max_tokens == 56
