"""Runs with one release of vLLM: `python -m tests.vllm.inside.families RESULTS`.

The KV caches of models that people disaggregate, with the sizes of one tensor-parallel rank, as
vLLM's planner groups them and vLLM allocates them in host memory. Writes by family "" if our code
moves each block to the right place, or what it refuses the family with at the start. The sizes are
those of the models' published configurations, and of vLLM's model code where that pads or packs.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from engine_ext.common.types import STATE
from engine_ext.layout.match import match_peer
from engine_ext.layout.plan import ALONE, NULL_BLOCK, PlanError, to_fill
from engine_ext.layout.ranks import TensorRank
from engine_ext.vllm import describe
from tests.vllm.inside.layouts import WRONG, Kind, Rank, config_of, copy, planned

BYTES, HALF, FLOAT = torch.uint8, torch.bfloat16, torch.float32
NUM_BLOCKS = 40
MTP_BLOCKS = 3
Specs = dict[str, Any]


class Family(NamedTuple):
    """`layer`: the caches of a layer, by the end of their names. `kernel`: the block size of the
    attention kernel, where it is not that of the cache."""

    layer: Callable[[int], Specs]
    num_layers: int = 4
    use_mla: bool = False
    has_states: bool = False
    is_sparse: bool = False
    layout: str = "LBHNC"
    kernel: int = 0
    has_mtp: bool = False
    model_type: str = ""


def full(heads: int, size: int, block: int = 16, **fields: Any) -> Any:
    return FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=size, dtype=HALF, **fields
    )


def window(heads: int, size: int, tokens: int, block: int = 16, **fields: Any) -> Any:
    return SlidingWindowSpec(
        block_size=block,
        num_kv_heads=heads,
        head_size=size,
        dtype=HALF,
        sliding_window=tokens,
        **fields,
    )


def latents(block: int = 64, size: int = 576, dtype: Any = HALF, **fields: Any) -> Any:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=size, dtype=dtype, **fields)


def index_keys(block: int = 64, **fields: Any) -> Any:
    """A key of 128 bytes and its scale."""
    return latents(block, 132, BYTES, **fields)


def latent_window(block: int, size: int, dtype: Any, tokens: int, **fields: Any) -> Any:
    return SlidingWindowMLASpec(
        block_size=block,
        num_kv_heads=1,
        head_size=size,
        dtype=dtype,
        sliding_window=tokens,
        **fields,
    )


def ring(heads: int, size: int, block: int = 8, dtype: Any = HALF, **fields: Any) -> Any:
    return CircularBufferSpec(
        block_size=block, num_kv_heads=heads, head_size=size, head_size_v=0, dtype=dtype, **fields
    )


def state(convolution: int, heads: int, key: int, like: Any) -> Any:
    """A short convolution's inputs and a matrix of each head, padded to the page of `like`."""
    return MambaSpec(
        shapes=((3, convolution), (heads, 128, key)),
        dtypes=(HALF, FLOAT),
        block_size=like.block_size,
        page_size_padded=like.page_size_bytes,
    )


def every(number: int, rare: Any, usual: Any) -> Callable[[int], Specs]:
    """Return the layers of a model in which each layer `number` has the cache `rare`."""
    return lambda layer: {"attn": usual if (layer + 1) % number else rare}


def hybrid(attention: Any, convolution: int, heads: int, key: int = 128) -> Callable[[int], Specs]:
    held = state(convolution, heads, key, attention)
    return lambda layer: {"linear_attn": held} if (layer + 1) % 4 else {"attn": attention}


def sparse(number: int = 1, **fields: Any) -> Callable[[int], Specs]:
    """Return layers of latents, of which each layer `number` has an indexer."""
    held = latents(**fields)
    return lambda layer: (
        {"attn": held} | ({} if layer % number else {"indexer.k_cache": index_keys()})
    )


PACKED: dict[str, Any] = {
    "cache_dtype_str": "fp8_ds_mla",
    "alignment": 576,
    "model_version": "deepseek_v4",
    "state_content_bytes": 584,
}


