import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.layout.ranks import MAX_FACED, RankError, TensorRank, is_spare

SIZES = st.sampled_from([1, 2, 4, 8, 16])


@given(SIZES, SIZES, SIZES)
def test_what_a_rank_faces_holds_its_heads_once_but_for_spares(
    ours: int, theirs: int, heads: int
) -> None:
    for reader in (TensorRank(rank, ours) for rank in range(ours)):
        wanted = reader.heads(heads)
        found = []
        for rank in reader.faces(theirs):
            holder = TensorRank(rank, theirs)
            if not is_spare(holder, reader, heads):
                found += [head for head in holder.heads(heads) if head in wanted]
        assert found == list(wanted)


@given(SIZES, SIZES)
def test_facing_is_mutual_and_a_holder_hears_from_as_many_as_it_is_told(
    ours: int, theirs: int
) -> None:
    readers = [TensorRank(rank, ours) for rank in range(ours)]
    for rank in range(theirs):
        holder = TensorRank(rank, theirs)
        facing = [reader.rank for reader in readers if rank in reader.faces(theirs)]
        assert facing == list(holder.faces(ours))
        assert len(facing) == readers[0].facing(theirs)


@pytest.mark.parametrize(("ours", "theirs"), [(2, 3), (4, 6), (1, 0), (1, 2 * MAX_FACED)])
def test_sizes_that_do_not_divide_or_are_absurd_are_refused(ours: int, theirs: int) -> None:
    with pytest.raises(RankError):
        TensorRank(0, ours).faces(theirs)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(RankError, match="6 KV heads on 4 ranks"):
        TensorRank(0, 4).heads(6)
