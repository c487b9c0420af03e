"""Prompts with an image, from end to end: its tokens are pulled and pushed like words', and never
taken for another image's. The model is that of tests/vllm/image_model.py."""

import base64
import struct
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.legs import PREFILL
from tests.integration.oracle import Answer, differences
from tests.integration.processes import Server, metric
from tests.vllm.image_model import IMAGE_TOKENS, SIZE, write_image_model
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left
from tests.vllm.mended_images import sitecustomize
from tests.vllm.plugins import found_in
from tests.vllm.servers import OURS, PUSH, SCHEDULER, UNCACHED, Fleet, Kind
from tests.vllm.test_push import where

pytestmark = pytest.mark.nightly

Message = dict[str, Any]
BEFORE = "Look at this, and then say what it is: "


IMAGES: dict[str, Any] = {
    "model": write_image_model,
    "environment": found_in(Path(__file__).parent / "mended_images"),
    "plugins": (sitecustomize,),
}
# P, D, and one that has no connector and no cache.
SERVERS = (
    Kind("images-p", OURS, SCHEDULER, **IMAGES),
    Kind("images-d", OURS, SCHEDULER, **IMAGES),
    Kind("images-alone", None, (UNCACHED,), **IMAGES),
)
PUSHING = tuple(Kind(f"images-push-{side}", PUSH, SCHEDULER, **IMAGES) for side in "pd")


def asked(image: int, text: str = "what is it, and why? " * 6, **more: Any) -> list[Message]:
    url = "data:image/png;base64," + base64.b64encode(_png(image)).decode()
    content = [
        {"type": "text", "text": BEFORE},
        {"type": "image_url", "image_url": {"url": url}, **more},
        {"type": "text", "text": text},
    ]
    return [{"role": "user", "content": content}]


def _png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    header = struct.pack(">IIBBBBB", SIZE, SIZE, 8, 2, 0, 0, 0)
    parts = {b"IHDR": header, b"IDAT": zlib.compress(lines), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts.items())


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def said(
    server: Server, messages: list[Message], name: str | None = None, **more: Any
) -> dict[str, Any]:
    body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
    body |= {"logprobs": True, "ignore_eos": True, "return_token_ids": True, **more}
    response = server.post("/v1/chat/completions", body, request_id=name)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def prefilled(server: Server, messages: list[Message], name: str | None = None) -> dict[str, Any]:
    answer = said(server, messages, name, max_tokens=1, kv_transfer_params=PREFILL)
    return {"retain": False, **answer["kv_transfer_params"]}


def are_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """By tokens and by log-probabilities."""
    return differences([_answer_in(one)], [_answer_in(other)]) == []


def _answer_in(body: dict[str, Any]) -> Answer:
    """Of a chat; of 12 tokens."""
    choice = body["choices"][0]
    logprobs = tuple(token["logprob"] for token in choice["logprobs"]["content"])
    assert len(choice["token_ids"]) == len(logprobs) == 12
    return Answer(tuple(choice["token_ids"]), logprobs, choice["message"]["content"])


def test_an_image_counts(servers: list[Server]) -> None:
    """Else equal answers would prove little."""
    first, second = (said(servers[-1], asked(image)) for image in (1, 2))
    assert not are_alike(first, second)
    assert first["usage"]["prompt_tokens"] > IMAGE_TOKENS + len(BEFORE)


def test_prompts_are_those_of_one_engine_alone(servers: list[Server]) -> None:
    """Of each the decode engine has no more than the last token to compute."""
    prefiller, decoder, alone = servers
    for image in (3, 4):
        messages = asked(image)
        right = said(alone, messages)
        fetched, computed = metric(decoder, FETCHED), metric(decoder, COMPUTED)
        with nothing_left(prefiller, decoder):
            answer = said(decoder, messages, kv_transfer_params=prefilled(prefiller, messages))
        assert are_alike(answer, right)
        assert metric(decoder, COMPUTED) - computed <= 1
        # What stands before the second image is in the decode engine's cache.
        assert (
            metric(decoder, FETCHED) - fetched > right["usage"]["prompt_tokens"] - len(BEFORE) - 64
        )


def test_another_images_keys_and_values_are_not_taken(servers: list[Server]) -> None:
    """What stands before both is."""
    prefiller, decoder, alone = servers
    with nothing_left(prefiller, decoder):
        params = prefilled(prefiller, asked(5))
        answer = said(decoder, asked(6), kv_transfer_params=params)
        again = said(decoder, asked(5), kv_transfer_params=prefilled(prefiller, asked(5)))
    assert are_alike(answer, said(alone, asked(6)))
    assert are_alike(again, said(alone, asked(5)))


def test_an_image_by_a_name_of_the_clients_is_not_moved(servers: list[Server]) -> None:
    """The name says nothing of its content: P computes it, and so does D."""
    prefiller, decoder, alone = servers
    fetched = metric(decoder, FETCHED)
    for image in (7, 8):
        messages = asked(image, uuid=f"mine-{image}")
        answer = said(prefiller, messages, max_tokens=1, kv_transfer_params=PREFILL)
        assert answer.get("kv_transfer_params") is None
        assert are_alike(said(decoder, messages), said(alone, asked(image)))
    assert metric(decoder, FETCHED) == fetched


def test_a_routed_conversation_is_that_of_one_engine_alone(
    fleet: Fleet, servers: list[Server]
) -> None:
    """Two, at once, about two images, each of two turns."""
    prefiller, decoder, alone = servers

    def talk(image: int, router: Server) -> bool:
        messages, are_right = asked(image), True
        for _ in range(2):
            right = said(alone, messages)
            answer = said(router, messages, conversation_id=f"about {image}")
            are_right &= are_alike(answer, right)
            text = answer["choices"][0]["message"]["content"]
            messages = [*messages, {"role": "assistant", "content": text}]
            messages += [{"role": "user", "content": "Why? " * 30}]
        return are_right

    with (
        fleet.router([prefiller], [decoder], "--decode-first-turns", "0") as router,
        ThreadPoolExecutor(2) as pool,
    ):
        assert list(pool.map(talk, (9, 10), [router] * 2)) == [True, True]


def test_pushed_prompts_are_those_of_one_engine_alone(
    servers: list[Server], pushing: list[Server]
) -> None:
    prefiller, decoder = pushing
    for image in (11, 12):
        messages, name = asked(image), str(uuid.uuid4())
        told = {"do_remote_prefill": True, "remote_request_id": name, **where(prefiller)}
        fetched = metric(decoder, FETCHED)
        with nothing_left(*pushing), ThreadPoolExecutor(1) as legs:
            p_leg = legs.submit(prefilled, prefiller, messages, name)
            answer = said(decoder, messages, name, kv_transfer_params={"retain": False, **told})
            p_leg.result(timeout=60)
        assert are_alike(answer, said(servers[-1], messages))
        assert metric(decoder, FETCHED) > fetched
