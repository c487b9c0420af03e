"""Runs with one release of vLLM: `python -m tests.vllm.inside.states RESULTS`.

Models that keep states, with the sizes of their published configurations, moved between engines of
unlike tensor parallel sizes. What a rank has is vLLM's word: the shapes of its calculator, the
channels that its loaders give a rank of the convolution's weights, the views that its layers make
of a page. Writes by case RIGHT if the memory of each reader is, to the last byte, what vLLM would
have there, WRONG if not, or the error that our code refuses with.
"""

import contextlib
import functools
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import (
    _make_fused_conv1d_weight_loader,
)
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from engine_ext.common.types import STATE
from engine_ext.layout.match import match_peer
from engine_ext.layout.plan import PeerLayout
from engine_ext.layout.ranks import TensorRank
from engine_ext.vllm import describe, state_sections
from engine_ext.wire.handshake import decode_metadata, decode_payload, encode_payload
from tests.vllm.inside.layouts import RIGHT, WRONG, Kind, Rank, config_of, copy, planned, verdict

SHAPES = mamba_utils.MambaStateShapeCalculator
BYTES, HALF, FLOAT = torch.uint8, torch.bfloat16, torch.float32
NUM_BLOCKS = 12
WIDTH = 4
"""The tokens that a short convolution reads; its state keeps all but one."""
LAYERS = ("linear.0", "linear.1", "linear.2", "attention.3")
Shapes = tuple[tuple[int, ...], ...]


