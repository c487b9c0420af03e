"""An engine lends what its own prefix cache holds: real engines, and an agent that asks."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine_ext.common.prefix_hashes import PrefixHashes
from engine_ext.reference.block_manager import chain_digest
from engine_ext.wire.handshake import decode_metadata
from engine_ext.wire.notifications import (
    AskLoan,
    Hello,
    Loan,
    Read,
    decode_notification,
    encode_extension,
)
from engine_ext.worker.agent import NixlAgent
from tests.integration.legs import decode, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import BOTH_WAYS, Launcher, Server, metric, wait_for
from tests.integration.stranger import handshake, stranger

COMPUTED = "disagg_engine_prompt_tokens_computed_total"
FETCHED = "disagg_engine_prompt_tokens_fetched_total"
DELAYED = "disagg_engine_blocks_delayed"


class Borrower:
    """An agent that asks one engine for loans. The engine knows it as another engine's."""

    def __init__(self, agent: NixlAgent, holder: Server) -> None:
        self.agent = agent
        (self.rank,) = holder.get("/disagg/identity").json()["ranks"]
        self.name = agent.add_remote(decode_metadata(handshake(self.rank)).agent_metadata)
        self.say(Hello(agent.metadata()))
        self.count = 0

    def say(self, message: Any) -> None:
        self.agent.notify(self.name, encode_extension(message))

    def ask(self, tokens: list[int], scheme: str | None = None) -> Loan:
        size = self.rank["block_size"]
        keys: list[bytes] = []
        for start in range(0, len(tokens) - size + 1, size):
            parent = keys[-1] if keys else b""
            keys.append(chain_digest(parent, tokens[start : start + size]))
        self.count += 1
        self.say(AskLoan(self.count, scheme or f"disagg-engine blake2b-256 {size}", tuple(keys)))
        loan = wait_for(self._answer, "the engine answers")
        assert loan is not None
        assert loan.last_key == (keys[loan.num_tokens // size - 1] if loan.request_id else b"")
        return loan

    def _answer(self) -> Loan | None:
        heard = [decode_notification(message) for _, message in self.agent.notifications()]
        return next((m for m in heard if isinstance(m, Loan) and m.sequence == self.count), None)

    def params(self, loan: Loan, tokens: list[int]) -> dict[str, Any]:
        """Return the params that offer the loan to a prefill leg, as a retained turn."""
        where = {
            **{key: self.rank[key] for key in ("remote_engine_id", "remote_host", "remote_port")},
            "remote_request_id": loan.request_id,
            "remote_block_ids": [list(group) for group in loan.block_ids],
            "remote_num_tokens": loan.num_tokens,
            "remote_block_size": self.rank["block_size"],
            "tp_size": 1,
        }
        proof = PrefixHashes.of(tokens[: loan.num_tokens])
        return {**where, "prefix_proof": proof.to_wire(where)}


@pytest.fixture(scope="module")
def borrower(decoder: Server) -> Iterator[Borrower]:
    with stranger() as agent:
        yield Borrower(agent, decoder)


def test_an_idle_engine_lends_its_cached_prefix_and_another_one_continues_from_it(
    prefiller: Server, decoder: Server, alone: Server, borrower: Borrower
) -> None:
    system = tokens_of(640, 1)
    complete(decoder, [*system, *tokens_of(20, 2)])
    prompt = [*system, *tokens_of(50, 3)]
    loan = borrower.ask(prompt)
    assert loan.num_tokens == 640
    assert 0 < loan.seconds <= 10
    assert metric(decoder, DELAYED) == len(loan.block_ids[0])
    computed, fetched = metric(prefiller, COMPUTED), metric(prefiller, FETCHED)
    answer = prefill(prefiller, prompt, borrower.params(loan, prompt))
    assert metric(prefiller, FETCHED) - fetched == 640
    assert metric(prefiller, COMPUTED) - computed == 50
    borrower.say(Read(loan.request_id))
    wait_for(lambda: metric(decoder, DELAYED) == 0, "the blocks come back")
    again = decode(decoder, prompt, answer)
    assert differences([complete(alone, prompt)], [again.answer]) == []


def test_readers_of_one_prefix_share_a_loan_and_the_last_one_ends_it(
    decoder: Server, borrower: Borrower
) -> None:
    prompt = tokens_of(200, 10)
    complete(decoder, prompt)
    with stranger() as agent:
        other = Borrower(agent, decoder)
        first, second = borrower.ask(prompt), other.ask(prompt)
        assert first.request_id == second.request_id
        assert metric(decoder, DELAYED) == len(first.block_ids[0])
        borrower.say(Read(first.request_id))
        third = other.ask(prompt)
        assert third.request_id not in ("", first.request_id), "each request confirms its own"
        assert metric(decoder, DELAYED) == len(first.block_ids[0]), "the same blocks"
        other.say(Read(first.request_id))
        other.say(Read(third.request_id))
    wait_for(lambda: metric(decoder, DELAYED) == 0, "the blocks come back")


@pytest.mark.parametrize("why", ["not cached", "other keys", "evicted"])
def test_what_an_engine_does_not_have_is_refused(
    launcher: Launcher, decoder: Server, borrower: Borrower, why: str
) -> None:
    prompt = tokens_of(300, 20)
    if why == "not cached":
        assert not borrower.ask(prompt).request_id
        return
    if why == "other keys":
        complete(decoder, prompt)
        assert not borrower.ask(prompt, "vllm sha256 32").request_id
        return
    with (
        launcher.engine("small", "--num-blocks", "40", extra=BOTH_WAYS) as small,
        stranger() as agent,
    ):
        complete(small, prompt)
        for seed in range(21, 26):
            complete(small, tokens_of(1000, seed))
        assert not Borrower(agent, small).ask(prompt).request_id


def test_a_loan_that_no_engine_reads_ends_after_seconds(
    decoder: Server, borrower: Borrower
) -> None:
    prompt = tokens_of(200, 30)
    complete(decoder, prompt)
    loan = borrower.ask(prompt)
    assert loan.request_id
    wait_for(lambda: metric(decoder, DELAYED) == 0, "the lease expires", loan.seconds + 15)