def deepseek_v4(layer: int) -> Specs:
    """A window in each layer; in two of three, states of 4 or 128 tokens and what compresses them;
    with those of 4, an indexer of its own."""
    caches = {"swa_cache": latent_window(64, 512, BYTES, 128, **PACKED)}
    if layer % 3 == 1:
        compressed = {"tokens_per_state": 4, "alignment": 576}
        caches["attn"] = latents(256, 512, BYTES, **PACKED, tokens_per_state=4)
        caches["compressor.state_cache"] = latent_window(4, 2048, FLOAT, 8, alignment=576)
        caches["indexer.k_cache"] = index_keys(256, **compressed)
        caches["indexer.compressor.state_cache"] = latent_window(4, 512, FLOAT, 8, alignment=576)
    elif layer % 3 == 2:
        caches["attn"] = latents(256, 512, BYTES, **PACKED, tokens_per_state=128)
        caches["compressor.state_cache"] = latent_window(8, 1024, FLOAT, 128, alignment=576)
    return caches


def deepseek_v41(layer: int) -> Specs:
    """A window that is computed again behind cached prefixes; in each second layer all latents, of
    one or two tokens, of which a ring keeps the ones that are still alone."""
    fields = {**PACKED, "bounded_replay": True}
    caches = {"swa_cache": latent_window(32, 512, BYTES, 128, **fields)}
    if layer % 2:
        ratio = 2 if layer % 4 == 1 else 1
        caches["attn"] = latents(128, 512, BYTES, **PACKED, tokens_per_state=ratio)
        caches["indexer.k_cache"] = index_keys(128, tokens_per_state=ratio, alignment=576)
        if ratio > 1:
            caches["compressor.state_cache"] = ring(1, 1024, dtype=FLOAT)
    return caches


def glm5_next(layer: int) -> Specs:
    if (layer + 1) % 4:
        return {"self_attn": state(12288, 32, 128, latents(1920, 576))}
    keys = index_keys(1920, tokens_per_state=4)
    tail = ring(2, 128, dcp_sharded=False)
    return {"attn": latents(1920, 512), "indexer.k_cache": keys, "indexer.tail": tail}


def qwen4(layer: int) -> Specs:
    attention = full(2, 256, 1088)
    if (layer + 1) % 4:
        return {"linear_attn": state(12288, 32, 128, attention)}
    compressed = latents(1088, 128, tokens_per_state=4)
    return {"attn": attention, "indexer.key_state": ring(1, 256), "indexer.compressed": compressed}


