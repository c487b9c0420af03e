"""--reasoning-names both: reasoning in answers under the names of vLLM and of SGLang."""

import json

import pytest

from router.proxy.reasoning_names import with_both_names
from scripts.mock_engine import MockEngine
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering, usual_prefill
from tests.unit.router.openai.chats import thinks_and_calls, whole

CHAT = "/v1/chat/completions"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("sent", "passed"),
    [
        ('{"reasoning": "a\\\\\\"b\\\\"}', True),
        ('{"reasoning_content":""}', True),
        ('{"reasoning":null}', False),
        ('{"reasoning":"a","reasoning_content":null}', False),
        ('{"content":"\\"reasoning\\":\\"a\\""}', False),
        ('{"token":"reasoning","text":"a"}', False),
    ],
)
def test_strings_that_the_engine_has_written_under_one_name_get_the_other_one(
    sent: str, passed: bool
) -> None:
    read = json.loads(sent)
    both = dict.fromkeys(("reasoning", "reasoning_content"), next(iter(read.values())))
    assert json.loads(with_both_names(sent.encode())) == (both if passed else read)


@pytest.mark.parametrize("heartbeat", [0, 10])
@pytest.mark.parametrize("names", ["both", "engine"])
async def test_clients_of_either_name_see_the_reasoning(
    start_router: StartRouter, p: MockEngine, d: MockEngine, names: str, heartbeat: int
) -> None:
    p.usual, d.usual = usual_prefill, thinks_and_calls
    router = await start_router(reasoning_names=names, stream_heartbeat=heartbeat)
    answer = await router.client.post(CHAT, json=ASKED)
    message = answer.json()["choices"][0]["message"]
    streamed = await router.client.post(CHAT, json={**ASKED, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line[:7] == "data: {"]
    deltas = [one["choices"][0]["delta"] for one in events if one["choices"]]
    for name in ("reasoning", "reasoning_content"):
        is_sent = names == "both" or name == "reasoning"
        assert message.get(name) == ("hmm" if is_sent else None)
        assert "".join(one.get(name, "") for one in deltas) == ("hmm" if is_sent else "")
    assert message["content"] == "".join(one.get("content", "") for one in deltas) == "Well"
    assert streamed.text.endswith("data: [DONE]\n\n")


async def test_a_long_answer_has_both_names_and_its_length(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    thought = "quite long " * 50_000
    p.usual, d.usual = usual_prefill, answering(200, whole({"reasoning": thought}))
    router = await start_router(reasoning_names="both")
    answer = await router.client.post(CHAT, json=ASKED)
    message = answer.json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == thought
