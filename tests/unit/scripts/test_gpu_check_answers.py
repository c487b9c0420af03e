"""Wrong answers of two engines are found, and engines that fail are heard."""

from pathlib import Path
from typing import Any

import pytest

from scripts.bench.errors import BenchError
from scripts.transfer_bench import equality
from scripts.transfer_bench.answer import Answer, distance
from scripts.transfer_bench.reference import LAST_LINES, ReferenceEngine, Setup


class Played:
    """An engine that answers as all others do, but for what is planted."""

    planted: tuple[str, str] = ("", "")
    asked: list[tuple[str, int, int]]

    def __init__(self, directory: Path, setup: Setup) -> None:
        self._name = directory.name
        self._fetched = 0

    def __enter__(self) -> "Played":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def coordinates(self) -> dict[str, Any]:
        return {}

    def tokens_fetched(self) -> int:
        return self._fetched

    def complete(
        self, prompt: list[int], max_tokens: int, params: Any = None, request_id: str = ""
    ) -> dict[str, Any]:
        self.asked.append((self._name, len(prompt), max_tokens))
        name, fault = self.planted if len(prompt) > 100 else ("", "")
        wrong = fault if name == self._name else ""
        if self._name == "d" and wrong != "computed":
            self._fetched += len(prompt) - 1
        tokens = [prompt[0] ^ (wrong == "token")] * max_tokens
        logprobs = [-1.5] * (max_tokens - 1) + [-1.49 if wrong == "logprob" else -1.5]
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}
        return {"choices": [choice], "kv_transfer_params": {} if wrong == "nothing" else {"p": 1}}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> type[Played]:
    monkeypatch.setattr(equality, "ENGINES", {"reference": Played, "vllm": Played})
    monkeypatch.setattr(equality, "COUNTED_SECONDS", 0.1)
    Played.planted, Played.asked = ("", ""), []
    return Played


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_equal_answers_are_equal(mode: str, played: type[Played]) -> None:
    said = equality.compare(Setup(0, mode=mode), lengths=(33, 300))
    assert "every token equal" in said
    assert "KV of 331 tokens" in said


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        (("d", "token"), "prompt of 300 tokens: tokens"),
        (("alone", "token"), "prompt of 300 tokens: tokens"),
        (("d", "logprob"), "prompt of 300 tokens: log-probabilities differ by 0.01, more than"),
        (("d", "computed"), "prompt of 300 tokens: the decode engine was given the KV of 0"),
        (("p", "nothing"), "the prefill engine offers no KV"),
    ],
)
def test_what_is_planted_in_one_prompt_is_found(
    planted: tuple[str, str], told: str, played: type[Played]
) -> None:
    played.planted = planted
    with pytest.raises(BenchError, match=told):
        equality.compare(Setup(0), lengths=(33, 300))


def test_vllm_alone_computes_the_last_token_by_itself(played: type[Played]) -> None:
    equality.compare(Setup(0), "vllm", (33,))
    alone = [tokens for name, _, tokens in played.asked if name == "alone"]
    assert alone == [1, equality.MAX_TOKENS]


def test_answers_without_log_probabilities_are_not_equal() -> None:
    assert distance((), ()) == float("inf")
    assert distance((-1.0, float("nan")), (-1.0, -2.0)) == float("inf")
    assert distance((-1.0,), (-1.0, -2.0)) == float("inf")
    assert Answer((1,), (-1.0,)).difference(Answer((1,), (-1.0005,)), 1e-3) == ""


class Broken(ReferenceEngine):
    module = "tests.unit.scripts.broken_engine"


def test_the_log_of_an_engine_that_does_not_start_is_shown_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BenchError, match="the engine did not start; see"):
        Broken(tmp_path / "p", Setup(8))
    log = (tmp_path / "p" / "engine.log").read_text()
    assert "line 1\n" in log
    said = capsys.readouterr().err
    assert "the KV cache does not fit" in said
    assert len(said.splitlines()) == LAST_LINES + 2