def step5(layer: int) -> Specs:
    if layer % 4:
        return {"attn": window(8, 128, 512, 128)}
    summary = FullAttentionSpec(
        block_size=128,
        num_kv_heads=1,
        head_size=256,
        head_size_v=0,
        dtype=BYTES,
        tokens_per_state=8,
    )
    attention = full(8, 128, 128)
    held = ring(1, attention.page_size_bytes // 256, 128)
    return {"attn": attention, "summary": summary, "ring": held}


def minimax_m3(layer: int) -> Specs:
    keys = latents(128, 128, cache_role=SparseCacheRole.INDEXER)
    return {"attn": full(4, 128, 128)} | ({"index_cache": keys} if layer >= 3 else {})


def inkling(layer: int) -> Specs:
    attention = window(8, 128, 1024) if (layer + 1) % 4 else full(8, 128)
    return {"attn": attention, "conv": window(8, 384, 4, head_size_v=0)}


GDN = hybrid(full(2, 256, 1072), 12288, 32)
KDA = hybrid(latents(1920), 12288, 32)
HYBRID: dict[str, Any] = {"has_states": True}
MLA_HYBRID: dict[str, Any] = {**HYBRID, "use_mla": True}
DSA: dict[str, Any] = {"use_mla": True, "is_sparse": True}
FP8 = {"dtype": BYTES, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656}

FAMILIES: Mapping[str, Family] = {
    "Llama 3, Mistral, Qwen3": Family(lambda _: {"attn": full(8, 128)}),
    "DeepSeek-V3, DeepSeek-R1, Kimi K2, Mistral Large 3": Family(
        lambda _: {"attn": latents()}, use_mla=True
    ),
    "DeepSeek-V3.2, GLM-5, HY V4": Family(sparse(), **DSA),
    "GLM-5.2, with an indexer in every fourth layer": Family(sparse(4, **FP8), 8, **DSA),
    "gpt-oss": Family(every(2, full(8, 64), window(8, 64, 128))),
    "Gemma 3": Family(every(6, full(8, 256), window(8, 256, 1024)), 6),
    "Gemma 4 31B": Family(every(6, full(4, 512), window(16, 256, 1024)), 6),
    "Gemma 4 E2B, E4B": Family(every(6, full(1, 512), window(1, 256, 512)), 6),
    "MiMo-V2": Family(
        every(6, full(4, 192, head_size_v=128), window(8, 192, 128, head_size_v=128)), 6
    ),
    "Llama 4": Family(
        every(
            4,
            full(8, 128),
            ChunkedLocalAttentionSpec(
                block_size=16,
                num_kv_heads=8,
                head_size=128,
                dtype=HALF,
                attention_chunk_size=8192,
            ),
        )
    ),
    "Qwen3-Next, Qwen3.5": Family(GDN, **HYBRID),
    "Qwen3-Next, Qwen3.5, on FLASHINFER": Family(GDN, kernel=16, **HYBRID),
    "Qwen3.5 with MTP": Family(GDN, has_mtp=True, **HYBRID),
    "Kimi-Linear, Kimi K3": Family(KDA, **MLA_HYBRID),
    "Kimi-Linear, Kimi K3, on FLASHMLA": Family(KDA, kernel=64, **MLA_HYBRID),
    "Kimi K3 with MTP": Family(KDA, has_mtp=True, **MLA_HYBRID),
    "Nemotron-H": Family(hybrid(full(2, 128, 2112), 10240, 64, 64), **HYBRID),
    "MiniMax-M3": Family(minimax_m3, 6),
    "dots3": Family(every(4, latents(), latent_window(64, 576, HALF, 512)), use_mla=True),
    "Inkling": Family(inkling, layout="BLHNC"),
    "DeepSeek-V4": Family(deepseek_v4, 9, layout="BLHNC", **DSA),
    "DeepSeek-V4.1": Family(deepseek_v41, 8, layout="BLHNC", model_type="deepseek_v41", **DSA),
    "GLM-5.3-Flash": Family(glm5_next, 8, layout="BLHNC", is_sparse=True, **MLA_HYBRID),
    "Qwen4-exp": Family(qwen4, 8, layout="BLHNC", **HYBRID),
    "Step5": Family(step5, 8, layout="BLHNC", model_type="step5"),
}


def engine_of(family: Family, rank: TensorRank = ALONE) -> Rank:
    """Raises ValueError where our code refuses, and what vLLM's planner raises."""
    specs: Specs = {}
    for layer in range(family.num_layers):
        for name, spec in family.layer(layer).items():
            if family.has_mtp and isinstance(spec, MambaSpec):
                spec = replace(spec, num_speculative_blocks=MTP_BLOCKS)
            specs[f"model.layers.{layer}.self_attn.{name}"] = spec
    kind, block_size = Kind("FLASH_ATTN"), next(iter(specs.values())).block_size
    config = config_of(kind, block_size, family.layout, 1)
    config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
    config.max_in_flight_tokens = 2048
    model = config.model_config
    model.use_mla, model.is_hybrid, model.max_model_len = family.use_mla, family.has_states, 4096
    model.hf_text_config.model_type = family.model_type
    if family.is_sparse:
        model.hf_text_config.index_topk = 2048
    groups, cache = planned(config, specs)
    kernels = [_kernel_size(family, group.kv_cache_spec) for group in groups]
    caches = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[family.layout], kernels)
    found = Rank.described(kind, config, cache, caches, rank)
    of_prefixes = describe.uncached_groups(cache)
    return replace(found, geometry=replace(found.geometry, uncached_groups=of_prefixes))


