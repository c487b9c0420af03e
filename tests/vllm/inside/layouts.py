"""Runs with one release of vLLM: `python -m tests.vllm.inside.layouts RESULTS`.

The KV cache of each of vLLM's attention backends for CUDA, as vLLM itself lays it out: its backend
class customizes the spec, its functions choose the layout, size the cache, allocate it (in host
memory) and cut it into views. Our code is given those views, and where it says a block lies, or the
heads and tokens that go to another engine, is compared with the views the kernels use.

Writes one JSON object: the names of all of vLLM's backends, and by kind the verdict on each case:
RIGHT, WRONG (our code has named other bytes, and not said so), or the error it refuses with.
"""

import contextlib
import ctypes
import functools
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from vllm.config import CacheConfig, KVTransferConfig
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import (
    allocate_kv_cache,
    customize_attention_spec,
    prepare_kernel_block_sizes,
)

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # 0.32
    from vllm.v1.core import kv_cache_utils as planning

from engine_ext.common.types import SHARED, STATE, CacheGeometry, Region
from engine_ext.layout.match import match_peer
from engine_ext.layout.plan import Batch, PeerLayout, PlanError, Rows
from engine_ext.layout.ranks import TensorRank
from engine_ext.vllm import describe
from engine_ext.wire.handshake import AgentMetadata
from engine_ext.worker.worker import WorkerConnector

RIGHT, WRONG = "right", "wrong"
ALONE = TensorRank(0, 1)
INDEXER = "indexer.k_cache"
LAYERS = tuple(f"model.layers.{number}.self_attn.attn" for number in (2, 9, 10, 11))
NUM_BLOCKS = 10
NUM_HEADS = 4
HEAD_SIZE = 64
LATENT_SIZE = 576
INDEXED = (128, 4)
"""Bytes of an indexer's key, and of its scale."""
WINDOW = 1 << 10
"""Of tokens, wider than what is moved."""
BYTES_OF = {"auto": torch.bfloat16}
"""Every other kind of cache is one of bytes."""


class Kind(NamedTuple):
    """A backend, and what it is to keep."""

    backend: str
    cache_dtype: str = "auto"
    head_size_v: int = HEAD_SIZE
    windows: tuple[int, int] | None = None
    """Every second layer has a sliding window: its heads, and their size."""
    has_states: bool = False
    """Every second layer keeps a state instead."""
    has_indexers: bool = False
    """Every second layer has an indexer beside it."""

    @property
    def name(self) -> str:
        dtype = "" if self.cache_dtype == "auto" else f" {self.cache_dtype}"
        windows = f" windows {self.windows}" if self.windows else ""
        others = " states" * self.has_states + " indexers" * self.has_indexers
        return f"{self.backend}{dtype}{windows}{others}"

    @property
    def layers(self) -> list[str]:
        """In the order of regions."""
        names: list[str] = []
        for layer in LAYERS:
            has_indexer = self.has_indexers and self.is_second(layer)
            names += [layer, layer.removesuffix("attn") + INDEXER][: 1 + has_indexer]
        return names

    @property
    def is_of_one_kind(self) -> bool:
        return not (self.windows or self.has_states or self.has_indexers)

    def is_second(self, layer: str) -> bool:
        return layer in LAYERS[1::2]

    def has_window(self, layer: str) -> bool:
        return self.windows is not None and self.is_second(layer)

    def has_state(self, layer: str) -> bool:
        return self.has_states and self.is_second(layer)

    def num_heads(self, layer: str) -> int:
        return self.windows[0] if self.windows and self.has_window(layer) else NUM_HEADS


