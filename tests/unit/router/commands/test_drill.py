"""disagg-router drill: how a stream is judged, and what the page of the result shows."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from router.commands.bench.chats import Target
from router.commands.bench.load import LoadExchange
from router.commands.console import CommandError
from router.commands.drain import AdminClient, post_to_all
from router.commands.drill.command import DrilledFleet
from router.commands.drill.report import Report, Step
from router.commands.drill.streams import (
    DrillClient,
    Reference,
    StreamedAnswer,
    Tally,
    Token,
    Verdict,
    read_stream,
)

TOKENS = [
    Token("a", {"a": -0.1, "b": -3.0}),
    Token("bc", {"bc": -0.7, "x": -0.8, "yy": -4.0}),
    Token("d", {"d": -0.1, "e": -9.0}),
]
TEXT = Reference("p", "abcd", tokens=TOKENS)
IDS = Reference(
    "p", "ab", (7, 8), [Token("token_id:7", {"token_id:7": -0.1, "token_id:9": -0.2})] * 2
)


@pytest.mark.parametrize(
    ("reference", "answer", "verdict"),
    [
        (TEXT, StreamedAnswer("abcd"), Verdict.RIGHT),
        (TEXT, StreamedAnswer("axfoo"), Verdict.NEAR_TIE),
        (TEXT, StreamedAnswer("ax", problem="cut"), Verdict.FAILED),
        (TEXT, StreamedAnswer("abc", problem="cut"), Verdict.FAILED),
        (TEXT, StreamedAnswer("", problem="502"), Verdict.FAILED),
        (TEXT, StreamedAnswer("abc"), Verdict.WRONG),
        (TEXT, StreamedAnswer("abcdd"), Verdict.WRONG),
        (TEXT, StreamedAnswer("abce"), Verdict.WRONG),
        (TEXT, StreamedAnswer("ayyd"), Verdict.WRONG),
        (TEXT, StreamedAnswer("bbcd", problem="cut"), Verdict.WRONG),
        (TEXT, StreamedAnswer("azzz"), Verdict.WRONG),
        (Reference("p", "abcd"), StreamedAnswer("axcd"), Verdict.WRONG),
        (IDS, StreamedAnswer("", (7, 8)), Verdict.RIGHT),
        (IDS, StreamedAnswer("ab"), Verdict.WRONG),
        (IDS, StreamedAnswer("ab", (9, 8)), Verdict.NEAR_TIE),
        (IDS, StreamedAnswer("ab", (7, 8, 9)), Verdict.WRONG),
    ],
)
def test_a_stream_is_judged_by_the_undisturbed_answer(
    reference: Reference, answer: StreamedAnswer, verdict: Verdict
) -> None:
    assert reference.judge(answer) is verdict


@dataclass(frozen=True, slots=True)
class KnowingClient(DrillClient):
    """Knows the undisturbed answers, by the end of the prompt."""

    known: dict[str, str] = field(default_factory=dict)

    async def learn(self, prompt: str | list[int], fewer: int = 0) -> Reference:
        text = self.known[str(prompt)]
        assert len(text) == self.tokens - fewer
        tokens = [Token(one, {one: -0.1, "x": -0.2}) for one in text]
        return Reference(prompt, text, tokens=tokens)


@pytest.mark.parametrize(
    ("answer", "is_confirmed"),
    [("axcd", True), ("axxd", True), ("axcx", True), ("axce", False), ("axxe", False)],
)
async def test_what_follows_a_near_tie_is_compared_with_an_answer_that_begins_there(
    answer: str, is_confirmed: bool
) -> None:
    known = {"p": "abcd", "pax": "cd", "paxx": "d"}
    client = KnowingClient(Target("h", 1), "m", 4, 1.0, known=known)
    reference, tally = await client.learn("p"), Tally()
    tie = reference.find_tie(StreamedAnswer(answer))
    assert tie is not None
    tally.note(Verdict.NEAR_TIE, "")
    tally.ties.append(tie)
    await client.confirm(tally)
    assert tally.is_right is is_confirmed
    assert tally.counts[Verdict.NEAR_TIE] == is_confirmed
    assert not tally.ties


def test_what_a_stream_brought_is_read() -> None:
    events = [{"choices": [{"text": "a", "token_ids": [1]}]}, {"choices": [{"text": "b"}]}]
    body = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    exchange = LoadExchange(0.0, status=200, body=bytearray(body + b"data: [DONE]\n\n"))
    assert read_stream(exchange) == StreamedAnswer("ab", (1,))
    exchange.body = bytearray(body + b'data: {"error": {"message": "no engine"}}\n\n')
    assert read_stream(exchange) == StreamedAnswer("ab", (1,), "error event: no engine")
    exchange.body, exchange.status = bytearray(b'{"error": {"message": "full"}}'), 503
    assert read_stream(exchange) == StreamedAnswer("", problem="503 full")


def test_the_page_has_a_row_for_each_step_in_each_format() -> None:
    kill = Step("kill", legs=2, noticed_s=1.2, ready_s=30.0)
    kill.tally.note(Verdict.RIGHT, "")
    kill.tally.note(Verdict.WRONG, "wrong: `x | y`")
    report = Report("decode engine a:1", [Step("drain", "no --drain"), kill])
    assert not report.has_passed
    assert report.show("text").splitlines() == [
        "FAILED: decode engine a:1",
        "step   result   legs  right  near tie  WRONG  failed  longest pause  noticed  ready again",
        "drain  skipped",
        "kill   FAILED   2     1      0         1      0       0 ms           1.20 s   30.00 s",
        "drain: no --drain",
        "kill: 1 times: wrong: `x | y`",
    ]
    markdown = report.show("markdown")
    assert "| kill | FAILED | 2 | 1 | 0 | 1 | 0 | 0 ms | 1.20 s | 30.00 s |" in markdown
    assert markdown.endswith("* `kill: 1 times: wrong: 'x | y'`")
    content = json.loads(report.show("json"))
    assert content["ok"] is False
    assert [step["result"] for step in content["steps"]] == ["skipped", "FAILED"]
    assert content["steps"][1]["wrong"] == 1


class KnownRouter(AdminClient):
    """Has two engines and does as it is asked."""

    def engines(self) -> list[dict[str, Any]]:
        return [{"name": "a:1"}, {"name": "b:2"}]

    def post(self, name: str, action: str) -> dict[str, Any]:
        return {"drained": True}


def test_an_unknown_engine_cannot_be_drilled() -> None:
    fleet = DrilledFleet([KnownRouter("http://here:1", {})], "c:3")
    with pytest.raises(CommandError, match=r"http://here:1 has no engine c:3; there are a:1, b:2"):
        fleet.check(is_forced=True)


@pytest.mark.parametrize("is_first", [True, False])
def test_routers_are_asked_although_one_cannot_be_reached(is_first: bool) -> None:
    here, gone = KnownRouter("http://here:1", {}), AdminClient("http://127.0.0.1:9", {})
    with pytest.raises(CommandError) as caught:
        post_to_all([gone, here] if is_first else [here, gone], "a:1", "drain")
    reached, succeeded = str(caught.value).splitlines()
    assert "127.0.0.1:9" in reached
    assert succeeded == "succeeded only at http://here:1"
