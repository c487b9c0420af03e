"""Where our code says that a block lies, for each of vLLM's attention backends for CUDA: the cache
is allocated by vLLM, in host memory, so no GPU is needed, and no kernel runs."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.vllm.releases import BUILD, NEXT, python_of
from tests.vllm.servers import Fleet
from tests.vllm.test_releases import results_inside

RIGHT, WRONG = "right", "wrong"
"""As tests/vllm/inside/layouts.py says. Everything else is the error that we refuse with."""

IN_PIECES = "blocks must come first, each in one piece"
PERMUTED = "enable_permute_local_kv is off"

LAYOUTS = {
    **dict.fromkeys(("LBHNC", "BLHNC"), RIGHT),
    **dict.fromkeys(("LBNHC", "BLNHC", "BHLNC", "LHBNC"), IN_PIECES),
}
COMPACT = {name: LAYOUTS[name] for name in ("LBHNC", "BLHNC", "LBNHC", "BLNHC")}
"""What vLLM offers where layers differ."""
RANKS = dict.fromkeys(
    ("alike", "alike, of two ranks", "from two ranks to one", "from one rank to two", "to BLHNC"),
    RIGHT,
)
BLOCKS = dict.fromkeys(("to larger blocks", "to smaller blocks"), RIGHT)
SINGLE = {"from LBNHC, one head a rank": PERMUTED, "permuted from it": RIGHT}
OURS = {"starts with": "LBHNC"}
SPLIT = dict.fromkeys(
    (
        "two kernel blocks",
        "two kernel blocks, alike",
        "two kernel blocks, from two ranks to one",
        "two kernel blocks, from one rank to two",
        "two kernel blocks, from smaller blocks",
        "two kernel blocks, to smaller blocks",
    ),
    RIGHT,
)

HEADS = {**OURS, **LAYOUTS, **RANKS, **BLOCKS, **SINGLE}
LATENT = {**OURS, **dict.fromkeys(LAYOUTS, RIGHT), **RANKS}
SPARSE = {**OURS, **dict.fromkeys(COMPACT, RIGHT), **RANKS, **SPLIT}
ONLY_LBNHC = {"starts with": "LBNHC", "LBNHC": IN_PIECES}

KINDS: dict[str, Mapping[str, str]] = {
    "FLASH_ATTN": HEADS,
    "FLASH_ATTN fp8": HEADS,
    "FLASH_ATTN_DIFFKV": HEADS,
    "FLASH_ATTN windows (4, 64)": {**OURS, **COMPACT, **RANKS, **BLOCKS, **SINGLE},
    "FLASHINFER": {**HEADS, **SPLIT},
    "TRITON_ATTN": HEADS,
    "TRITON_ATTN int8_per_token_head": HEADS,
    "TRITON_ATTN_DIFFKV": HEADS,
    "TRITON_FLASH_ATTN": HEADS,
    "TRITON_FLASHINFER": {**OURS, **LAYOUTS, **RANKS, **SINGLE, **SPLIT},
    "FLEX_ATTENTION": ONLY_LBNHC,
    "TURBOQUANT turboquant_4bit_nc": ONLY_LBNHC,
    "HPC_ATTN": ONLY_LBNHC,
    "FLASHMLA": {**LATENT, **SPLIT},
    "TRITON_MLA": {**LATENT, **BLOCKS},
    "CUTLASS_MLA": {**LATENT, **SPLIT},
    "FLASHINFER_MLA": {**LATENT, **BLOCKS, **SPLIT},
    "FLASH_ATTN_MLA": {**LATENT, **BLOCKS},
    "TOKENSPEED_MLA": {**LATENT, **BLOCKS, **SPLIT},
    "FLASHMLA_SPARSE indexers": SPARSE,
    "FLASHMLA_SPARSE fp8_ds_mla indexers": SPARSE,
}
UNCUT = {
    "B12X": "all keys of a block, then all values",
    "FLASHINFER nvfp4": "data and scales apart",
    "FLASH_ATTN windows (4, 48)": "layers of other heads on the memory of one block",
    "FLASH_ATTN windows (8, 32)": "the same, of as many bytes",
    "FLASH_ATTN windows (8, 64)": "windows with half the tokens in a block",
    "FLASH_ATTN windows (4, 32)": "windows with twice as many",
    "FLASHINFER windows (8, 64)": "half the tokens, and beside them two kernel blocks in a block",
    "FLASH_ATTN states": "states",
    # Blocks of three kernel blocks, as vLLM makes them where a state needs more than one.
    "FLASHINFER states": "states",
    "FLASHMLA states": "states",
    "FLASHINFER_MLA states": "states",
    "CUTLASS_MLA states": "states",
}
"""What no cut by heads fits: nothing moves between other ranks or block sizes."""
ALIKE = ("LBHNC", "alike", "alike, of two ranks")
OTHERWISE = ("from two ranks to one", "from one rank to two", *BLOCKS)

ELSEWHERE = (
    *("ROCM_", "XPU_", "CPU_", "AMX_", "ULTRAQUANT"),  # no CUDA
    *("TORCH_SDPA", "NO_ATTENTION", "CUSTOM"),  # no paged cache of vLLM's
    # Sparse attention: the same caches as of the one that has a case; some are refused by kind, see
    # tests/vllm/inside/cases.py.
    *("FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE_", "FLASHMLA_MEGA", "FLASH_ATTN_MLA_SPARSE"),
    *("MINIMAX_M3_SPARSE", "CUTLASS_MSA", "TRITON_MSA", "STEP5_DSA"),
)
"""How the names of backends begin that have no case."""


@pytest.fixture(scope="module", params=[BUILD, NEXT])
def found(
    request: pytest.FixtureRequest, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("layouts")
    return results_inside(python_of(fleet, request.param), folder, "tests.vllm.inside.layouts")


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_where_we_say_or_is_refused_by_name(found: dict[str, Any], kind: str) -> None:
    verdicts, expected = found["verdicts"][kind], KINDS[kind]
    assert verdicts.keys() == expected.keys()
    others = {case: said for case, said in verdicts.items() if expected[case] not in said}
    assert others == {}


@pytest.mark.parametrize("kind", UNCUT)
def test_what_no_cut_by_heads_fits_moves_between_engines_that_are_alike(
    found: dict[str, Any], kind: str
) -> None:
    verdicts = found["verdicts"][kind]
    assert WRONG not in verdicts.values()
    assert [verdicts[case] for case in ALIKE] == [RIGHT] * len(ALIKE)
    refused = [verdicts[case] for case in OTHERWISE if case in verdicts]
    assert len(refused) >= 2
    assert all("give both engines the same" in said for said in refused)


def test_every_backend_for_cuda_has_a_case(found: dict[str, Any]) -> None:
    assert found["verdicts"].keys() == KINDS.keys() | UNCUT.keys()
    seen = {kind.partition(" ")[0] for kind in found["verdicts"]}
    others = {name for name in found["backends"] if not name.startswith(ELSEWHERE)}
    assert others - seen == set()