def _loaded(parts: list[tuple[int, int, bool]], rank: TensorRank) -> torch.Tensor:
    """Return the channels that vLLM's loader gives a rank of these parts: a part's size, how much
    of it is copies, and whether every rank has all of it."""
    held = torch.full((sum(size // rank.size for size, _, _ in parts),), -1)
    load = mamba_v2_sharded_weight_loader(parts, rank.size, rank.rank)
    load(SimpleNamespace(data=held), torch.arange(sum(size - more for size, more, _ in parts)))
    return held


@dataclass(frozen=True)
class Mamba2:
    heads: int
    head_size: int
    groups: int
    state_size: int

    type: ClassVar = MambaAttentionBackendEnum.MAMBA2

    def parts(self, ranks: int) -> list[tuple[int, int, bool]]:
        """Return the parts that MambaMixer2 gives to the loader. MergedColumnParallelLinear loads
        the same channels where groups can be divided."""
        groups = self.groups + SHAPES.extra_groups_for_head_shards(self.groups, ranks)
        size, more = groups * self.state_size, (groups - self.groups) * self.state_size
        return [(self.heads * self.head_size, 0, False), *[(size, more, self.groups == 1)] * 2]

    def shapes(self, ranks: int) -> Shapes:
        inner = self.heads * self.head_size
        held: Shapes = SHAPES.mamba2_state_shape(
            ranks, inner, self.groups, self.heads, self.head_size, self.state_size, WIDTH
        )
        return held

    def channels(self, rank: TensorRank) -> torch.Tensor:
        """Return the model's number of each channel of this rank."""
        return _loaded(self.parts(rank.size), rank)


@dataclass(frozen=True)
class DeltaNet:
    key_heads: int
    heads: int
    key_size: int
    head_size: int

    type: ClassVar = MambaAttentionBackendEnum.GDN_ATTN
    groups: ClassVar = 0

    def shapes(self, ranks: int) -> Shapes:
        held: Shapes = SHAPES.gated_delta_net_state_shape(
            ranks, self.key_heads, self.heads, self.key_size, self.head_size, WIDTH
        )
        return held

    def channels(self, rank: TensorRank) -> torch.Tensor:
        keys, values = self.key_heads * self.key_size, self.heads * self.head_size
        return _loaded([(keys, 0, False), (keys, 0, False), (values, 0, False)], rank)


@dataclass(frozen=True)
class Kimi:
    heads: int
    head_size: int

    type: ClassVar = MambaAttentionBackendEnum.GDN_ATTN
    groups: ClassVar = 0

    def shapes(self, ranks: int) -> Shapes:
        held: Shapes = SHAPES.kda_state_shape(
            ranks, self.heads, self.head_size, conv_kernel_size=WIDTH
        )
        return held

    def channels(self, rank: TensorRank) -> torch.Tensor:
        size = self.heads * self.head_size
        held = torch.full((3 * size // rank.size, 1, 1), -1)
        load = _make_fused_conv1d_weight_loader([size] * 3, rank.size, rank.rank)
        for part, ids in enumerate(torch.arange(3 * size).view(3, size, 1, 1)):
            load(SimpleNamespace(data=held), ids, part)
        return held.flatten()


class Model(NamedTuple):
    """`heads`, `head_size`: of keys and values, of which 0 heads are latents. `kernel`: the block
    size of the attention kernel, where it is not that of the cache."""

    state: Mamba2 | DeltaNet | Kimi
    heads: int
    head_size: int
    kernel: int = 0

    @property
    def total_heads(self) -> int:
        return self.heads or 1

    def attention(self, block: int, ranks: int) -> Any:
        if not self.heads:
            return MLAAttentionSpec(
                block_size=block, num_kv_heads=1, head_size=self.head_size, dtype=HALF
            )
        return FullAttentionSpec(
            block_size=block,
            num_kv_heads=max(1, self.heads // ranks),
            head_size=self.head_size,
            dtype=HALF,
        )

    def block_size(self, ranks: int) -> int:
        """Return the block size that vLLM's platforms choose: no block is shorter than a state."""
        states = MambaSpec(shapes=self.state.shapes(ranks), dtypes=(HALF, FLOAT), block_size=1)
        step = self.attention(16 if self.heads else 128, ranks)
        return int(-(-states.page_size_bytes // step.page_size_bytes) * step.block_size)

    def specs(self, ranks: int) -> dict[str, Any]:
        block = self.block_size(ranks)
        attention = self.attention(block, ranks)
        states = MambaSpec(
            shapes=self.state.shapes(ranks),
            dtypes=(HALF, FLOAT),
            block_size=block,
            page_size_padded=attention.page_size_bytes,
            mamba_type=self.state.type,
        )
        return {name: attention if "attention" in name else states for name in LAYERS}


QWEN = DeltaNet(16, 32, 128, 128)
MODELS = {
    "Qwen3-Next": Model(QWEN, 2, 256),
    "Qwen3-Next, on FLASHINFER": Model(QWEN, 2, 256, kernel=16),
    "Qwen3.5": Model(DeltaNet(16, 64, 128, 128), 2, 256),
    "Nemotron-H": Model(Mamba2(128, 64, 8, 128), 8, 128),
    "Granite 4": Model(Mamba2(128, 64, 1, 128), 8, 128),
    "Kimi-Linear": Model(Kimi(32, 128), 0, 576),
    "Kimi-Linear, on FLASHMLA": Model(Kimi(32, 128), 0, 576, kernel=64),
}
SIZES = ((1, 2), (2, 1), (2, 4), (4, 2), (8, 4))
"""Tensor parallel sizes of the engine that holds the prompt, and of the reader."""


class Worker(NamedTuple):
    """One rank, and the views that vLLM's layers make of its cache."""

    model: Model
    rank: Rank

    @classmethod
    def of(cls, model: Model, number: int, ranks: int) -> "Worker":
        kind, block = Kind("FLASH_ATTN"), model.block_size(ranks)
        config = config_of(kind, block, "LBHNC", ranks, number)
        config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
        config.max_in_flight_tokens = 2048
        named = config.model_config
        named.use_mla, named.is_hybrid, named.max_model_len = not model.heads, True, 4096
        if model.state.groups:
            named.hf_text_config.n_groups = model.state.groups
        named.get_total_num_kv_heads = lambda: model.total_heads
        groups, cache = planned(config, model.specs(ranks))
        kernels = [
            block if isinstance(group.kv_cache_spec, MambaSpec) else model.kernel or block
            for group in groups
        ]
        caches = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout.LBHNC, kernels)
        place = TensorRank(number, ranks)
        return cls(model, Rank.described(kind, config, cache, caches, place))

    def matched(self, other: "Worker") -> PeerLayout:
        """Return the layout of transfers, from the other rank's handshake."""
        ours, theirs = self.rank, other.rank
        told = decode_metadata(decode_payload(encode_payload(theirs.metadata, {})))
        return match_peer(ours.geometry, ours.regions, told, ours.rank, theirs.rank)

    def states(self, name: str) -> list[torch.Tensor]:
        shapes = self.model.state.shapes(self.rank.rank.size)
        layer: Any = SimpleNamespace(
            get_state_shape=lambda: shapes, get_state_dtype=lambda: (HALF, FLOAT)
        )
        MambaBase.bind_kv_cache(layer, self.rank.caches[name])
        return list(layer.kv_cache)

    def blocks(self, num_tokens: int, seed: int) -> tuple[tuple[int, ...], ...]:
        """Return distinct blocks for each group. No engine uses block 0."""
        left = list(range(1, NUM_BLOCKS))
        random.Random(seed).shuffle(left)
        geometry = self.rank.geometry
        counts = [
            1 if window == STATE else -(-num_tokens // size)
            for size, window in zip(geometry.block_sizes, geometry.group_windows, strict=True)
        ]
        return tuple(tuple(left.pop() for _ in range(count)) for count in counts)


class Prompt:
    """The KV of a prompt: random bytes."""

    def __init__(self, model: Model, num_tokens: int) -> None:
        draw = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randint(0, 256, shape, dtype=BYTES, generator=draw)

        (channels, width), states = sorted(model.state.shapes(1), key=len)
        channels, width = max(channels, width), min(channels, width)
        spec = model.attention(1, model.total_heads)
        self.num_tokens = num_tokens
        self._tokens = drawn(model.total_heads, num_tokens, spec.page_size_bytes)
        self._inputs = {name: drawn(channels, 2 * width).view(HALF) for name in LAYERS[:-1]}
        self._states = {
            name: drawn(*states[:-1], 4 * states[-1]).view(FLOAT) for name in LAYERS[:-1]
        }

    def put(self, worker: Worker, blocks: Sequence[Sequence[int]]) -> None:
        """Write the prompt's KV into the blocks of a rank, as vLLM lays it out."""
        rank = worker.rank
        for name in LAYERS[:-1]:
            (block,) = blocks[rank.groups[name]]
            inputs, states = worker.states(name)
            ours = self._inputs[name][worker.model.state.channels(rank.rank)]
            is_by_channel = mamba_utils.is_conv_state_dim_first()
            inputs[block] = ours if is_by_channel else ours.T
            heads = rank.rank.heads(len(self._states[name]))
            states[block] = self._states[name][heads.start : heads.stop]
        cache = rank.caches[LAYERS[-1]].view(BYTES)
        size = cache.shape[2]
        per_block = len(cache) // NUM_BLOCKS
        held = rank.rank.heads(worker.model.total_heads)
        ids = blocks[rank.groups[LAYERS[-1]]]
        for first in range(0, self.num_tokens, size):
            end = min(first + size, self.num_tokens)
            block, part = divmod(first // size, per_block)
            tokens = self._tokens[held.start : held.stop, first:end]
            cache[ids[block] * per_block + part, :, : end - first] = tokens


def moved(model: Model, theirs: int, ours: int, *, is_push: bool) -> str:
    """Move a prompt between two engines, and return RIGHT or WRONG."""
    holders = [Worker.of(model, number, theirs) for number in range(theirs)]
    readers = [Worker.of(model, number, ours) for number in range(ours)]
    sizes = model.block_size(theirs), model.block_size(ours)
    num_tokens = max(sizes) + 300
    remote, local = holders[0].blocks(num_tokens, 2), readers[0].blocks(num_tokens, 3)
    unit = math.gcd(*sizes, model.kernel)
    prompt = Prompt(model, -(-num_tokens // unit) * unit)  # what is behind the last comes along
    for holder in holders:
        holder.rank.memory.random_()
        prompt.put(holder, remote)
    for reader in readers:
        memory, place = reader.rank.memory, reader.rank.rank
        memory.random_()
        before, num_bytes = memory.clone(), 0
        for number in place.faces(theirs):
            holder = holders[number]
            if is_push:
                layout = holder.matched(reader)
                batch = layout.to_write(remote, local, 0, num_tokens)
            else:
                layout = reader.matched(holder)
                batch = layout.to_read(local, remote, 0, num_tokens, num_tokens)
            copy(layout, batch, is_write=is_push)
            num_bytes += batch.num_bytes
        got = memory.clone()
        memory.copy_(before)
        prompt.put(reader, local)
        if not torch.equal(got, memory) or num_bytes != _size(reader, prompt.num_tokens):
            return WRONG
    return RIGHT


def _size(worker: Worker, num_tokens: int) -> int:
    """Return the bytes of a prompt's KV on a rank. Each is moved once."""
    states, spec = worker.states(LAYERS[0]), worker.model.attention(1, worker.rank.rank.size)
    of_state = sum(one[0].numel() * one.element_size() for one in states)
    return int(num_tokens * spec.page_size_bytes + len(LAYERS[:-1]) * of_state)


@contextlib.contextmanager
def convolutions(layout: str) -> Iterator[None]:
    """Set the layout of convolution states, which vLLM caches."""
    with patch.dict(os.environ, {"VLLM_SSM_CONV_STATE_LAYOUT": layout}):
        mamba_utils.get_conv_state_layout.cache_clear()
        yield
    mamba_utils.get_conv_state_layout.cache_clear()


def _swapped(*args: Any) -> Any:
    """The planted error: values first, where vLLM has queries and keys."""
    *inputs, states = state_sections.state_sections(*args)
    return (*inputs[::-1], states)


def verdicts() -> dict[str, str]:
    found = {}
    for layout, is_push in (("SD", False), ("DS", True)):
        with convolutions(layout):
            for name, model in MODELS.items():
                for theirs, ours in SIZES:
                    case = functools.partial(moved, model, theirs, ours, is_push=is_push)
                    found[f"{name}, {layout}, {theirs} to {ours}"] = verdict(case)
    case = functools.partial(moved, MODELS["Granite 4"], 1, 2, is_push=is_push)
    with patch.object(state_sections, "NUM_GROUPS", ()):
        found["groups that no configuration names"] = verdict(case)
    with patch.object(describe, "state_sections", _swapped):
        found["swapped"] = verdict(lambda: moved(MODELS["Qwen3-Next"], 1, 2, is_push=False))
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(verdicts()))
