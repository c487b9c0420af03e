from engine_ext.base.types import TransferResults
from engine_ext.transfer.results import Aggregate


def received(*names: str, failed: tuple[str, ...] = ()) -> TransferResults:
    return TransferResults(finished_recving=frozenset(names), failed_recving=frozenset(failed))


NOTHING = TransferResults()


def test_an_id_is_reported_once_when_the_last_rank_reported_it() -> None:
    ranks = Aggregate(3)
    assert ranks.aggregate([received("a"), NOTHING, received("a", "b")]) == NOTHING
    assert ranks.aggregate([NOTHING, received("a"), NOTHING]) == received("a")
    assert ranks.aggregate([NOTHING] * 3) == NOTHING


def test_a_load_that_failed_on_one_rank_has_failed_but_not_before_all_have_ended() -> None:
    ranks = Aggregate(2)
    assert ranks.aggregate([received("a", failed=("a",)), NOTHING]) == NOTHING
    assert ranks.aggregate([NOTHING, received("a")]) == received("a", failed=("a",))
    assert ranks.aggregate([received("a"), received("a")]) == received("a")


def test_blocks_are_freed_when_every_rank_has_let_go() -> None:
    sent = TransferResults(finished_sending=frozenset(["p"]))
    ranks = Aggregate(2)
    assert ranks.aggregate([sent, received("p")]) == NOTHING
    assert ranks.aggregate([NOTHING, sent]) == sent