KINDS = (
    Kind("FLASH_ATTN"),
    Kind("FLASH_ATTN", "fp8"),
    Kind("FLASH_ATTN_DIFFKV", head_size_v=32),
    Kind("FLASH_ATTN", windows=(NUM_HEADS, HEAD_SIZE)),
    Kind("FLASH_ATTN", windows=(NUM_HEADS, 48)),  # padded to a page of the other layers
    Kind("FLASH_ATTN", windows=(2 * NUM_HEADS, HEAD_SIZE // 2)),
    Kind("FLASH_ATTN", windows=(2 * NUM_HEADS, HEAD_SIZE)),
    Kind("FLASH_ATTN", windows=(NUM_HEADS, HEAD_SIZE // 2)),
    Kind("FLASHINFER", windows=(2 * NUM_HEADS, HEAD_SIZE)),
    Kind("FLASHINFER"),
    Kind("FLASHINFER", "nvfp4"),
    Kind("TRITON_ATTN"),
    Kind("TRITON_ATTN", "int8_per_token_head"),
    Kind("TRITON_ATTN_DIFFKV", head_size_v=32),
    Kind("TRITON_FLASH_ATTN"),
    Kind("TRITON_FLASHINFER"),
    Kind("FLEX_ATTENTION"),
    Kind("TURBOQUANT", "turboquant_4bit_nc"),
    Kind("HPC_ATTN"),
    Kind("B12X"),
    Kind("FLASHMLA"),
    Kind("TRITON_MLA"),
    Kind("CUTLASS_MLA"),
    Kind("FLASHINFER_MLA"),
    Kind("FLASH_ATTN_MLA"),
    Kind("TOKENSPEED_MLA"),
    Kind("FLASHMLA_SPARSE", has_indexers=True),
    Kind("FLASHMLA_SPARSE", "fp8_ds_mla", has_indexers=True),
    Kind("FLASH_ATTN", has_states=True),
    Kind("FLASHINFER", has_states=True),
    Kind("FLASHMLA", has_states=True),
    Kind("FLASHINFER_MLA", has_states=True),
    Kind("CUTLASS_MLA", has_states=True),
)


class _Kernels(ModuleType):
    """Stands for a module of kernels that is not there: has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return MagicMock(name=name)


@contextlib.contextmanager
def _pretended_kernels() -> Iterator[None]:
    """Enough for the modules of vLLM's backends to be imported."""
    names = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
    needed = ("flash_attn_varlen_func", "get_scheduler_metadata", "reshape_and_cache_flash")
    missing = [name for name in names if name not in sys.modules]
    sys.modules.update({name: _Kernels(name) for name in missing})
    with contextlib.ExitStack() as stack:
        for name in needed:
            if not hasattr(fa_utils, name):
                stack.enter_context(patch.object(fa_utils, name, None, create=True))
        yield
    for name in missing:
        del sys.modules[name]


@functools.cache
def backend_of(kind: Kind) -> Any:
    member = AttentionBackendEnum[kind.backend]
    with _pretended_kernels():
        try:
            return member.get_class()
        except AssertionError:  # its module allocates memory of a GPU while it is imported
            sys.modules.pop(member.get_path(include_classname=False), None)
            with patch.object(torch, "empty"):
                return member.get_class()


def spec_of(kind: Kind, layer: str, block_size: int, ranks: int) -> Any:
    """As the attention layer builds it and the model runner customizes it."""
    backend = backend_of(kind)
    if layer not in LAYERS:  # as DeepseekV32IndexerCache has it: keys, and behind them their scales
        return MLAAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=sum(INDEXED), dtype=torch.uint8
        )
    if kind.has_state(layer):
        page = spec_of(kind, LAYERS[0], block_size, ranks).page_size_bytes
        return MambaSpec(
            block_size=block_size,
            shapes=((3, 5), (page // 8 // ranks,)),
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=page,
        )
    common: dict[str, Any] = {
        "block_size": block_size,
        "dtype": BYTES_OF.get(kind.cache_dtype, torch.uint8),
        "kv_quant_mode": get_kv_quant_mode(kind.cache_dtype),
    }
    spec: Any
    if backend.is_mla():
        spec = MLAAttentionSpec(
            num_kv_heads=1, head_size=LATENT_SIZE, cache_dtype_str=kind.cache_dtype, **common
        )
    elif kind.windows and kind.has_window(layer):
        heads, size = kind.windows
        spec = SlidingWindowSpec(
            num_kv_heads=heads // ranks, head_size=size, sliding_window=WINDOW, **common
        )
    else:
        spec = FullAttentionSpec(
            num_kv_heads=NUM_HEADS // ranks,
            head_size=HEAD_SIZE,
            head_size_v=kind.head_size_v,
            **common,
        )
    return customize_attention_spec(backend, spec)


def kernel_sizes(kind: Kind) -> list[Any]:
    backend = DeepseekV32IndexerBackend if kind.has_indexers else backend_of(kind)
    return list(backend.get_supported_kernel_block_sizes())


def block_sizes(kind: Kind) -> list[int]:
    """Two that need no splitting, where there are two, of which one is a multiple of the other.
    Beside states: one that does, where the backend does not take all."""
    sizes = kernel_sizes(kind)
    if any(isinstance(size, MultipleOf) for size in sizes):
        base = max(16, *(size.base for size in sizes if isinstance(size, MultipleOf)))
        return [base, 2 * base]
    if kind.windows:
        return [max(sizes)]
    return [3 * min(sizes)] if kind.has_states else sorted(sizes)[:2]


def config_of(kind: Kind, block_size: int, layout: str | None, ranks: int, rank: int = 0) -> Any:
    """What vLLM and our code ask of a VllmConfig, as far as they ask here."""
    sparse: dict[str, Any] = {"index_topk": 2048} if kind.has_indexers else {}
    cache = CacheConfig(block_size=block_size)
    cache.num_gpu_blocks_override = NUM_BLOCKS
    cache.kv_cache_layout = layout
    return SimpleNamespace(
        cache_config=cache,
        attention_config=SimpleNamespace(hisparse_config=None),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, scheduler_cls=None),
        speculative_config=None,
        kv_transfer_config=KVTransferConfig(
            kv_connector="DisaggConnector",
            kv_connector_module_path="engine_ext.vllm",
            kv_role="kv_both",
        ),
        model_config=SimpleNamespace(
            use_mla=backend_of(kind).is_mla(),
            is_hybrid=kind.has_states,
            is_attention_free=False,
            enable_sleep_mode=False,
            hf_text_config=SimpleNamespace(model_type="", **sparse),
            get_total_num_kv_heads=lambda: NUM_HEADS,
        ),
        parallel_config=SimpleNamespace(
            rank=rank,
            nnodes=1,
            distributed_executor_backend="uni",
            tensor_parallel_size=ranks,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
    )


def planned(config: Any, specs: dict[str, Any]) -> tuple[list[Any], KVCacheConfig]:
    """Return the groups of layers with these specs, and the memory that vLLM gives them."""
    groups = planning.get_kv_cache_groups(config, specs)
    return groups, planning.get_kv_cache_config_from_groups(config, groups, 1 << 40)


@dataclass(frozen=True)
class Rank:
    """One worker's cache, and what our code says of it. Raises ValueError where it refuses."""

    kind: Kind
    backend: Any
    block_size: int
    rank: TensorRank
    caches: dict[str, torch.Tensor]
    groups: dict[str, int]
    """By layer."""
    regions: list[Region]
    geometry: CacheGeometry

    @classmethod
    def of(cls, kind: Kind, layout: str, block_size: int, rank: int = 0, ranks: int = 1) -> "Rank":
        backend = backend_of(kind)
        config = config_of(kind, block_size, layout, ranks, rank)
        specs = {layer: spec_of(kind, layer, block_size, ranks) for layer in kind.layers}
        groups, cache = planned(config, specs)
        backends = [backend, *[DeepseekV32IndexerBackend] * kind.has_indexers]
        attention: Any = [
            [SimpleNamespace(backend=each, kv_cache_spec=group.kv_cache_spec) for each in backends]
            for group in groups
        ]
        caches = allocate_kv_cache(
            cache,
            torch.device("cpu"),
            KVCacheLayout[layout],
            prepare_kernel_block_sizes(cache, attention),
        )
        return cls.described(kind, config, cache, caches, TensorRank(rank, ranks))

    @classmethod
    def described(
        cls,
        kind: Kind,
        config: Any,
        cache: KVCacheConfig,
        caches: dict[str, torch.Tensor],
        place: TensorRank = ALONE,
    ) -> "Rank":
        """Return what our code says of caches that vLLM has allocated."""
        backend = backend_of(kind)
        describe.refuse_unsupported(config, cache)
        with patch.object(describe, "get_current_attn_backends", lambda _: [backend]):
            geometry = describe.cache_geometry(config, cache, caches)
        in_group = {
            layer: number
            for number, group in enumerate(cache.kv_cache_groups)
            for layer in group.layer_names
        }
        regions, size = describe.regions(caches, cache), config.cache_config.block_size
        return cls(kind, backend, size, place, caches, in_group, regions, geometry)

    @property
    def metadata(self) -> AgentMetadata:
        """What the handshake says."""
        worker: Any = SimpleNamespace(
            _regions=self.regions,
            _geometry=self.geometry,
            _identity=SimpleNamespace(engine_id="there", tp_size=self.rank.size),
            _config=SimpleNamespace(lease_extension=1.0, write_bound=1.0),
        )
        return WorkerConnector._metadata(worker, b"")

    def heads(self, layer: str) -> range:
        if self.kind.has_state(layer):
            return range(self.rank.rank, self.rank.rank + 1)  # each rank has another one
        return range(1) if self.backend.is_mla() else self.rank.heads(self.kind.num_heads(layer))

    def blocks(self, group: int, num_tokens: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The first of these, as many as hold so many tokens."""
        is_state = self.geometry.group_windows[group] == STATE
        return ids[: 1 if is_state else num_tokens // self.geometry.block_sizes[group]]

    @property
    def memory(self) -> torch.Tensor:
        """All bytes of the cache."""
        storage = next(iter(self.caches.values())).untyped_storage()
        return torch.tensor([], dtype=torch.uint8).set_(storage)

    def parts(self, layer: str) -> list[torch.Tensor]:
        """What the kernels take the cache for: bytes by [block, head, token], keys first."""
        cache = self.caches[layer]
        module: Any = sys.modules[self.backend.__module__]
        if self.kind.backend == "B12X":
            kernels = SimpleNamespace(
                num_kv_heads=len(self.heads(layer)),
                head_size=HEAD_SIZE,
                kv_cache_dtype="auto",
                kv_torch_dtype=cache.dtype,
            )
            planes = module.B12xPagedAttentionImpl._kv_cache_views(kernels, cache)
            views = [plane.transpose(1, 2) for plane in planes]
        elif self.kind.cache_dtype == "nvfp4":
            data, scales, order = module._nvfp4_kv_views(cache, len(self.heads(layer)))
            views = [*data, *scales]
            views = views if order == "HND" else [view.transpose(1, 2) for view in views]
        elif layer not in LAYERS:
            num_blocks, _, size, _ = cache.shape
            planes = torch.split(cache.flatten(1), [size * each for each in INDEXED], dim=1)
            views = [plane.view(num_blocks, 1, size, -1) for plane in planes]
        else:
            views = [cache]
        return [view.view(torch.uint8) for view in views]


Blocks = tuple[tuple[int, ...], ...]
"""By group: a block is only ever of one."""


class Model:
    """What a model has computed: distinct bytes for each layer, head and token."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._random = torch.Generator().manual_seed(1)
        self._known: dict[tuple[str, int], torch.Tensor] = {}

    def _of(self, rank: Rank, layer: str, head: int) -> list[torch.Tensor]:
        """[token, byte], by part."""
        sizes = [part.shape[-1] for part in rank.parts(layer)]
        if (layer, head) not in self._known:
            shape = (self.num_tokens, sum(sizes))
            self._known[layer, head] = torch.randint(
                0, 256, shape, dtype=torch.uint8, generator=self._random
            )
        known: Any = self._known[layer, head]
        return list(known.split(sizes, dim=-1))

    def _places(self, rank: Rank, blocks: Blocks) -> Iterator[tuple[torch.Tensor, ...]]:
        """Pairs of what a part of a block holds, and what it should."""
        for layer, group in rank.groups.items():
            parts = rank.parts(layer)
            for index, head in enumerate(rank.heads(layer)):
                for part, known in zip(parts, self._of(rank, layer, head), strict=True):
                    in_block = len(part) // NUM_BLOCKS  # of the kernel's
                    size = part.shape[2]
                    numbers = [b * in_block + n for b in blocks[group] for n in range(in_block)]
                    for place, number in enumerate(numbers):
                        yield part[number, index], known[place * size : (place + 1) * size]

    def fill(self, rank: Rank, blocks: Blocks) -> None:
        for held, known in self._places(rank, blocks):
            held.copy_(known)

    def is_in(self, rank: Rank, blocks: Blocks) -> bool:
        return all(torch.equal(held, known) for held, known in self._places(rank, blocks))


def whole_blocks(rank: Rank) -> str:
    """A block's bytes are those that our code names, and no others. Of a region that groups share,
    a block has the length of the longest."""
    memory = rank.memory
    regions = {region.base_addr: region for region in rank.regions}
    shares = len(set(rank.groups.values())) > 1
    is_right = shares or [region.name for region in rank.regions] == rank.kind.layers
    for layer in rank.kind.layers:
        cache = rank.caches[layer].view(torch.uint8)
        view = cache.view(NUM_BLOCKS, -1, *cache.shape[1:])
        region = regions[view.data_ptr()]
        length = view[0].numel()
        for block in (0, 4, NUM_BLOCKS - 1):
            view[block] = 1
            start = region.base_addr + block * region.block_stride - memory.data_ptr()
            named = memory[start : start + region.block_len]
            is_right &= int(named.sum()) == int(memory.sum()) == length
            is_right &= len(named) == length or (shares and length < len(named))
            view[block] = 0
    return RIGHT if is_right else WRONG


def _addresses(rows: Rows, descriptors: Sequence[int]) -> list[tuple[int, int]]:
    """Address and length of NIXL's descriptors, which are numbered through the rows."""
    ends = np.cumsum(rows[:, 4].astype(np.int64))
    found = []
    for number in descriptors:
        row = int(np.searchsorted(ends, number, side="right"))
        address, length, _, stride, count = (int(value) for value in rows[row])
        found.append((address + (number - int(ends[row]) + count) * stride, length))
    return found


def copy(layout: PeerLayout, batch: Batch, *, is_write: bool = False) -> None:
    """Move what NIXL would."""
    sides = [
        _addresses(layout.local.rows, batch.local.tolist()),
        _addresses(layout.remote.rows, batch.remote.tolist()),
    ]
    targets, sources = sides[::-1] if is_write else sides
    for (to, length), (source, same) in zip(targets, sources, strict=True):
        assert length == same
        ctypes.memmove(to, source, length)


def moved(theirs: Sequence[Rank], ours: Sequence[Rank], *, permute: bool = False) -> str:
    """Each of our ranks reads a prompt of all ranks that hold some of its heads."""
    sizes = ours[0].geometry.block_size, theirs[0].geometry.block_size
    num_tokens = max(sizes) * (2 if max(sizes) <= 2 * min(sizes) else 1)
    # Neither in order nor at the same places.
    groups = len(set(ours[0].groups.values()))
    local: Blocks = ((4, 1, 5, 3), (8, 9, 2, 6))[:groups]
    remote: Blocks = ((2, 5, 1, 7), (6, 3, 8, 4))[:groups]
    local = tuple(ours[0].blocks(group, num_tokens, ids) for group, ids in enumerate(local))
    remote = tuple(theirs[0].blocks(group, num_tokens, ids) for group, ids in enumerate(remote))
    model = Model(num_tokens)
    for rank in theirs:
        model.fill(rank, remote)
    before = [rank.memory.random_().clone() for rank in ours]
    for here in ours:
        for number in here.rank.faces(len(theirs)):
            there = theirs[number]
            layout = match_peer(
                here.geometry,
                here.regions,
                there.metadata,
                here.rank,
                there.rank,
                permute=permute,
            )
            if layout.skips_read:
                continue
            batch = layout.to_read(local, remote, 0, num_tokens, num_tokens)
            copy(layout, batch)
    is_right = all(model.is_in(rank, local) for rank in ours)
    is_right &= all(map(_is_as_before_beside, ours, before, itertools.repeat(local)))
    return RIGHT if is_right else WRONG


def _is_as_before_beside(rank: Rank, before: torch.Tensor, blocks: Blocks) -> bool:
    """No byte has changed but those of these blocks."""
    memory = rank.memory.clone()
    for region in rank.regions:
        groups = blocks if region.group == SHARED else (blocks[region.group],)
        for block in itertools.chain(*groups):
            start = region.base_addr + block * region.block_stride - rank.memory.data_ptr()
            place = slice(start, start + region.block_len)
            memory[place] = before[place]
    return torch.equal(memory, before)


def starts_with(kind: Kind) -> str:
    """The layout that vLLM chooses for an engine with our connector."""
    backend = backend_of(kind)
    size = block_sizes(kind)[0]
    names = [layout.name for layout in get_supported_kv_cache_layouts([backend])]
    config = config_of(kind, size, None, 1)
    specs = [spec_of(kind, layer, size, 1) for layer in kind.layers]
    return str(resolve_kv_cache_layout(config, [names], specs).name)


def verdicts(kind: Kind) -> Iterator[tuple[str, str]]:
    backend = backend_of(kind)
    small, *larger = block_sizes(kind)
    layouts = [
        layout.name
        for layout in get_supported_kv_cache_layouts([backend])
        if layout.is_block_compact or kind.is_of_one_kind  # vLLM takes no other for several kinds
    ]
    yield "starts with", starts_with(kind)
    for layout in layouts:
        yield layout, verdict(lambda layout=layout: whole_blocks(Rank.of(kind, layout, small)))
    if "LBHNC" not in layouts:
        return

    def engine(ranks: int = 1, size: int = small, layout: str = "LBHNC") -> list[Rank]:
        return [Rank.of(kind, layout, size, rank, ranks) for rank in range(ranks)]

    yield "alike", verdict(lambda: moved(engine(), engine()))
    yield "alike, of two ranks", verdict(lambda: moved(engine(2), engine(2)))
    yield "from two ranks to one", verdict(lambda: moved(engine(2), engine()))
    yield "from one rank to two", verdict(lambda: moved(engine(), engine(2)))
    if "LBNHC" in layouts and not backend.is_mla():
        # Of one head, a block is in one piece whatever the layout.
        alone = functools.partial(engine, NUM_HEADS, layout="LBNHC")
        yield "from LBNHC, one head a rank", verdict(lambda: moved(alone(), engine()))
        yield "permuted from it", verdict(lambda: moved(alone(), engine(), permute=True))
    if "BLHNC" in layouts:
        yield "to BLHNC", verdict(lambda: moved(engine(), engine(layout="BLHNC")))
    for size in larger:
        yield "to larger blocks", verdict(lambda size=size: moved(engine(), engine(size=size)))
        yield "to smaller blocks", verdict(lambda size=size: moved(engine(size=size), engine()))
    sizes = kernel_sizes(kind)
    if kind.has_states or any(isinstance(size, MultipleOf) for size in sizes):
        return
    if not backend.supports_block_size(most := 2 * max(sizes)):
        return
    yield "two kernel blocks", verdict(lambda: whole_blocks(Rank.of(kind, "LBHNC", most)))
    smaller = sorted(sizes)[-2:][0]
    for name, theirs, ours in (
        ("two kernel blocks, alike", (1, most), (1, most)),
        ("two kernel blocks, from two ranks to one", (2, most), (1, most)),
        ("two kernel blocks, from one rank to two", (1, most), (2, most)),
        ("two kernel blocks, from smaller blocks", (1, smaller), (1, most)),
        ("two kernel blocks, to smaller blocks", (2, most), (1, smaller)),
    ):
        case = functools.partial(lambda *two: moved(*(engine(*each) for each in two)), theirs, ours)
        yield name, verdict(case)


def verdict(case: Any) -> str:
    try:
        return str(case())
    except (ValueError, PlanError) as error:
        return str(error)


if __name__ == "__main__":
    results = {
        "backends": sorted(AttentionBackendEnum.__members__),
        "verdicts": {kind.name: dict(verdicts(kind)) for kind in KINDS},
    }
    Path(sys.argv[1]).write_text(json.dumps(results))
