"""Some hundreds of seeds; `make simulate` runs ten thousand."""

import pytest

from tests.unit.engine_ext.simulation.run import COMMAND, failure_of
from tests.unit.engine_ext.simulation.scenario import KINDS, LOANS

SEEDS = 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, LOANS])
@pytest.mark.parametrize("mixes_versions", [False, True])
def test_no_seed_breaks_what_no_fault_may_break(kind: str, mixes_versions: bool) -> None:
    more = " --mixed-versions" if mixes_versions else ""
    failures = [
        f"{problem}\n  {COMMAND} --kind {kind} --seed {seed} --trace{more}"
        for seed in range(SEEDS)
        if (problem := failure_of(seed, kind, mixes_versions=mixes_versions)) is not None
    ]
    assert not failures, "\n".join([f"{len(failures)} of {SEEDS} seeds", *failures[:10]])