def _kernel_size(family: Family, spec: Any) -> int:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return int(spec.first_spec.block_size)
    return int(spec.block_size if isinstance(spec, MambaSpec) else family.kernel or spec.block_size)


def is_moved(ours: Rank, theirs: Rank, is_cached: bool) -> bool:
    """One engine reads a prompt from another one with the same caches and other block ids, all of
    it or behind the first block, which its prefix cache has. Return True if each page that vLLM's
    views show is the right one, and no other has changed."""
    geometry = ours.geometry
    sizes, windows = geometry.block_sizes, geometry.group_windows
    num_tokens = 2 * geometry.block_size
    first_token = geometry.block_size if is_cached else 0
    counts = [
        1 if window == STATE else _kept(num_tokens, size, window)
        for size, window in zip(sizes, windows, strict=True)
    ]
    local, remote = (_blocks(counts, start) for start in (1, 2))
    theirs.memory.random_()
    ours.memory.random_()
    given, before = ({name: view.clone() for name, view in pages(one)} for one in (theirs, ours))
    layout = match_peer(geometry, ours.regions, theirs.metadata, ours.rank, theirs.rank)
    holes = [
        num_tokens // size - count if window != STATE else 0
        for size, window, count in zip(sizes, windows, counts, strict=True)
    ]
    in_place = tuple((NULL_BLOCK,) * n + ids for n, ids in zip(holes, local, strict=True))
    filled = to_fill(in_place, geometry, first_token)
    copy(layout, layout.to_read(filled, remote, first_token, num_tokens, num_tokens))
    for name, view in pages(ours):
        group = ours.groups[name]
        is_whole = windows[group] == STATE or group in geometry.uncached_groups
        skipped = 0 if is_whole else max(0, first_token // sizes[group] - holes[group])
        here, there = list(local[group][skipped:]), list(remote[group][skipped:])
        named = {*itertools.chain(*(ids for at, ids in enumerate(local) if at != group)), *here}
        others = [block for block in range(NUM_BLOCKS) if block not in named]
        if not torch.equal(view[here], given[name][there]):
            return False
        if not torch.equal(view[others], before[name][others]):
            return False
    return True


def _kept(num_tokens: int, size: int, window: int | None) -> int:
    """Return the blocks that a prompt has in a group; a window keeps its last ones."""
    kept = num_tokens if window is None else min(num_tokens, abs(window) + size)
    return kept // size


def _blocks(counts: Sequence[int], start: int) -> tuple[tuple[int, ...], ...]:
    """Return ids for each group, of which no two are the same. No engine uses block 0."""
    ids = itertools.chain(range(start, NUM_BLOCKS, 2), range(3 - start, NUM_BLOCKS, 2))
    return tuple(tuple(itertools.islice(ids, count)) for count in counts)


def pages(rank: Rank) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the bytes of each layer's cache by block, as vLLM sees them."""
    for name, cache in rank.caches.items():
        held = cache.view(torch.uint8)
        yield name, held.view(NUM_BLOCKS, -1, *held.shape[1:])


def verdict(family: Family) -> str:
    try:
        ours, theirs = engine_of(family), [engine_of(family)]
        if ours.geometry.num_kv_heads == 1:  # every rank has the same, and the first is read
            theirs.append(engine_of(family, TensorRank(0, 2)))
        # What a prefix cache has matters to windows.
        reads = itertools.product(theirs, {False, any(ours.geometry.group_windows)})
        return "" if all(is_moved(ours, *one) for one in reads) else WRONG
    except (ValueError, PlanError) as error:
        return str(error)


def main(results: Path) -> None:
    results.write_text(json.dumps({name: verdict(one) for name, one in FAMILIES.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
