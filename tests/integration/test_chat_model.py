"""The demo's model that talks, over two engines and a router: it knows what was said before, and
equals one engine alone. Fetched once, 93 MB, into the user's cache, where the demo finds it too."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_ext.reference.chat_model import FetchError, provide
from router.commands.demo.engines import CHAT_MODEL, RECIPE, cache_directory
from tests.integration.processes import BOTH_WAYS, UNCACHED, Launcher, Server
from tests.integration.talk import USAGE, chat, streamed_chat, turns

# float32, for which it does not matter in how many pieces a prompt is computed.
OPTIONS = ("--dtype", "float32", "--kv-cache-memory-mib", "128")
PULLING = {**BOTH_WAYS, "kv_recompute_threshold": 1}
# The second means nothing without the first. (It is too small a model to remember one's name.)
STREAMED = {"stream": True, "stream_options": USAGE}
ASKED = (
    "What is the capital of France?",
    "Which river flows through it?",
    "Tell me a story about that river.",
)


@pytest.fixture(scope="module")
def chat_model() -> Path:
    try:
        return provide(cache_directory(os.environ) / RECIPE / CHAT_MODEL)
    except FetchError as error:
        pytest.skip(f"no chat model: {error}")


@pytest.fixture(scope="module")
def expected(launcher: Launcher, chat_model: Path) -> list[str]:
    """What one engine alone says to the three questions."""
    with launcher.engine("one", *OPTIONS, model=chat_model) as server:
        return [text for text, _ in conversation(server, stream=False)]


@pytest.fixture(scope="module")
def pair(launcher: Launcher, chat_model: Path) -> Iterator[tuple[Server, Server]]:
    """The prefiller has no cache of its own: what it does not pull, it computes."""
    alone = (UNCACHED,)
    with (
        launcher.engine("p", *OPTIONS, *alone, model=chat_model, extra=PULLING) as p,
        launcher.engine("d", *OPTIONS, model=chat_model, extra=PULLING) as d,
    ):
        yield p, d


def conversation(server: Server, stream: bool, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """Each answer and its usage."""
    history: list[Any] = []
    said = []
    for question in ASKED:
        history.append({"role": "user", "content": question})
        if stream:
            text, usage = streamed_chat(server, history, max_tokens=24, **STREAMED, **fields)
        else:
            answer = chat(server, history, max_tokens=24, **fields)
            text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
        history.append({"role": "assistant", "content": text})
        said.append((text, usage))
    return said


@pytest.mark.nightly
@pytest.mark.parametrize("stream", [False, True])
def test_three_turns_equal_one_engine_and_reuse_what_was_said(
    launcher: Launcher, pair: tuple[Server, Server], expected: list[str], stream: bool
) -> None:
    prefiller, decoder = pair
    assert "Paris" in expected[0]
    assert "Seine" in expected[1]
    fetched = "disagg_engine_prompt_tokens_fetched_total"
    before = prefiller.metrics()[fetched]
    with launcher.router([prefiller], [decoder]) as router:
        said = conversation(router, stream, conversation_id=f"names-{stream}")
        assert [text for text, _ in said] == expected
        assert (turns(router, "new"), turns(router, "hit")) == (1, 2)
    usages = [usage for _, usage in said]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0, "both had to compute it"
    for turn in (1, 2):
        grown = usages[turn]["prompt_tokens"] - usages[turn - 1]["prompt_tokens"]
        assert 0 < cached[turn] < usages[turn]["prompt_tokens"]
        assert usages[turn]["prompt_tokens"] - cached[turn] <= grown, "only what is new"
    pulled = prefiller.metrics()[fetched] - before
    assert pulled == sum(cached), "what the prefiller pulled is what nobody computed"
