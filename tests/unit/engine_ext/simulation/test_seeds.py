"""Some hundreds of seeds; `make simulate` runs ten thousand."""

import pytest

from tests.unit.engine_ext.simulation.run import COMMAND, failure_of
from tests.unit.engine_ext.simulation.scenario import KINDS

SEEDS = 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_seed_breaks_what_no_fault_may_break(kind: str) -> None:
    failures = [
        f"{problem}\n  {COMMAND} --kind {kind} --seed {seed} --trace"
        for seed in range(SEEDS)
        if (problem := failure_of(seed, kind)) is not None
    ]
    assert not failures, "\n".join([f"{len(failures)} of {SEEDS} seeds", *failures[:10]])
